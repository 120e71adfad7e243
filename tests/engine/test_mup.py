"""muP: initial weights, multipliers and learning rates in every layout; coordinate check."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megads.config.root import RootConfig, check_shape
from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig, MupConfig, NormKind, Position
from megads.model.gpt import GPT, initial_value
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.tools.convert.export import _folded
from scripts.coordinate_check import check, exponents
from tests.distributed import run_ranks
from tests.engine.test_optimizers import _state_bytes
from tests.parity import LAYOUTS, MODEL, Scenario, faults_of, hot_weights, scenario_with, step_batches, train_layout
from tests.tools.plan.memory_meter import planned

# Ratios of 1.5 and 1 / 3: multiplying by a power of two would not round.
MUP = MupConfig(base_width=2 * MODEL.hidden_size // 3, output_multiplier=2.5, base_head_size=3 * MODEL.head_dim)
GPT_LIKE = replace(MODEL, mup=MUP)
LLAMA_LIKE = replace(
    GPT_LIKE, num_kv_heads=2, mlp=MLPKind.swiglu, norm=NormKind.rmsnorm, bias=False, position=Position.rope,
    qk_norm=True, tie_embeddings=False, embedding_norm=False,
)  # fmt: skip
MODELS = {"adamw": GPT_LIKE, "lion": GPT_LIKE, "muon": LLAMA_LIKE}


def scenario_of(optimizer: str) -> Scenario:
    return scenario_with(steps=6, masked=True, lr=1e-3, model=MODELS[optimizer], optimizer=OptimConfig(name=optimizer))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        *("adamw-single", "adamw-tp2", "adamw-pp2", "adamw-tp2pp2", "adamw-tp2pp2dp2", "adamw-tp2dp2sp", "adamw-cp2"),
        *("adamw-zero2dp2", "adamw-zero3dp2", "adamw-hierarchical", "lion-tp2dp2", "muon-tp2dp2", "muon-zero3tp2dp2"),
    ],
)
def test_mup_steps_equal_the_reference_in_every_layout(case: str) -> None:
    """Catches multipliers that a stage or a rank applies twice or not at all, and learning rates lost in a layout."""
    optimizer, layout = case.split("-", 1)
    run = train_layout(scenario_of(optimizer), LAYOUTS[layout])
    assert faults_of(run, scenario_of(optimizer)) == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    "optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow), pytest.param("lion", marks=pytest.mark.slow)]
)
def test_mup_activations_do_not_grow_with_width(optimizer: str) -> None:
    """Catches a learning rate, multiplier or initial weight that scales wrongly: activations that grow, or stop
    changing, with the width; and a check that cannot fail: without muP they must grow."""
    widths = (64, 128, 256)
    flat = exponents(check(optimizer, widths, 4, mup=True, wider_heads=False))
    assert all(abs(exponent) < 0.25 for exponent in flat.values()), flat
    growing = exponents(check(optimizer, widths, 4, mup=False, wider_heads=False))
    assert max(growing.values()) > 0.5, growing


@pytest.mark.distributed
@pytest.mark.slow
def test_mup_attention_scores_do_not_grow_with_head_size() -> None:
    """Catches attention scores that grow with the head size."""
    flat = exponents(check("adamw", (64, 128, 256), 4, mup=True, wider_heads=True))
    assert all(abs(exponent) < 0.25 for exponent in flat.values()), flat


def test_mup_initial_stds_scale_as_in_table_8() -> None:
    """Catches an embedding or output std that scales with the width, and a hidden one that does not (table 8)."""
    wide = ModelConfig(
        num_layers=2, hidden_size=256, vocab_size=512, tie_embeddings=False, init_std=0.1, mup=MupConfig(base_width=64)
    )
    value = initial_value(wide, 0)
    deviations = {
        "embedding.word.weight": 0.1, "head.weight": 0.1, "blocks.0.attention.qkv.weight": 0.1 / 2,
        "blocks.1.mlp.up.weight": 0.1 / 2, "blocks.1.mlp.down.weight": 0.1 / 2 / math.sqrt(4),
    }  # fmt: skip
    for name, deviation in deviations.items():
        assert float(value(name, (512, 256)).std()) == pytest.approx(deviation, rel=0.02), name
    unset = replace(wide, init_std=None)
    assert unset.weight_std == math.sqrt(1 / (3 * 64))


def test_mup_at_the_base_width_changes_nothing() -> None:
    """Catches a factor other than 1 at the base width."""
    base = replace(MODEL, mup=MupConfig(MODEL.hidden_size, base_head_size=MODEL.head_dim))
    assert (base.query_scale, base.logit_multiplier, base.hidden_std) == (1.0, 1.0, MODEL.weight_std)
    assert {base.width_scale(muon=muon)("blocks.0.mlp.up.weight") for muon in (False, True)} == {1.0}


@pytest.mark.parametrize("model", [GPT_LIKE, LLAMA_LIKE], ids=["gpt", "llama"])
def test_multipliers_are_those_of_folded_weights(model: ModelConfig) -> None:
    """Catches scores divided by the wrong power of the head size, logits by that of the width, and an export that folds
    keys, or folds twice: a model without muP has the same logits from folded weights."""
    scenario = scenario_with(model=model)
    weights, (batch, *_) = hot_weights(3), step_batches(scenario, 0)
    ours = GPT(model, 0, weights)(batch.tokens_bs, batch.info)
    plain = replace(model, mup=MupConfig())
    folded = GPT(plain, 0, lambda name, shape: _folded(model, name, weights(name, shape)))
    assert torch.allclose(folded(batch.tokens_bs, batch.info), ours, rtol=1e-4, atol=1e-4)
    # By hand: the output times 2.5 / 1.5; scores of d features times sqrt(3 d) / d instead of 1 / sqrt(d).
    assert model.logit_multiplier == pytest.approx(2.5 / 1.5)
    dim = model.head_dim
    assert model.query_scale * dim**-0.5 == pytest.approx(math.sqrt(3 * dim) / dim)
    assert not torch.allclose(GPT(plain, 0, weights)(batch.tokens_bs, batch.info), ours, rtol=1e-2, atol=1e-2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_memory_plan_counts_mups_master_weights(zero_stage: int) -> None:
    """Catches a memory plan that ignores that hidden matrices have their own master weights."""
    scenario, parallel = scenario_of("adamw"), ParallelConfig(tp=2, dp=2, zero_stage=zero_stage)
    (stage,) = planned(scenario, parallel).stages
    assert set(run_ranks(_state_bytes, 4, scenario, parallel)) == {stage.optimizer_state}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"mup": MupConfig(base_width=0)}, "model.mup.base_width = 0: must be at least 1"),
        ({"mup": MupConfig(output_multiplier=2.0)}, "model.mup only applies with model.mup.base_width"),
        ({"mup": MupConfig(64, output_multiplier=0.0)}, "model.mup.output_multiplier = 0.0: must be positive"),
        (
            {"mup": MupConfig(64), "scale_embedding": True},
            "model.scale_embedding = true cannot be combined with model.mup",
        ),
    ],
)
def test_combinations_without_a_mup_rule_are_refused(model: dict[str, object], said: str) -> None:
    """Catches a combination for which no muP is derived, and settings that are silently ignored."""
    with pytest.raises(ConfigError, match=said):
        check_shape(RootConfig(model=ModelConfig(**model)))  # type: ignore[arg-type]
