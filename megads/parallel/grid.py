"""Which rank holds what: one frozen value that is passed, never fetched.

Ranks are numbered with tensor parallelism innermost, then pipeline, then data outermost: the chattiest axis stays
inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig


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
    """This rank's place in the grid of tp x pp x dp ranks."""

    rank: int
    world_size: int
    tp: Axis
    pp: Axis
    dp: Axis


def coordinates(rank: int, parallel: ParallelConfig) -> tuple[int, int, int]:
    """(tp, pp, dp) coordinates of a global rank."""
    tp, rest = rank % parallel.tp, rank // parallel.tp
    return tp, rest % parallel.pp, rest // parallel.pp


def global_rank(tp: int, pp: int, dp: int, parallel: ParallelConfig) -> int:
    """Inverse of `coordinates`."""
    return (dp * parallel.pp + pp) * parallel.tp + tp


def axis_lines(axis: str, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """All lines of global ranks along "tp", "pp" or "dp", in one order on every rank."""
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp}
    others = [name for name in ("dp", "pp", "tp") if name != axis]
    lines = []
    for fixed in product(*(range(sizes[name]) for name in others)):
        place = dict(zip(others, fixed, strict=True))
        lines.append(tuple(global_rank(**place, **{axis: i}, parallel=parallel) for i in range(sizes[axis])))
    return lines


def build_grid(parallel: ParallelConfig, rank: int, world_size: int) -> ParallelGrid:
    """Makes every group of the grid; collective over the world.

    Raises:
        ConfigError: the layout does not fill the world.
    """
    if parallel.world_size != world_size:
        raise ConfigError(
            f"parallel.tp * pp * dp = {parallel.tp} * {parallel.pp} * {parallel.dp} = {parallel.world_size}, "
            f"but {world_size} processes were started"
        )

    def axis(name: str) -> Axis:
        mine: Axis | None = None
        for line in axis_lines(name, parallel):
            group = dist.new_group(list(line)) if len(line) > 1 else None
            if rank in line:
                mine = Axis(line.index(rank), line, group)
        assert mine is not None
        return mine

    return ParallelGrid(rank, world_size, tp=axis("tp"), pp=axis("pp"), dp=axis("dp"))


def single_rank_grid() -> ParallelGrid:
    """The grid of one process, no process group needed."""
    alone = Axis(0, (0,), None)
    return ParallelGrid(0, 1, tp=alone, pp=alone, dp=alone)
