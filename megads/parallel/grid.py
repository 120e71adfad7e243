"""Which rank holds what: one frozen value that is passed, never fetched.

Unless `parallel.rank_order` says otherwise ranks are numbered with tensor parallelism innermost, then context, then
pipeline, then data outermost: the chattiest axes stay inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megads.errors import ConfigError
from megads.parallel.config import AXES, ParallelConfig
from megads.runtime.distributed import ALONE, ControlPlane, open_control_plane


@dataclass(frozen=True)
class Axis:
    """One axis of the grid, seen from this rank.

    Attributes:
        rank: this rank's coordinate along the axis.
        ranks: global ranks of this rank's line along the axis, in order.
        group: their process group; None when the axis has size 1 or nothing is distributed.
    """

    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelGrid:
    """This rank's place in the grid of tp x cp x pp x dp ranks.

    Attributes:
        rank: global rank.
        world_size: all ranks.
        tp, cp, pp, dp: the axes.
        data: context and data parallel together: the ranks that hold the same weights and see other tokens, over which
            gradients reduce and ZeRO shards. In the order of global ranks.
        shard: this rank's subgroup of `data`, over which ZeRO shards; all of it unless parallel.zero_shard_size is set.
        replica: ranks of `data` with the same shard, one in each subgroup.
        control: of all ranks, for what is no tensor.
    """

    rank: int
    world_size: int
    tp: Axis
    cp: Axis
    pp: Axis
    dp: Axis
    data: Axis
    shard: Axis
    replica: Axis
    control: ControlPlane = ALONE


class GridCoordinate(NamedTuple):
    """Coordinates of a rank."""

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
    """All lines of global ranks along "tp", "cp", "pp", "dp", "data", "shard" or "replica", in one order on every rank.

    A line is in ascending order of global ranks, as process groups number their members; along a single axis that is
    also the order of the coordinate.
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


def build_grid(
    parallel: ParallelConfig, rank: int, world_size: int, control: ControlPlane | None = None
) -> ParallelGrid:
    """Makes the groups of this rank's lines; to be called on every rank.

    Args:
        parallel: the layout.
        rank: global rank.
        world_size: all ranks.
        control: of all ranks, whose timeout the groups take, too; None opens one.

    Raises:
        ConfigError: the layout does not fill the world.
    """
    if parallel.world_size != world_size:
        sizes = [getattr(parallel, name) for name in AXES]
        raise ConfigError(
            f"parallel.{' * '.join(AXES)} = {' * '.join(map(str, sizes))} = {parallel.world_size}, "
            f"but {world_size} processes were started"
        )
    control = control or open_control_plane()
    known: dict[tuple[tuple[int, ...], ...], Axis] = {}

    def axis(name: str) -> Axis:
        lines = axis_lines(name, parallel)
        key = tuple(lines)
        if key not in known:  # data is dp, or cp, where the other has size 1
            known[key] = _join(lines, rank, control.timeout)
        return known[key]

    axes = {name: axis(name) for name in (*AXES, "data", "shard", "replica")}
    return ParallelGrid(rank, world_size, **axes, control=control)


def _join(lines: list[tuple[int, ...]], rank: int, timeout: timedelta | None) -> Axis:
    """Makes a group of every line, on all ranks in the same order; returns the axis along this rank's.

    Groups that only their members make (use_local_synchronization) are named by how many groups each member is in so
    far: where that differs, as after those of a pipeline's messages, the members would wait for each other for ever.
    """
    mine: Axis | None = None
    for line in lines:
        group = dist.new_group(list(line), timeout=timeout) if len(line) > 1 else None
        if rank in line:
            mine = Axis(line.index(rank), line, group)
    assert mine is not None
    return mine


def single_rank_grid() -> ParallelGrid:
    """The grid of one process, no process group needed."""
    alone = Axis(0, (0,), None)
    return ParallelGrid(0, 1, tp=alone, cp=alone, pp=alone, dp=alone, data=alone, shard=alone, replica=alone)


def padded_rows(vocab_size: int, size: int) -> int:
    """Rows each rank holds so that all hold the same number; those beyond the vocabulary are padding."""
    return -(-vocab_size // size)


def own_rows(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(start, valid): the vocabulary's row that this rank's first one is, and how many of its rows are no padding."""
    rows = padded_rows(vocab_size, axis.size)
    start = axis.rank * rows
    return start, max(0, min(rows, vocab_size - start))
