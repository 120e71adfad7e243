"""Repeats the forward and backward passes of a step from the same weights, and compares them bit for bit.

Data-parallel ranks hold the same weights, so each also computes the samples of the next rank, which also detects a
processor that makes the same error every time. The last computation of a rank is on its own samples; its gradients are
reduced and applied.

Checksums of the tensors that a rank computes are compared, in their order (`megads.parallel.grid.ComputeTrace`). The
first entry in which two traces of the same samples differ is where the computation went wrong, unless the rank received
that tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.api import HEAD, MicroBatch, ParallelGrid
from megads.engine.interface import StepPasses

_BLOCK = {"cpu": 2**16, "cuda": 2**22}
"""Number of words that are multiplied at a time; on a CPU, few enough to stay in its cache."""
_MIX = 0x1E3779B97F4A7C15


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    """Pseudorandom odd 64-bit numbers, int64 [count]."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX
    for shift in (30, 27, 31):
        x = (x ^ (x >> shift)) * _MIX
    return x | 1


def checksum(tensor: Tensor) -> Tensor:
    """Order-dependent checksum of a tensor's bits, int64 scalar on the tensor's device.

    The sum modulo 2**64 of the tensor's words, each multiplied by an odd number that depends on its index. A single
    wrong element always changes the checksum, other errors with probability 1 - 2**-64. The same bits give the same
    checksum on all devices of a type.

    Args:
        tensor: tensor with elements of 1, 2, 4 or 8 bytes.
    """
    types = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.detach().contiguous().view(-1).view(types[tensor.element_size()])
    block = _BLOCK.get(words.device.type, _BLOCK["cuda"])
    weights = _weights(min(block, max(1, words.numel())), words.device)
    sums = [(part.to(torch.int64) * weights[: part.numel()]).sum() for part in words.split(block)]
    if len(sums) == 1:
        return sums[0]
    return (torch.stack(sums) * _weights(len(sums), words.device)).sum()


class Difference(NamedTuple):
    """The first entry in which two traces of the same samples differ.

    Attributes:
        entry: index in the trace.
        name: name of the tensor, and where in the step it was recorded.
        received: whether the rank received the tensor from another rank, instead of computing it.
    """

    entry: int
    name: str
    received: bool


class Trace(NamedTuple):
    """Checksums of the tensors of a rank in a step, in order.

    Attributes:
        names: name of each entry.
        received: whether the rank received the tensor of each entry from another rank.
        checksums: int64 [entries], on the device.
    """

    names: list[str]
    received: list[bool]
    checksums: Tensor

    def first_difference(self, other: Trace) -> Difference | None:
        """Compares with another computation of the same samples; synchronizes with the device."""
        assert self.names == other.names, "two computations of a step record different tensors"
        different = (self.checksums != other.checksums).nonzero()
        if not len(different):
            return None
        entry = int(different[0].item())
        return Difference(entry, self.names[entry], self.received[entry])


