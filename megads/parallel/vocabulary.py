"""The vocabulary's rows, cut over tensor-parallel ranks."""

from __future__ import annotations

from megads.parallel.grid import Axis


def padded_rows(vocab_size: int, size: int) -> int:
    """Rows each rank holds so that all hold the same number; those beyond the vocabulary are padding."""
    return -(-vocab_size // size)


def own_rows(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(start, valid): the vocabulary's row that this rank's first one is, and how many of its rows are no padding."""
    rows = padded_rows(vocab_size, axis.size)
    start = axis.rank * rows
    return start, max(0, min(rows, vocab_size - start))
