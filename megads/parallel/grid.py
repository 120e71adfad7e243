"""Which rank holds what: one frozen value that is passed, never fetched; `rank_order` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megads.errors import ConfigError
from megads.parallel.compute_trace import ComputeTrace
from megads.parallel.config import AXES, ParallelConfig
from megads.parallel.rank_order import axis_lines, padded_rows
from megads.runtime.distributed import ALONE, ControlPlane, open_control_plane


@dataclass(frozen=True)
class Axis:
    """One axis of the grid, seen from this rank.

    Attributes:
        rank: this rank's coordinate along the axis.
        ranks: global ranks of this rank's line along the axis, in order.
        group: their process group; None when the axis has size 1 or nothing is distributed.
        trace: compute trace of this rank, the same for all axes of a grid.
    """

    rank: int
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    trace: ComputeTrace = field(default_factory=ComputeTrace, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def recorded(self, x: Tensor) -> Tensor:
        """Records x, which is to be the input of a collective of the axis, in the compute trace; returns x.

        Compiled code records nothing: recording would change what the compiler fuses.
        """
        if not torch.compiler.is_compiling():
            self.trace.record("a message", x)
        return x


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
        trace: compute trace of this rank; records only while a step is checked (TrainEngine.check_compute).
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
    trace: ComputeTrace = field(default_factory=ComputeTrace, compare=False, repr=False)


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
    trace = ComputeTrace()

    def axis(name: str) -> Axis:
        lines = axis_lines(name, parallel)
        key = tuple(lines)
        if key not in known:  # data is dp, or cp, where the other has size 1
            known[key] = _join(lines, rank, control.timeout, trace)
        return known[key]

    axes = {name: axis(name) for name in (*AXES, "data", "shard", "replica")}
    return ParallelGrid(rank, world_size, **axes, control=control, trace=trace)


def _join(lines: list[tuple[int, ...]], rank: int, timeout: timedelta | None, trace: ComputeTrace) -> Axis:
    """Makes a group of every line, on all ranks in the same order; returns the axis along this rank's.

    Groups that only their members make (use_local_synchronization) are named by how many groups each member is in so
    far: where that differs, as after those of a pipeline's messages, the members would wait for each other for ever.
    """
    mine: Axis | None = None
    for line in lines:
        group = dist.new_group(list(line), timeout=timeout) if len(line) > 1 else None
        if rank in line:
            mine = Axis(line.index(rank), line, group, trace)
    assert mine is not None
    return mine


def single_rank_grid() -> ParallelGrid:
    """The grid of one process, no process group needed."""
    alone = Axis(0, (0,), None)
    return ParallelGrid(0, 1, tp=alone, cp=alone, pp=alone, dp=alone, data=alone, shard=alone, replica=alone)


def own_rows(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(start, valid): the vocabulary's row that this rank's first one is, and how many of its rows are no padding."""
    rows = padded_rows(vocab_size, axis.size)
    start = axis.rank * rows
    return start, max(0, min(rows, vocab_size - start))
