"""The part of an engine that saving calls, and a step of the training loop around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.rank_file import Rectangle
from megads.engine.interface import Shard
from megads.parallel.grid import single_rank_grid
from megads.runtime.distributed import open_control_plane
from megads.runtime.hooks import StepInfo, TrainState
from tests.checkpoint.random_layouts import global_tensors, shards_of

Part = tuple[str, Rectangle]
"""Key of a tensor, and a rectangle of it."""


class SteppedEngine:
    """Tensors that every step overwrites in place: after step n they are those of seed n.

    Args:
        owned: parts that this rank owns.
        others: parts that it holds in addition.
    """

    optimizer_steps = 0

    def __init__(self, owned: Sequence[Part], others: Sequence[Part] = ()) -> None:
        control = open_control_plane()
        self.grid = replace(single_rank_grid(), rank=control.rank, control=control)
        self._num_owned, self._layout = len(owned), [*owned, *others]
        self._shards = shards_of(self._layout, global_tensors(0))
        self._wait: Callable[[], None] | None = None

    def named_shards(self, owned: bool = True) -> list[Shard]:
        return self._shards[: self._num_owned] if owned else self._shards

    def before_update(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Waits, as an optimizer step does before it changes the tensors."""
        if self._wait is not None:
            self._wait()

    def step(self, number: int) -> None:
        self.wait()
        for shard, now in zip(self._shards, shards_of(self._layout, global_tensors(number)), strict=True):
            shard.tensor.copy_(now.tensor)


def take_step(
    engine: SteppedEngine, state: TrainState, hook: CheckpointHook, *, last: bool = False, skipped: bool = False
) -> None:
    """Takes one step of the loop; a skipped step leaves the tensors unchanged."""
    state.step = step = state.step + 1
    state.samples, state.tokens = 8 * step, 80 * step
    if not skipped:
        engine.step(step)
    hook.on_step(
        StepInfo(
            step=step, samples=8 * step, tokens=80 * step, loss=1.0, grad_norm=1.0, lr=1e-3, global_batch_size=8,
            seq_len=10, step_time_s=0.1, data_time_s=0.0, skipped=skipped, culprit="", batch_hash="", last=last,
        )
    )  # fmt: skip
