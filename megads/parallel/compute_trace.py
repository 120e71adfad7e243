"""Checksums of what a rank computes in a step, so that two computations of the same step can be compared bit for bit.

A wrong value spreads: through a collective to every tensor-parallel rank, through the pipeline to the next stage,
through the loss to all gradients. So a trace is in the order of the computation, and notes what the rank gives to
collectives before they mix it with other ranks'. Of two traces of the same samples the first difference lies where the
computation went wrong, unless it is in a message that the rank received.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megads.batch import MicroBatch

_BLOCK = {"cpu": 2**16, "cuda": 2**22}
"""Words that are multiplied at a time: on a CPU so few that they stay in its cache."""
_MIX = 0x1E3779B97F4A7C15


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, int64 [count], without a pattern that an error could share."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _MIX
    for shift in (30, 27, 31):
        x = (x ^ (x >> shift)) * _MIX
    return x | 1


def checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's words, each times an odd number of its place, modulo 2**64; int64 scalar on its device.

    Any single wrong element changes it, as do two that change places; the sum of other errors vanishes by chance only
    (2**-64). The same bits give the same sum on devices of one type.

    Args:
        tensor: of elements of 2, 4 or 8 bytes.
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
    """Where two traces of the same samples part.

    Attributes:
        place: of the entry in the trace.
        what: it is, and where in the step.
        received: the rank received it; else it computed it.
    """

    place: int
    what: str
    received: bool


class Trace(NamedTuple):
    """What a rank computed in a step, in order.

    Attributes:
        what: each entry is.
        received: whether the rank received it.
        checksums: int64 [entries], on the device.
    """

    what: list[str]
    received: list[bool]
    checksums: Tensor

    def first_difference(self, other: Trace) -> Difference | None:
        """Compares with another computation of the same samples; waits for the device."""
        assert self.what == other.what, "two computations of a step are not alike"
        different = (self.checksums != other.checksums).nonzero()
        if not len(different):
            return None
        place = int(different[0].item())
        return Difference(place, self.what[place], self.received[place])


class ComputeTrace:
    """Notes checksums between `begin` and `end`, and does nothing otherwise.

    Attributes:
        place: what the rank does now, for the names of entries.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, bool, Tensor]] | None = None
        self.place = ""

    @property
    def recording(self) -> bool:
        """Whether entries are noted."""
        return self._entries is not None

    def begin(self) -> None:
        """Notes what comes."""
        self._entries, self.place = [], ""

    def end(self) -> Trace:
        """What was noted."""
        entries, self._entries = self._entries, None
        assert entries, "a step computes something"
        names, received, checksums = zip(*entries, strict=True)
        return Trace(list(names), list(received), torch.stack(checksums))

    def note(self, what: str, tensor: Tensor, *, received: bool = False) -> None:
        """Notes a tensor as it is now.

        Args:
            what: it is.
            tensor: of this rank.
            received: another rank computed it.
        """
        if self._entries is not None:
            where = f"{what} ({self.place})" if self.place else what
            self._entries.append((where, received, checksum(tensor)))


def rotated(tensor: Tensor, ranks: Sequence[int], by: int, group: dist.ProcessGroup | None) -> Tensor:
    """What another rank of a line holds in the place of a tensor.

    Args:
        tensor: of equal shape on all ranks of the line, on the device that the group communicates from.
        ranks: of the line.
        by: places from this rank to the one whose tensor is returned.
        group: of the line.
    """
    place, size, received = ranks.index(dist.get_rank()), len(ranks), torch.empty_like(tensor)
    messages = [
        dist.P2POp(dist.isend, tensor, ranks[(place - by) % size], group),
        dist.P2POp(dist.irecv, received, ranks[(place + by) % size], group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def rotated_batches(
    batches: Sequence[MicroBatch], ranks: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of the next rank of a data-parallel line.

    Args:
        batches: of this rank, whole samples.
        ranks: of the line.
        group: of the line.
        device: that it communicates from, and of the result.
    """

    def of_next(tensor: Tensor) -> Tensor:
        return rotated(tensor.to(device).contiguous(), ranks, 1, group)

    def next_one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else of_next(tensor)

    found = []
    for batch in batches:
        info = replace(
            batch.info,
            sample_ids=of_next(batch.info.sample_ids),
            position_ids_bs=next_one(batch.info.position_ids_bs),
            document_starts=next_one(batch.info.document_starts),
        )
        found.append(
            MicroBatch(info, next_one(batch.tokens_bs), next_one(batch.labels_bs), next_one(batch.loss_mask_bs))
        )
    return found
