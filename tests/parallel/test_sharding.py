"""Applying a sharding table: placements tile the whole, values are slices of it, layers are swapped."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig, Position
from megads.model.dropout import Dropout
from megads.model.gpt import stage_specs
from megads.model.sharding import SHARDING
from megads.parallel.grid import Axis
from megads.parallel.sharding import ParameterPlacement, materialise, shard_stage
from megads.parallel.table import Cut, ShardingTable
from megads.plan.parameters import parameter_shapes

# 7 rows over 3 ranks leave padding on the last one; 4 leave it nothing.
CONFIG = ModelConfig(
    num_layers=1, hidden_size=24, num_heads=6, ffn_size=36, vocab_size=7, max_seq_len=5,
    position=Position.learned, tie_embeddings=False,
)  # fmt: skip
Sharded = list[tuple[nn.Module, dict[str, ParameterPlacement], str]]


def axis_of(rank: int, size: int) -> Axis:
    return Axis(rank, tuple(range(size)), None)


def full_value(name: str, shape: tuple[int, ...]) -> Tensor:
    """Every element of every tensor is different, none is zero."""
    return 1.0 + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1e5 * len(name)


def sharded(config: ModelConfig, rank: int, size: int, sequence_parallel: bool = False) -> Sharded:
    """Every stage, cut for one rank and filled."""
    stages = []
    for spec in stage_specs(config, 0):
        with torch.device("meta"):
            stage = spec.build()
        stage, placements = shard_stage(
            stage, spec.name, SHARDING, axis_of(rank, size), sequence_parallel=sequence_parallel
        )
        stages.append((materialise(stage, placements, full_value, torch.device("cpu")), placements, spec.name))
    return stages


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("vocab_size", [7, 4])
def test_shares_tile_every_tensor(size: int, vocab_size: int) -> None:
    """Catches shares that overlap, leave holes, hold other values than the whole, or padding that is not zero."""
    config = ModelConfig(**{**CONFIG.__dict__, "vocab_size": vocab_size})
    shapes = parameter_shapes(config)
    covered = {name: torch.zeros(shape) for name, shape in shapes.items()}
    replicated = set()
    for rank in range(size):
        for stage, placements, prefix in sharded(config, rank, size):
            for path, parameter in stage.named_parameters():
                place = placements[path]
                assert place.key == f"{prefix}.{path}" and place.global_shape == shapes[place.key]
                assert parameter.tensor_model_parallel is (place.dim is not None)
                whole = full_value(place.key, place.global_shape)
                if place.dim is None:
                    replicated.add(place.key)
                    assert torch.equal(parameter, whole) and place.local_shape == place.global_shape
                    covered[place.key] += 1.0 / size
                    continue
                real = parameter.narrow(place.dim, 0, place.length)
                padding = parameter.narrow(place.dim, place.length, parameter.shape[place.dim] - place.length)
                assert torch.equal(real, whole.narrow(place.dim, place.start, place.length))
                assert real.shape == place.local_shape and not padding.any()
                covered[place.key].narrow(place.dim, place.start, place.length).add_(1)
    for name, count in covered.items():
        torch.testing.assert_close(count, torch.ones_like(count), msg=f"{name} is not covered once")
    assert all(
        "norm" in name or "position" in name or name.endswith(("dense.bias", "down.bias")) for name in replicated
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_cores_follow_the_rank(rank: int) -> None:
    """Catches a core left with all heads, whose dropout would be that of the first ones on every rank."""
    modules = [module for stage, _, _ in sharded(CONFIG, rank, 3) for module in stage.modules()]
    (core,) = (module for module in modules if isinstance(module, AttentionCore))
    assert core.heads == range(2 * rank, 2 * rank + 2)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(3, True), (3, False), (1, True)])
def test_what_runs_on_shards_of_the_sequence(size: int, sequence_parallel: bool) -> None:
    """Catches a norm, a row bias or a position table whose gradient would stay one shard's, a dropout of a region that
    is cut along the sequence, one outside that is not, and shards on a single rank."""
    on_shards = sequence_parallel and size > 1
    stages = sharded(CONFIG, size - 1, size, sequence_parallel)
    for stage, placements, _ in stages:
        for path, parameter in stage.named_parameters():
            assert parameter.sequence_partial is (on_shards and placements[path].dim is None), path
    dropouts = [module for stage, _, _ in stages for module in stage.modules() if isinstance(module, Dropout)]
    for dropout in dropouts:
        inside = dropout.site == "blocks.0.attention.core.dropout"
        assert dropout.shard == ((size - 1, size) if on_shards and not inside else (0, 1)), dropout.site


def test_one_full_tensor_in_memory_at_a_time() -> None:
    """Catches an initialisation that draws the whole stage, or the whole model, before it slices."""
    alive: list[weakref.ref[Tensor]] = []

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        assert not [ref for ref in alive if ref() is not None], f"another full tensor is alive when {name} is drawn"
        full = full_value(name, shape)
        alive.append(weakref.ref(full))
        return full

    for spec in stage_specs(CONFIG, 0):
        with torch.device("meta"):
            stage = spec.build()
        stage, placements = shard_stage(stage, spec.name, SHARDING, axis_of(1, 2), sequence_parallel=False)
        assert all(parameter.is_meta for parameter in stage.parameters()), "memory was taken before the cut"
        materialise(stage, placements, value, torch.device("cpu"))
    assert len(alive) == len(parameter_shapes(CONFIG))


def test_sizes_that_do_not_divide_are_refused() -> None:
    """Catches heads or features silently lost to a rounded-down share."""
    with torch.device("meta"):
        stage = nn.ModuleDict({"up": nn.Linear(4, 6)})
    table = ShardingTable(parameters={"blocks.*.up": Cut.column})
    with pytest.raises(ConfigError, match=r"blocks.0.up: 6 features cannot be cut over parallel.tp = 4"):
        shard_stage(stage, "blocks.0", table, axis_of(0, 4), sequence_parallel=False)