class ComputeComparison(NamedTuple):
    """Comparison of four computations of one rank's samples in a step: two by the rank and two by its peer.

    Attributes:
        rank: rank that the samples belong to.
        peer: the other rank that computed them; the rank itself if no other rank holds the same weights.
        coordinates: pipeline rank, and index among the data-parallel ranks with the same weights. Ranks with equal
            coordinates exchange tensors within a pass. They run the same collectives in the same order, so the indices
            of their traces are comparable.
        by_rank: first difference between the rank's two computations; None if there is none.
        by_peer: first difference between the peer's two computations.
        across: first difference between the last computations of rank and peer.
    """

    rank: int
    peer: int
    coordinates: tuple[int, int]
    by_rank: Difference | None
    by_peer: Difference | None
    across: Difference | None


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
        device: device of this rank.
        step: the passes of the step.
    """

    grid: ParallelGrid
    device: torch.device
    step: StepPasses

    def run(self, judge: Callable[[list[ComputeComparison]], None]) -> Tensor | None:
        """Computes the step twice, and twice more if the two differ; collective over the world.

        Args:
            judge: called with the comparisons of all ranks if computations differ; raises if training must end.

        Returns:
            The sum of the losses on ranks of the last stage. The accumulated gradients are those of the rank's own
            samples.
        """
        handles = [
            layer.register_forward_hook(partial(self._record_output, name))
            for name, layer in self.step.layers
            if name != HEAD
        ]
        try:
            micro_batches, copies = self.step.micro_batches, self._copies
            next_batches = micro_batches
            if len(copies) > 1:
                next_batches = next_rank_batches(micro_batches, copies, self.grid.dp.group, self.device)
            first, second = self._compute_on_peer(next_batches), self._compute(micro_batches)
            if not self.grid.control.any(first.difference(second) is not None):
                return second.loss_sum
            third, fourth = self._compute_on_peer(next_batches), self._compute(micro_batches)
            comparison = ComputeComparison(
                self.grid.rank,
                self._peer,
                (self.grid.pp.rank, copies.index(self.grid.rank)),
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
    def _copies(self) -> list[int]:
        """The data-parallel ranks that hold the same weights as this one, in order: the same experts.

        All ranks that exchange tokens with this one have as many, and compute for the ones that exchange tokens with
        the next copy.
        """
        return [rank for rank in self.grid.dp.ranks if rank in self.grid.expert_data.ranks]

    @property
    def _peer(self) -> int:
        """The rank that also computes this rank's samples; this rank itself if no other one holds the same weights."""
        return self._copies[self._copies.index(self.grid.rank) - 1]

    def _compute_on_peer(self, next_batches: Sequence[MicroBatch]) -> _Computation:
        """Computes the samples of the next rank; returns the peer's computation of this rank's samples."""
        trace, copies = self._compute(next_batches).trace, self._copies
        if len(copies) == 1:
            return _Computation(trace)
        return _Computation(trace._replace(checksums=ring_shift(trace.checksums, copies, -1, self.grid.dp.group)))

    def _compute(self, micro_batches: Sequence[MicroBatch]) -> _Computation:
        self.step.forget()
        trace, entries = self.grid.trace, list[tuple[str, bool, Tensor]]()
        trace.context = ""
        trace.recorder = lambda name, tensor, received: entries.append((name, received, checksum(tensor)))
        try:
            loss_sum = self.step.run_alone(micro_batches)
        finally:
            trace.recorder = None
        names, received, checksums = zip(*entries, strict=True)
        return _Computation(Trace(list(names), list(received), torch.stack(checksums)), loss_sum)

    def _record_output(self, name: str, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.grid.trace.record(f"the output of {name}", output)


def ring_shift(tensor: Tensor, ranks: Sequence[int], shift: int, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the tensor of the rank `shift` places after this one in a ring; collective over the group.

    Args:
        tensor: tensor of the same shape on all ranks of the group, on the group's communication device.
        ranks: global ranks of the group, in the order of the ring.
        shift: number of places, may be negative.
        group: process group of the ranks.
    """
    own, size, received = ranks.index(dist.get_rank()), len(ranks), torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, tensor, ranks[(own - shift) % size], group),
        dist.P2POp(dist.irecv, received, ranks[(own + shift) % size], group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def next_rank_batches(
    batches: Sequence[MicroBatch], ranks: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[MicroBatch]:
    """Returns the micro-batches of the next data-parallel rank; collective over the group.

    Args:
        batches: micro-batches of this rank, of whole samples.
        ranks: global ranks of the group, in the order of the ring.
        group: process group of the ranks.
        device: communication device of the group, and device of the result.
    """

    def shifted(tensor: Tensor) -> Tensor:
        return ring_shift(tensor.to(device).contiguous(), ranks, 1, group)

    def shifted_or_none(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else shifted(tensor)

    found = []
    for batch in batches:
        info = replace(
            batch.info,
            sample_ids=shifted(batch.info.sample_ids),
            position_ids_bs=shifted_or_none(batch.info.position_ids_bs),
            document_starts=shifted_or_none(batch.info.document_starts),
            host_document_starts=None,
        )
        samples = (shifted_or_none(x_bs) for x_bs in (batch.tokens_bs, batch.labels_bs, batch.loss_mask_bs))
        found.append(MicroBatch(info, *samples))
    return found
