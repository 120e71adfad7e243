"""Checksums of the tensors that a rank computes in a step, for a bitwise comparison of two computations of a step.

A wrong value spreads: through a collective to every tensor-parallel rank, through the pipeline to the next stage,
through the loss to all gradients. A trace is therefore in the order of the computation, and records the inputs of
collectives, to which other ranks have not contributed yet. The first entry in which two traces of the same samples
differ is where the computation went wrong, unless the rank received that tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megads.batch import MicroBatch

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
        tensor: tensor with elements of 2, 4 or 8 bytes.
    """
    types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
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


class ComputeTrace:
    """Records checksums between `begin` and `end`, and does nothing otherwise.

    Attributes:
        context: current computation of the rank; part of the names of entries.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, bool, Tensor]] | None = None
        self.context = ""

    @property
    def recording(self) -> bool:
        """Whether entries are recorded."""
        return self._entries is not None

    def begin(self) -> None:
        """Starts a trace."""
        self._entries, self.context = [], ""

    def end(self) -> Trace:
        """Ends the trace and returns it."""
        entries, self._entries = self._entries, None
        assert entries, "a step computes something"
        names, received, checksums = zip(*entries, strict=True)
        return Trace(list(names), list(received), torch.stack(checksums))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        entries, self._entries = self._entries, None
        try:
            yield
        finally:
            self._entries = entries

    def record(self, name: str, tensor: Tensor, *, received: bool = False) -> None:
        """Adds an entry with the checksum of a tensor's current values.

        Args:
            name: name of the tensor.
            tensor: tensor on this rank.
            received: whether another rank computed it.
        """
        if self._entries is not None:
            where = f"{name} ({self.context})" if self.context else name
            self._entries.append((where, received, checksum(tensor)))


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
