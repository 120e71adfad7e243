"""Mapping between global ranks and coordinates in the grid of tp x cp x pp x dp ranks. Imports no torch.

By default (`parallel.rank_order`), tensor parallelism is innermost, then context, then pipeline, and data parallelism
outermost: the axes that communicate most stay inside a node.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from megads.parallel.config import AXES, ParallelConfig


class GridCoordinate(NamedTuple):
    """Coordinates of a rank in the grid."""

    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp: int = 0


def place_of(rank: int, parallel: ParallelConfig) -> GridCoordinate:
    """Coordinates of a global rank."""
    found = {}
    for axis in parallel.rank_order:
        rank, found[axis] = divmod(rank, getattr(parallel, axis))
    return GridCoordinate(**found)


def rank_at(place: GridCoordinate, parallel: ParallelConfig) -> int:
    """Inverse of `place_of`."""
    rank = 0
    for axis in reversed(parallel.rank_order):
        rank = rank * getattr(parallel, axis) + getattr(place, axis)
    return rank


def axis_lines(axis: str, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Global ranks of all process groups of the axis "tp", "cp", "pp", "dp", "data", "shard" or "replica".

    The result is the same on every rank. Each line is in ascending order of global ranks, as process groups number
    their members; along a single axis that is also the order of the coordinate.
    """
    if axis in ("shard", "replica"):
        size = parallel.shard_size
        data_lines = axis_lines("data", parallel)
        cut = [[line[start : start + size] for start in range(0, len(line), size)] for line in data_lines]
        return [line for subgroups in cut for line in (subgroups if axis == "shard" else zip(*subgroups, strict=True))]
    along = ("cp", "dp") if axis == "data" else (axis,)
    others = [name for name in reversed(AXES) if name not in along]
    lines = []
    for fixed in product(*(range(getattr(parallel, name)) for name in others)):
        start = GridCoordinate(**dict(zip(others, fixed, strict=True)))
        moves = product(*(range(getattr(parallel, name)) for name in along))
        ranks = (rank_at(start._replace(**dict(zip(along, move, strict=True))), parallel) for move in moves)
        lines.append(tuple(sorted(ranks)))
    return lines


def padded_rows(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary per rank, the same on all ranks; rows beyond the vocabulary are padding."""
    return -(-vocab_size // size)
