"""The grid of ranks with its process groups, a frozen value passed as an argument; `config` has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megads.errors import ConfigError
from megads.parallel.config import AXES, ParallelConfig, axis_ranks
from megads.runtime.distributed import ALONE, ControlPlane, open_control_plane


class ComputeTrace:
    """Shows the tensors that a rank computes in a step to a recorder, in the order of the computation.

    A wrong value spreads: through a collective to every tensor-parallel rank, through the pipeline to the next stage,
    through the loss to all gradients. Therefore the inputs of collectives are shown, to which other ranks have not
    contributed yet.

    Attributes:
        recorder: called with the name of a tensor, the tensor, and whether this rank received it from another one; None
            in a step that nobody checks.
        context: current computation of the rank; part of the names.
    """

    def __init__(self) -> None:
        self.recorder: Callable[[str, Tensor, bool], None] | None = None
        self.context = ""

    @property
    def recording(self) -> bool:
        """Whether there is a recorder."""
        return self.recorder is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    def record(self, name: str, tensor: Tensor, *, received: bool = False) -> None:
        """Shows the current values of a tensor on this rank; `received`: another rank computed it."""
        if self.recorder is not None:
            self.recorder(f"{name} ({self.context})" if self.context else name, tensor, received)


@dataclass(frozen=True)
class Axis:
    """One axis of the grid, from the perspective of this rank.

    Attributes:
        rank: this rank's coordinate along the axis.
        ranks: global ranks that differ from this one only along this axis, in order.
        group: process group of `ranks`; None if the axis has size 1 or torch.distributed is not used.
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
        """Records x, the input of a collective over the axis, in the compute trace; returns x.

        Compiled code records nothing, since recording would change what the compiler fuses.
        """
        if not torch.compiler.is_compiling():
            self.trace.record("a message", x)
        return x


@dataclass(frozen=True)
class ParallelGrid:
    """The grid of tp x cp x pp x dp ranks, from the perspective of this rank.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        tp, cp, pp, dp: the axes.
        cp_inner: this rank's subgroup of `cp`, adjacent ranks that exchange tokens for heads: all of it with
            parallel.cp_kind=ulysses, else parallel.cp_ulysses ranks.
        cp_outer: ranks of `cp` with the same heads, one in each subgroup, over which the queries of a sample are
            divided inside an attention core.
        data: combined context- and data-parallel axis: the ranks that hold the same weights and process different
            tokens, over which gradients are reduced and ZeRO shards. In the order of global ranks.
        shard: this rank's subgroup of `data`, over which ZeRO shards; all of it unless parallel.zero_shard_size is set.
        replica: ranks of `data` with the same shard, one in each subgroup. ep: ranks that together hold all experts of
        a layer; adjacent ranks of `data`, or with parallel.expert_tp=false of
            the tensor- and data-parallel ranks.
        expert_data: ranks that hold the same experts, over which their gradients are reduced and ZeRO shards them.
        control: control plane of all ranks, for values that are not tensors.
        trace: compute trace of this rank; see TrainEngine.check_compute.
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
    ep: Axis
    expert_data: Axis
    cp_inner: Axis
    cp_outer: Axis
    control: ControlPlane = ALONE
    trace: ComputeTrace = field(default_factory=ComputeTrace, compare=False, repr=False)


def build_grid(
    parallel: ParallelConfig, rank: int, world_size: int, control: ControlPlane | None = None
) -> ParallelGrid:
    """Creates the process groups of all axes; must be called on every rank.

    Args:
        parallel: the layout.
        rank: global rank.
        world_size: number of ranks.
        control: control plane of all ranks, whose timeout the groups use, too; None opens one.

    Raises:
        ConfigError: the layout's size is not `world_size`.
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
        lines = axis_ranks(name, parallel)
        key = tuple(lines)
        if key not in known:  # data is the same as dp if cp is 1, and vice versa
            known[key] = _join(lines, rank, control.timeout, trace)
        return known[key]

    combined = ("data", "shard", "replica", "ep", "expert_data", "cp_inner", "cp_outer")
    axes = {name: axis(name) for name in (*AXES, *combined)}
    return ParallelGrid(rank, world_size, **axes, control=control, trace=trace)


def _join(lines: list[tuple[int, ...]], rank: int, timeout: timedelta | None, trace: ComputeTrace) -> Axis:
    """Creates a process group for every line, in the same order on all ranks; returns the axis of this rank's line.

    Every rank creates all groups. Groups created by their members only (use_local_synchronization) are named by the
    number of groups that a member has joined: if that differs between members, as after creating the pipeline's p2p
    groups, they deadlock.
    """
    mine: Axis | None = None
    for line in lines:
        group = dist.new_group(list(line), timeout=timeout) if len(line) > 1 else None
        if rank in line:
            mine = Axis(line.index(rank), line, group, trace)
    assert mine is not None
    return mine


def single_rank_grid() -> ParallelGrid:
    """The grid of a single process, without process groups."""
    one = Axis(0, (0,), None)
    return ParallelGrid(
        0, 1, tp=one, cp=one, pp=one, dp=one, data=one, shard=one, replica=one, ep=one, expert_data=one,
        cp_inner=one, cp_outer=one,
    )  # fmt: skip


def vocab_range(vocab_size: int, axis: Axis, rows: int) -> tuple[int, int]:
    """(start, valid): the vocabulary index of this rank's first row, and how many of its rows are not padding.

    Args:
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
        rows: rows of each rank, including padding.
    """
    start = axis.rank * rows
    return start, max(0, min(rows, vocab_size - start))
