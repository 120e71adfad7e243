"""Python's cyclic garbage collector at fixed steps, the same on all ranks.

Left to itself the collector runs when one process has allocated enough objects: every rank pauses at steps of its own,
and all others wait for it at the next collective. So it is switched off during training and called on every rank at the
same steps, as Megatron-LM (--manual-gc) and torchtitan do. Reference counting frees the tensors of a step meanwhile:
they are in no reference cycle.
"""

from __future__ import annotations

import gc

from megads.runtime.hooks import StepInfo, TrainState

GENERATION = 1
"""Older objects are those of the run itself; a scan of them takes a second and finds nothing."""


class GarbageCollectionHook:
    """Collects garbage after every `interval_steps` steps, and never in between.

    Args:
        interval_steps: steps from one collection to the next; None leaves the collector to Python.
    """

    def __init__(self, interval_steps: int | None) -> None:
        self._interval_steps = interval_steps

    def on_start(self, state: TrainState) -> None:
        if self._interval_steps is not None:
            gc.collect()
            gc.freeze()
            gc.disable()

    def on_step(self, info: StepInfo) -> None:
        if self._interval_steps is not None and info.step % self._interval_steps == 0:
            gc.collect(GENERATION)

    def on_end(self, state: TrainState) -> None:
        if self._interval_steps is not None:
            gc.enable()
            gc.unfreeze()
