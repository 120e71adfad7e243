"""Tests which rank has which coordinates, and which ranks form an axis."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from megads.errors import ConfigError
from megads.parallel.config import ContextParallelKind, GridCoordinate, ParallelConfig, axis_ranks, place_of, rank_at
from megads.parallel.grid import build_grid, single_rank_grid
from tests.distributed import run_ranks

LAYOUTS = [
    ParallelConfig(tp, pp, dp, cp, order)
    for tp, pp, dp, cp in product((1, 2, 3), repeat=4)
    for order in (["tp", "cp", "pp", "dp"], ["pp", "dp", "tp", "cp"])
]


def test_tensor_parallelism_is_innermost_and_data_outermost() -> None:
    """Catches another rank order: the axes with the most communication would cross nodes."""
    parallel = ParallelConfig(tp=2, cp=2, pp=3, dp=2)
    assert [place_of(rank, parallel) for rank in range(5)] == [
        GridCoordinate(), GridCoordinate(tp=1), GridCoordinate(cp=1), GridCoordinate(tp=1, cp=1), GridCoordinate(pp=1),
    ]  # fmt: skip
    assert axis_ranks("tp", parallel)[0] == (0, 1)
    assert axis_ranks("cp", parallel)[0] == (0, 2)
    assert axis_ranks("pp", parallel)[0] == (0, 4, 8)
    assert axis_ranks("dp", parallel)[0] == (0, 12)
    assert axis_ranks("data", parallel)[0] == (0, 2, 12, 14)


def test_another_rank_order_is_followed() -> None:
    """Catches an order that is accepted and ignored."""
    parallel = ParallelConfig(tp=2, pp=2, rank_order=["pp", "cp", "dp", "tp"])
    assert axis_ranks("pp", parallel)[0] == (0, 1)
    assert axis_ranks("tp", parallel)[0] == (0, 2)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"{p.rank_order[0]}-tp{p.tp}cp{p.cp}pp{p.pp}dp{p.dp}")
def test_coordinates_and_axis_ranks_partition_the_world(parallel: ParallelConfig) -> None:
    """Catches coordinates that do not map back to their rank, and lines that overlap, leave a rank out or mix axes."""
    world = range(parallel.world_size)
    assert [rank_at(place_of(rank, parallel), parallel) for rank in world] == list(world)
    for index, axis in enumerate(GridCoordinate._fields):
        lines = axis_ranks(axis, parallel)
        assert sorted(rank for line in lines for rank in line) == list(world)
        for line in lines:
            places = [place_of(rank, parallel) for rank in line]
            assert [place[index] for place in places] == list(range(len(line)))
            assert len({place[:index] + place[index + 1 :] for place in places}) == 1
    for line in axis_ranks("data", parallel):
        assert len({(place.tp, place.pp) for place in (place_of(rank, parallel) for rank in line)}) == 1
        assert len(line) == parallel.cp * parallel.dp


@pytest.mark.parametrize("size", [None, 2, 3, 6])
def test_shard_subgroups_partition_data_parallel_ranks(size: int | None) -> None:
    """Catches shard groups that mix model-parallel ranks or leave a rank out, and replicas that hold different
    shards."""
    parallel = ParallelConfig(tp=2, cp=2, dp=3, zero_stage=3, zero_shard_size=size)
    shards, replicas = axis_ranks("shard", parallel), axis_ranks("replica", parallel)
    data = axis_ranks("data", parallel)
    assert {len(line) for line in shards} == {size or 6} and {len(line) for line in replicas} == {6 // (size or 6)}
    for lines in (shards, replicas):
        assert sorted(rank for line in lines for rank in line) == list(range(12))
        assert all(any(set(line) <= set(whole) for whole in data) for line in lines)
    place = {rank: line.index(rank) for line in shards for rank in line}
    assert all(len({place[rank] for rank in line}) == 1 for line in replicas)
    assert size != 2 or shards[0] == data[0][:2], "neighbours in rank share a subgroup: its links are the fast ones"


@pytest.mark.parametrize("order", [["tp", "cp", "pp", "dp"], ["dp", "tp", "pp", "cp"]])
@pytest.mark.parametrize(("kind", "given", "size"), [("allgather", 1, 1), ("ring", 3, 3), ("ulysses", 1, 6)])
def test_subgroups_that_exchange_heads_partition_context_parallel_ranks(
    order: list[str], kind: str, given: int, size: int
) -> None:
    """Catches subgroups of ranks whose tokens are not adjacent, and ranks of other subgroups with other heads."""
    parallel = ParallelConfig(tp=2, cp=6, dp=2, cp_kind=ContextParallelKind(kind), cp_ulysses=given, rank_order=order)
    for name, members in (("cp_inner", size), ("cp_outer", 6 // size)):
        lines = axis_ranks(name, parallel)
        assert sorted(rank for line in lines for rank in line) == list(range(24))
        for line in lines:
            places = [place_of(rank, parallel) for rank in line]
            step = 1 if name == "cp_inner" else size
            first = places[0].cp
            assert [place.cp for place in places] == list(range(first, first + step * members, step))
            assert first % size == 0 if name == "cp_inner" else first < size
            assert len({place._replace(cp=0) for place in places}) == 1


def test_layout_must_fill_the_world() -> None:
    """Catches ranks that hang because they wait for others that were never started."""
    with pytest.raises(ConfigError, match=r"2 \* 1 \* 1 \* 2 = 4, but 3 processes"):
        build_grid(ParallelConfig(tp=2, dp=2), 0, 3)


def test_one_process_needs_no_process_group() -> None:
    """Catches a grid that calls torch.distributed for a single process."""
    assert not dist.is_initialized()
    grid = single_rank_grid()
    assert grid == build_grid(ParallelConfig(), 0, 1)
    assert grid.tp.is_first and grid.tp.is_last and grid.tp.group is None


def _sums_along_axes() -> dict[str, tuple[float, tuple[int, ...], int]]:
    grid = build_grid(ParallelConfig(tp=2, pp=2), dist.get_rank(), dist.get_world_size())
    found = {}
    for name in ("tp", "pp", "dp"):
        axis = getattr(grid, name)
        value = torch.tensor(float(10**grid.rank))
        if axis.group is not None:
            dist.all_reduce(value, group=axis.group)
        found[name] = (value.item(), axis.ranks, axis.rank)
    return found


@pytest.mark.distributed
def test_groups_connect_the_ranks_of_their_axis() -> None:
    """Catches a group with other ranks than its axis, and groups created in another order on some rank."""
    for rank, found in enumerate(run_ranks(_sums_along_axes, 4)):
        assert found["tp"] == ((11.0, (0, 1), rank) if rank < 2 else (1100.0, (2, 3), rank - 2))
        assert found["pp"] == ((101.0, (0, 2), rank // 2) if rank % 2 == 0 else (1010.0, (1, 3), rank // 2))
        assert found["dp"] == (float(10**rank), (rank,), 0)
