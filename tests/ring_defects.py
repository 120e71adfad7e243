"""Defects of ring attention, which tests/test_mutants.py applies to the running code."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megads.ops.block_attention import BlockAttention, RunningSoftmax
from megads.parallel import context, ring_shifts
from megads.parallel.context import _WindowParts
from megads.parallel.ring import _Ring, _Transfer
from megads.parallel.ring_shifts import Shift


def _moved(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)


def keys_of_the_next_rank() -> None:
    """Keys of other ranks are taken for those one rank, hence one chunk, further on."""
    inner = _Ring.pairs

    def pairs(self: _Ring, keys: Any) -> Any:
        found = inner(self, keys)
        if keys == self.own:
            return found
        return [(seeing, _moved(seen, min(self._chunk, seeing.start - seen.start)), at) for seeing, seen, at in found]

    _Ring.pairs = pairs


def parts_added_without_their_weights() -> None:
    """Every block's output counts as much as that of all blocks before it."""

    def add(self: RunningSoftmax, rows: slice, out_bnsd: Tensor, lse_bns: Tensor) -> None:
        self.out_bnsd[:, :, rows] += out_bnsd
        self.lse_bns[:, :, rows] = self.lse_bns[:, :, rows].logaddexp(lse_bns)

    RunningSoftmax.add = add


def windows_counted_from_the_start_of_a_block() -> None:
    """The mask of a block takes its queries' and its keys' first positions for zero, as if each began the sample."""
    inner = BlockAttention._logits

    def logits(self: BlockAttention, q: Tensor, k: Tensor, queries: range, keys: range, starts: Any) -> Any:
        if queries.start >= keys.stop:
            queries, keys = range(len(queries)), range(len(keys))
        return inner(self, q, k, queries, keys, starts)

    BlockAttention._logits = logits


def windows_ignored_by_what_is_sent() -> None:
    """A rank is sent one chunk per window less than its queries see."""
    inner = ring_shifts.keys_needed

    def needed(receiver: int, owner: int, size: int, chunk: int, window: int | None) -> Any:
        return inner(receiver, owner, size, chunk, None if window is None else max(1, window - chunk))

    ring_shifts.keys_needed = context.keys_needed = needed


def gradients_of_windows_stay() -> None:
    """The gradients of a rank's keys leave out those of other ranks' queries, whose windows reach them."""
    inner = _WindowParts.exchange

    def exchange(self: _WindowParts, sent: Any, leaving: Any, arriving: Any) -> Any:
        found = inner(self, sent, leaving, arriving)
        return [part.zero_() for part in found] if arriving is self.leaving else found

    _WindowParts.exchange = exchange


class _Delivered:
    """A transfer whose block is cut, or padded with zeros, to the rows that the receiver expects."""

    def __init__(self, transfer: _Transfer, rows: int) -> None:
        self._transfer, self._rows = transfer, rows

    def wait(self) -> Tensor:
        found = self._transfer.wait()
        return pad(found, (0, 0, 0, self._rows - found.shape[3]))


def gradients_returned_to_the_next_rank() -> None:
    """Gradients of keys and values go to the rank after their owner."""

    def back(self: _Ring, shift: Shift, grads: Tensor) -> Any:
        size, place = self.axis.size, self.shifts.index(shift)
        sender = (shift.target - 1) % size
        sent = ring_shifts.ring_shifts(sender, size, self._chunk, self.block.window)[place].arriving
        transfer = _Transfer(self.axis, grads, (shift.source + 1) % size, sender, sum(map(len, sent)))
        return _Delivered(transfer, sum(map(len, shift.leaving)))

    _Ring.return_gradients = back


def gradients_of_one_block_alone() -> None:
    """The gradients of a rank's keys leave out those of other ranks' queries."""
    inner = _Ring.return_gradients
    _Ring.return_gradients = lambda self, shift, grads: inner(self, shift, grads.zero_())


def dropout_of_each_block() -> None:
    """The dropout mask of every block begins with the sample's first key."""
    inner = BlockAttention._keep
    BlockAttention._keep = lambda self, weights, queries, keys: inner(self, weights, queries, range(len(keys)))


def sinks_in_every_block() -> None:
    """Attention sinks count once for each block instead of once."""
    inner, first = RunningSoftmax.add, RunningSoftmax.__init__

    def init(self: RunningSoftmax, q: Tensor, sinks: Tensor | None) -> None:
        first(self, q, sinks)
        self.sinks = sinks  # type: ignore[attr-defined]

    def add(self: RunningSoftmax, rows: slice, out: Tensor, lse: Tensor) -> None:
        sinks = self.sinks  # type: ignore[attr-defined]
        if sinks is not None:
            lse = lse.logaddexp(sinks.to(lse.dtype)[:, None])
        inner(self, rows, out, lse)

    RunningSoftmax.__init__, RunningSoftmax.add = init, add  # type: ignore[method-assign]
