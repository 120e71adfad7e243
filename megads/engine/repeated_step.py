"""Computes the forward and backward passes of a step again, from the same weights, and compares them bit for bit.

The second computation runs on other processors where there are any: data-parallel ranks hold the same weights, so each
computes the samples of the next one. Then a processor that always makes the same mistake is found, too. The last
computation is each rank's own, and it is the one whose gradients are reduced and applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megads.batch import MicroBatch
from megads.engine.interface import Repeated
from megads.model.stage_names import HEAD
from megads.parallel.compute_trace import Difference, Trace, rotated, rotated_batches
from megads.parallel.grid import ParallelGrid


class _Computed(NamedTuple):
    """A computation of this rank's samples, and its loss where it was made here on the last stage."""

    trace: Trace
    loss_sum: Tensor | None = None


@dataclass(frozen=True)
class RepeatedStep:
    """Computes one step several times.

    Attributes:
        grid: the ranks.
        layers: of this rank, by their names in the whole model.
        compute: one forward and backward pass over micro-batches of whole samples, no gradient reduced or applied.
        forget: drops the gradients that `compute` has left.
        device: where this rank computes.
    """

    grid: ParallelGrid
    layers: Sequence[tuple[str, nn.Module]]
    compute: Callable[[Sequence[MicroBatch]], Tensor | None]
    forget: Callable[[], None]
    device: torch.device

    def run(
        self, micro_batches: Sequence[MicroBatch], judge: Callable[[list[Repeated]], None], *, known: bool = False
    ) -> Tensor | None:
        """Computes the step twice, and twice more where the two differ; collective over the world.

        Args:
            micro_batches: of this rank, whole samples.
            judge: is given what all ranks saw when computations differed, and raises where training must not go on.
            known: the step was computed before, and its gradients are still there.

        Returns:
            The sum of the losses where the last stage is; the gradients are those of this rank's own samples.
        """
        handles = self._watch_layers()
        try:
            if known:
                self.forget()
            theirs = self._of_next_rank(micro_batches)
            first, second = self._elsewhere(theirs), self._here(micro_batches)
            if not self.grid.control.any(_parted(first, second) is not None):
                return second.loss_sum
            self.forget()
            third, fourth = self._elsewhere(theirs), self._here(micro_batches)
            mine = Repeated(
                self.grid.rank,
                self._peer,
                (self.grid.pp.rank, self.grid.dp.rank),
                here=_parted(second, fourth),
                elsewhere=_parted(first, third),
                between=_parted(third, fourth),
            )
            judge(self.grid.control.gather(mine, Repeated))
            return fourth.loss_sum
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _peer(self) -> int:
        """The rank that computes this rank's samples, too: this one itself where no other holds the same weights."""
        dp = self.grid.dp
        return dp.ranks[(dp.rank - 1) % dp.size]

    def _of_next_rank(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        dp = self.grid.dp
        if dp.size == 1:
            return micro_batches
        return rotated_batches(micro_batches, dp.ranks, dp.group, self.device)

    def _elsewhere(self, theirs: Sequence[MicroBatch]) -> _Computed:
        """This rank computes the samples of the next one, and returns what the one before computed of its own."""
        trace, dp = self._here(theirs).trace, self.grid.dp
        self.forget()
        if dp.size == 1:
            return _Computed(trace)
        return _Computed(trace._replace(checksums=rotated(trace.checksums, dp.ranks, -1, dp.group)))

    def _here(self, micro_batches: Sequence[MicroBatch]) -> _Computed:
        trace = self.grid.trace
        trace.begin()
        loss_sum = self.compute(micro_batches)
        return _Computed(trace.end(), loss_sum)

    def _watch_layers(self) -> list[RemovableHandle]:
        handles = []
        for name, layer in self.layers:
            if name != HEAD:
                handles.append(layer.register_forward_hook(partial(self._note_output, name)))
        return handles

    def _note_output(self, name: str, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.grid.trace.note(f"the output of {name}", output)


def _parted(one: _Computed, other: _Computed) -> Difference | None:
    return one.trace.first_difference(other.trace)


def own_norms(norms: Iterable[Tensor]) -> list[float]:
    """2-norms of a rank's own gradients, on the host."""
    held = list(norms)
    return torch.stack(held).tolist() if held else []
