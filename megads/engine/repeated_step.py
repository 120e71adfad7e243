"""Repeats the forward and backward passes of a step from the same weights, and compares them bit for bit.

Data-parallel ranks hold the same weights, so each also computes the samples of the next rank, which also detects a
processor that makes the same error every time. The last computation of a rank is on its own samples; its gradients are
reduced and applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megads.batch import MicroBatch
from megads.engine.interface import ComputeComparison
from megads.model.config import HEAD
from megads.parallel.compute_trace import Difference, Trace, next_rank_batches, ring_shift
from megads.parallel.grid import ParallelGrid


class _Computation(NamedTuple):
    """One computation of this rank's samples.

    Attributes:
        trace: trace of the rank that computed them.
        loss_sum: sum of their losses, if this rank computed them and holds the last stage.
    """

    trace: Trace
    loss_sum: Tensor | None = None

    def difference(self, other: _Computation) -> Difference | None:
        return self.trace.first_difference(other.trace)


@dataclass(frozen=True)
class RepeatedStep:
    """Computes one step several times.

    Attributes:
        grid: the ranks.
        layers: layers of this rank, with their names in the whole model.
        compute: runs forward and backward passes of micro-batches with whole samples, without reducing or applying
            gradients.
        forget: discards the gradients that `compute` has accumulated.
        device: device of this rank.
    """

    grid: ParallelGrid
    layers: Sequence[tuple[str, nn.Module]]
    compute: Callable[[Sequence[MicroBatch]], Tensor | None]
    forget: Callable[[], None]
    device: torch.device

    def run(
        self, micro_batches: Sequence[MicroBatch], judge: Callable[[list[ComputeComparison]], None]
    ) -> Tensor | None:
        """Computes the step twice, and twice more if the two differ; collective over the world.

        Args:
            micro_batches: micro-batches of this rank, with whole samples.
            judge: called with the comparisons of all ranks if computations differ; raises if training must end.

        Returns:
            The sum of the losses on ranks of the last stage. The accumulated gradients are those of the rank's own
            samples.
        """
        handles = [
            layer.register_forward_hook(partial(self._record_output, name))
            for name, layer in self.layers
            if name != HEAD
        ]
        try:
            next_batches = self._next_rank_batches(micro_batches)
            first, second = self._compute_on_peer(next_batches), self._compute(micro_batches)
            if not self.grid.control.any(first.difference(second) is not None):
                return second.loss_sum
            third, fourth = self._compute_on_peer(next_batches), self._compute(micro_batches)
            comparison = ComputeComparison(
                self.grid.rank,
                self._peer,
                (self.grid.pp.rank, self.grid.dp.rank),
                by_rank=second.difference(fourth),
                by_peer=first.difference(third),
                across=third.difference(fourth),
            )
            judge(self.grid.control.gather(comparison, ComputeComparison))
            return fourth.loss_sum
        finally:
            for handle in handles:
                handle.remove()

    @property
    def _peer(self) -> int:
        """The rank that also computes this rank's samples; this rank itself if no other one holds the same weights."""
        dp = self.grid.dp
        return dp.ranks[(dp.rank - 1) % dp.size]

    def _next_rank_batches(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        dp = self.grid.dp
        if dp.size == 1:
            return micro_batches
        return next_rank_batches(micro_batches, dp.ranks, dp.group, self.device)

    def _compute_on_peer(self, next_batches: Sequence[MicroBatch]) -> _Computation:
        """Computes the samples of the next rank; returns the peer's computation of this rank's samples."""
        trace, dp = self._compute(next_batches).trace, self.grid.dp
        if dp.size == 1:
            return _Computation(trace)
        return _Computation(trace._replace(checksums=ring_shift(trace.checksums, dp.ranks, -1, dp.group)))

    def _compute(self, micro_batches: Sequence[MicroBatch]) -> _Computation:
        self.forget()
        trace = self.grid.trace
        trace.begin()
        loss_sum = self.compute(micro_batches)
        return _Computation(trace.end(), loss_sum)

    def _record_output(self, name: str, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.grid.trace.record(f"the output of {name}", output)
