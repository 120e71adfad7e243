"""Which rank holds what, against the grid's groups, the real sharded layers and the stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.model.sharding import SHARDING
from megads.model.stages import stage_specs
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Axis, axis_lines
from megads.parallel.sharding import shard_stage
from megads.plan.places import axes_across_nodes, rank_places, replicas

MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=6, vocab_size=7)


@pytest.mark.parametrize("order", [["tp", "cp", "pp", "dp"], ["pp", "dp", "tp", "cp"]])
def test_places_are_those_of_the_grid_and_the_layers(order: list[str]) -> None:
    """Catches a table that numbers ranks in another order than the groups do, and shares of heads or of the vocabulary
    that differ from those of the layers as they are built."""
    parallel = ParallelConfig(tp=3, cp=2, pp=2, dp=2, rank_order=order)
    places = rank_places(MODEL, parallel)
    for axis in ("tp", "cp", "pp", "dp"):
        for line in axis_lines(axis, parallel):
            assert [getattr(places[rank].place, axis) for rank in line] == list(range(len(line)))
    for held in places:
        for spec in stage_specs(MODEL, 0):
            if spec.name not in held.layers:
                continue
            with torch.device("meta"):
                stage = spec.build()
            stage, placements = shard_stage(
                stage, spec.name, SHARDING, Axis(held.place.tp, (0, 1, 2), None), sequence_parallel=False
            )
            for core in (module for module in stage.modules() if isinstance(module, AttentionCore)):
                assert held.heads == core.heads
            for place in placements.values():
                if place.key in ("embedding.word.weight", "head.weight"):
                    assert held.vocabulary == range(place.start, place.start + place.length)
    stages = [{held.layers for held in places if held.place.pp == stage} for stage in range(2)]
    assert all(len(layers) == 1 for layers in stages)
    assert sum((layers.pop() for layers in stages), ()) == tuple(spec.name for spec in stage_specs(MODEL, 0))


def test_replicas_are_the_ranks_of_a_data_group() -> None:
    """Catches a folded row whose ranks hold different weights."""
    parallel = ParallelConfig(tp=2, cp=2, pp=2, dp=3)
    groups = {tuple(held.rank for held in group) for group in replicas(rank_places(MODEL, parallel))}
    assert groups == set(axis_lines("data", parallel))


def test_nodes() -> None:
    """Catches a tensor-parallel group that leaves its node unsaid."""
    parallel = ParallelConfig(tp=2, pp=2, dp=2)
    assert [held.node for held in rank_places(MODEL, parallel, ranks_per_node=4)] == [0] * 4 + [1] * 4
    assert axes_across_nodes(parallel, 8) == []
    assert axes_across_nodes(parallel, 4) == ["dp"]
    assert axes_across_nodes(parallel, 2) == ["pp", "dp"]
    assert axes_across_nodes(ParallelConfig(tp=4, dp=2), 6) == ["tp", "dp"]


def test_what_is_not_held_or_known() -> None:
    """Catches heads on a stage without blocks, vocabulary rows in the middle, and a guess at an unknown vocabulary."""
    places = rank_places(replace(MODEL, num_layers=1), ParallelConfig(pp=3))
    assert [len(held.heads) for held in places] == [0, 6, 0]
    assert [held.vocabulary for held in places] == [range(7), range(0), range(7)]
    assert rank_places(replace(MODEL, vocab_size=None), ParallelConfig())[0].vocabulary is None
    with pytest.raises(ConfigError, match=r"parallel\.pp = 6"):
        rank_places(MODEL, ParallelConfig(pp=6))
