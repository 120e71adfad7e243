"""The small copy of a run that `megads verify` trains: it keeps the features in which a run can go wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megads.config.layout_checks import check_layout
from megads.errors import ConfigError
from megads.model.config import LayerKind, MLPKind, ModelConfig, NormKind, Position
from megads.optim.config import OptimConfig
from megads.parallel.config import AXES, ContextParallelKind, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.tools.verify.scenario import DEFAULT_RANKS, RequestedSettings, Scaled, scale, scale_layout

BLOOM = RequestedSettings(
    ModelConfig(num_layers=70, hidden_size=14336, num_heads=112, vocab_size=250880, hidden_dropout=0.1),
    ParallelConfig(tp=4, pp=12, dp=8),
    OptimConfig(lr=6e-5, betas=[0.8, 0.9], weight_decay=0.2),
    global_batch_size=2048,
    micro_batch_size=1,
    seq_len=2048,
    bf16=True,
)


def sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    return tuple(getattr(parallel, axis) for axis in AXES)


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [
        ((1, 1, 1, 1), None, (1, 1, 1, 1)),
        ((2, 1, 2, 1), None, (2, 1, 2, 1)),
        ((4, 1, 12, 8), None, (2, 1, 2, 2)),
        ((1, 1, 1, 96), None, (1, 1, 1, 8)),
        ((1, 1, 2, 3), None, (1, 1, 2, 3)),
        ((1, 1, 4, 4), 8, (1, 1, 4, 2)),
        ((8, 4, 1, 1), None, (4, 2, 1, 1)),
        ((2, 2, 2, 64), None, (2, 2, 2, 2)),
        ((8, 1, 1, 1), 2, (2, 1, 1, 1)),
    ],
)
def test_layout_keeps_its_shape(given: tuple[int, ...], limit: int | None, expected: tuple[int, ...]) -> None:
    """Catches an axis that becomes 1, a layout that grows or stays too large, and tp reduced before dp."""
    found = scale_layout(ParallelConfig(**dict(zip(AXES, given, strict=True))), limit)
    assert sizes(found) == expected
    assert found.world_size <= (limit or max(DEFAULT_RANKS, 2 ** sum(size > 1 for size in given)))


@pytest.mark.parametrize(
    ("cp", "dp", "shard", "limit", "expected"),
    [
        (1, 64, 8, None, (1, 8, 2)),
        (1, 64, 64, None, (1, 8, 8)),
        (2, 64, 8, 4, (2, 2, 2)),
        (16, 1, 8, None, (8, 1, 2)),
        (1, 6, 3, 5, (1, 4, 2)),
        (3, 4, 6, None, (3, 2, 2)),
        (7, 2, 7, 7, (3, 2, 2)),
    ],
)
def test_groups_of_shards_stay_groups(cp: int, dp: int, shard: int, limit: int | None, expected: tuple) -> None:
    """Catches a hierarchical ZeRO layout with a single shard group, or with groups that do not divide the ranks."""
    given = ParallelConfig(cp=cp, dp=dp, zero_stage=3, zero_shard_size=shard)
    given.check()
    found = scale_layout(given, limit)
    found.check()
    assert (found.cp, found.dp, found.zero_shard_size) == expected


@pytest.mark.parametrize(
    ("layout", "ep"),
    [({"dp": 64, "ep": 64}, 8), ({"tp": 2, "pp": 4, "dp": 8, "ep": 8}, 2), ({"dp": 4, "ep": 2}, 2)],
)
def test_experts_stay_divided_over_fewer_ranks(layout: dict[str, int], ep: int) -> None:
    """Catches expert parallelism over more ranks than the small layout has, which is refused or crashes its ranks."""
    found = scale_layout(ParallelConfig(**layout), None)
    found.check()
    assert found.ep == ep


def test_layout_that_cannot_be_kept_is_refused() -> None:
    """Catches a verification of another layout than the requested one."""
    with pytest.raises(ConfigError, match=r"parallel\.tp, parallel\.pp above 1 need at least 4 ranks; raise it"):
        scale_layout(ParallelConfig(tp=2, pp=4), 3)


def scaled(**changes: object) -> Scaled:
    return scale(replace(BLOOM, **changes), None, 10)  # type: ignore[arg-type]


def test_a_large_run_becomes_small_with_its_features() -> None:
    """Catches features lost by scaling: heads that are no power of 2, vocabulary padding, uneven stages, norms, tied
    embeddings, weight decay, several micro-batches."""
    found = scaled()
    model = found.exact.model
    assert (model.num_layers, model.num_heads, model.hidden_size, model.vocab_size) == (3, 6, 48, 509)
    assert (model.position, model.embedding_norm, model.tie_embeddings) == (Position.alibi, True, True)
    assert model.hidden_dropout == model.attention_dropout == 0.0
    assert (found.exact.optim.betas, found.exact.optim.weight_decay) == ([0.8, 0.9], 0.2)
    assert found.exact.clip_grad == 0.5 and found.exact.masked and found.exact.hot
    assert found.exact.global_batch_size // (found.exact.micro_batch_size * found.parallel.dp) == 4
    assert found.bf16 is not None and found.bf16.precision == "bfloat16"
    assert found.bf16.global_batch_size * found.bf16.seq_len >= 1536
    assert "tp 4 -> 2, pp 12 -> 2, dp 8 -> 2: 384 ranks are 8 here" in found.notes[0]


def test_what_the_config_says_otherwise_stays_otherwise() -> None:
    """Catches a small copy that is BLOOM whatever the config says: clipping, precision, document masks, positions, tied
    embeddings, a single head."""
    model = ModelConfig(
        num_layers=1, hidden_size=4, num_heads=1, vocab_size=100, position=Position.learned, embedding_norm=False,
        tie_embeddings=False, ffn_size=12,
    )  # fmt: skip
    found = scaled(
        model=model, parallel=ParallelConfig(dp=2), optim=OptimConfig(clip_grad=0.0), bf16=False, document_mask=True,
        reset_positions=True,
    )  # fmt: skip
    assert found.bf16 is None and found.exact.clip_grad == 0.0
    assert found.exact.document_mask and found.exact.reset_positions
    assert found.exact.model == replace(model, max_seq_len=found.exact.seq_len)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "expected"),
    [
        (32, 8, 1, (4, 2)),
        (32, 8, 8, (16, 8)),
        (32, 2, 2, (4, 2)),
        (12, 1, 1, (6, 1)),
        (6, 3, 3, (6, 3)),
        (9, 9, 3, (9, None)),
    ],
)
def test_shared_keys_stay_shared(heads: int, kv_heads: int, tp: int, expected: tuple) -> None:
    """Catches a copy that turns GQA into MHA or MQA, or leaves a rank without a KV head."""
    model = replace(
        BLOOM.model, hidden_size=16 * heads, num_heads=heads, num_kv_heads=kv_heads, window=1024, mlp=MLPKind.swiglu,
        norm=NormKind.rmsnorm, parallel_block=True,
    )  # fmt: skip
    found = scaled(model=model, parallel=ParallelConfig(tp=tp)).exact
    found.model.check()
    assert (found.model.num_heads, found.model.num_kv_heads) == expected
    assert found.model.window is not None and found.model.window < found.seq_len
    assert (found.model.mlp, found.model.norm, found.model.parallel_block) == (MLPKind.swiglu, NormKind.rmsnorm, True)


def test_layers_that_differ_stay_different() -> None:
    """Catches a copy with fewer layers than kinds, windows longer than its samples, an odd number of rotated features,
    and costs of layers that it does not have."""
    kinds = [LayerKind(layers=5, window=1024, rope_theta=100.0), LayerKind(window=0), LayerKind(position=Position.none)]
    model = replace(BLOOM.model, position=Position.rope, rotary_fraction=0.4, layer_pattern=kinds)
    layout = ParallelConfig(pp=2, layer_costs=[1.0] * (model.num_layers + 2))
    found = scaled(model=model, parallel=layout)
    found.exact.model.check()
    small = [found.exact.model.layer(index) for index in range(found.exact.model.num_layers)]
    assert [layer.window is not None for layer in small[:3]] == [True, False, False]
    assert small[0].window < found.exact.seq_len and small[0].rope_theta == 100.0
    assert small[2].position is Position.none and found.parallel.layer_costs is None


def test_recomputation_fits_fewer_stages_and_blocks() -> None:
    """Catches recompute_blocks with entries for removed stages, and recompute=auto, which would resolve to none for a
    small model."""
    layout = ParallelConfig(pp=12, recompute=Recompute.full, recompute_blocks=[6, 0, *[5] * 10])
    assert scale_layout(layout, 2).recompute_blocks == [1, 0]
    auto = scale_layout(ParallelConfig(pp=4, recompute=Recompute.auto), None)
    assert (auto.recompute, auto.recompute_blocks) == (Recompute.full, [1] * 4)
    auto.check()


@pytest.mark.parametrize("tp,cp,pp,dp", list(itertools.product((1, 2, 3), (1, 2), (1, 4), (1, 3))))
def test_every_small_copy_divides_over_its_layout(tp: int, cp: int, pp: int, dp: int) -> None:
    """Catches heads, MLPs, sequences and batches that the scaled layout does not divide."""
    for heads, ffn in itertools.product((12, 96), (None, 1000)):
        model = replace(BLOOM.model, num_heads=heads, hidden_size=96 * 16, ffn_size=ffn)
        found = scaled(model=model, parallel=ParallelConfig(tp=tp, cp=cp, pp=pp, dp=dp))
        parallel = found.parallel
        for scenario in (found.exact, found.bf16):
            assert scenario is not None
            scenario.model.check()
            assert scenario.model.num_heads % parallel.tp == scenario.model.ffn_width % parallel.tp == 0
            assert scenario.model.num_layers >= parallel.pp
            assert scenario.seq_len % (2 * parallel.cp * parallel.tp) == 0
            assert scenario.seq_len <= scenario.model.max_seq_len
            assert scenario.global_batch_size % (scenario.micro_batch_size * parallel.dp) == 0


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads", "expected"),
    [
        # Heads of each rank's KV heads, which are whole or repeated as in the large model.
        ({"cp": 4}, 32, None, (4, None)),
        ({"tp": 2, "cp": 4}, 32, 8, (16, 8)),
        ({"cp": 8}, 32, 4, (8, 4)),
        ({"cp": 3}, 6, 2, (6, 2)),
        ({"tp": 2, "pp": 2, "cp": 8}, 32, 2, (4, 2)),
    ],
)
def test_small_heads_divide_over_the_ranks_of_ulysses(
    layout: dict[str, int], heads: int, kv_heads: int | None, expected: tuple[int, int | None]
) -> None:
    """Catches a small model that the layout of the run refuses, and KV heads that are repeated only in the copy."""
    model = replace(BLOOM.model, num_heads=heads, hidden_size=16 * heads, num_kv_heads=kv_heads)
    found = scaled(model=model, parallel=ParallelConfig(cp_kind=ContextParallelKind.ulysses, **layout))
    assert found.exact.model.num_heads // found.parallel.tp % found.parallel.cp == 0
    assert (found.exact.model.num_heads, found.exact.model.num_kv_heads) == expected
    check_layout(found.exact.model, found.parallel, found.exact.seq_len)


@pytest.mark.parametrize(
    ("layout", "small"),
    [
        ({"cp": 16, "cp_ulysses": 8}, (8, 2)),
        ({"tp": 2, "cp": 16, "cp_ulysses": 4, "cp_kind": ContextParallelKind.ring}, (4, 2)),
        ({"tp": 8, "pp": 4, "cp": 6, "cp_ulysses": 3}, (4, 2)),
        ({"cp": 8, "cp_ulysses": 8}, (8, 8)),
    ],
)
def test_a_small_copy_exchanges_heads_in_groups_as_the_run_does(layout: dict, small: tuple[int, int]) -> None:
    """Catches a copy without one of the two levels of context parallelism, and one that is refused."""
    found = scale_layout(ParallelConfig(**layout), None)
    assert (found.cp, found.cp_ulysses) == small
    found.check()
    model = replace(BLOOM.model, num_heads=64, hidden_size=1024, num_kv_heads=8)
    copy = scaled(model=model, parallel=ParallelConfig(**layout | {"pp": 1, "tp": 1}))
    check_layout(copy.exact.model, copy.parallel, copy.exact.seq_len)
    assert copy.parallel.is_two_level or layout["cp"] == layout["cp_ulysses"]


@pytest.mark.parametrize(("tp", "cp", "exact", "bf16"), [(1, 1, 16, 64), (2, 1, 16, 64), (3, 2, 24, 72)])
def test_samples_are_no_longer_than_they_must_be(tp: int, cp: int, exact: int, bf16: int) -> None:
    """Catches a small copy whose samples are longer than the next multiple of 2 tp cp."""
    found = scaled(parallel=ParallelConfig(tp=tp, cp=cp))
    assert (found.parallel.tp, found.parallel.cp) == (tp, cp) and found.bf16 is not None
    assert (found.exact.seq_len, found.bf16.seq_len) == (exact, bf16)
    assert (found.exact.model.max_seq_len, found.bf16.model.max_seq_len) == (exact, bf16)


@pytest.mark.parametrize(("given", "kept"), [(None, None), (2, 2), (3, 3), (8, 4)])
def test_a_small_copy_has_few_virtual_stages(given: int | None, kept: int | None) -> None:
    """Catches a copy so deep that rounding exceeds the bounds, and one that no longer interleaves as the run does."""
    schedule = ScheduleName.interleaved if given else ScheduleName["1f1b"]
    found = scale_layout(ParallelConfig(pp=16, schedule=schedule, virtual_stages=given), None)
    assert (found.pp, found.virtual_stages) == (8, kept)
