"""Ulysses context parallelism trains the same model as one process: N1, N3, N8 and N10 on large weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megads.model.config import Position
from megads.ops.config import Float8Recipe, Implementation, OpsConfig
from megads.parallel.config import ContextParallelKind, EngineKind, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.engine import test_float8 as float8
from tests.engine.test_bf16_parity import FIRST_LOSS_BOUND
from tests.engine.test_model_features import FUSED, MODELS, bf16, faults, first_loss_in_bf16, reference
from tests.engine.test_model_features import scenario as features
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout

pytestmark = pytest.mark.distributed


def ulysses(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(cp_kind=ContextParallelKind.ulysses, **sizes)


LAYOUTS = {
    "cp2": ulysses(cp=2),
    "cp3": ulysses(cp=3),
    "cp4": ulysses(cp=4),
    "cp6": ulysses(cp=6),
    "tp2cp2": ulysses(tp=2, cp=2),
    "tp2cp3": ulysses(tp=2, cp=3, sequence_parallel=True),
    "tp4cp2": ulysses(tp=4, cp=2),
    "pp2cp2": ulysses(pp=2, cp=2),
    "cp2dp2": ulysses(cp=2, dp=2, bucket_elements=parity.SMALL_BUCKET),
    "cp2 zb_v, recomputed": ulysses(cp=2, pp=2, schedule=ScheduleName.zb_v, recompute=Recompute.full),
    "cp2, cores recomputed": ulysses(cp=2, recompute=Recompute.selective),
    "zero2cp2": ulysses(cp=2, zero_stage=2),
    "zero3cp2tp2": ulysses(cp=2, tp=2, zero_stage=3),
}
EIGHT_HEADS = {"num_heads": 8, "num_kv_heads": 2, "position": Position.alibi, "attention_sinks": True}
"""Heads for four ranks, each of which shares its KV head with another."""
MODELS_OF_HEADS = MODELS | {"eight heads": EIGHT_HEADS, "bloom": {}}
# Six heads over two ranks: 2 KV heads divide, 1 and 3 are repeated; over three ranks, 2 KV heads are repeated thrice.
CASES = [
    ("bloom", "cp2"),
    ("bloom", "cp3"),
    ("bloom", "cp6"),
    ("bloom", "tp2cp3"),
    ("windowed", "cp2"),
    ("windowed", "cp3"),
    ("llama", "cp3"),
    ("all", "cp2"),
    ("all", "tp2cp3"),
    ("capped", "cp2"),
    ("capped", "cp3"),
    ("qwen", "tp2cp3"),
    ("olmo2", "cp2"),
    ("gemma3", "pp2cp2"),
    ("phi3 128k", "cp2"),
    ("multi-query", "cp3"),
    ("multi-query", "tp2cp3"),
    ("two KV heads", "cp4"),
    ("two KV heads", "tp2cp2"),
    ("eight heads", "cp4"),
    ("eight heads", "tp2cp2"),
    ("eight heads", "tp4cp2"),
    ("windowed", "cp2dp2"),
    ("windowed", "cp2 zb_v, recomputed"),
    ("capped", "cp2, cores recomputed"),
    ("windowed", "zero2cp2"),
    ("two KV heads", "zero3cp2tp2"),
]


def scenario(name: str, **changes: Any) -> Scenario:
    if name in MODELS:
        return features(name, **changes)
    return scenario_with(**{"steps": 5, "masked": True, "model": replace(MODEL, **MODELS_OF_HEADS[name])} | changes)


def expected(name: str) -> Run:
    return reference(name) if name in MODELS else parity.reference_of(scenario(name))


@pytest.mark.quick("windowed-cp2", "eight heads-cp4", "all-tp2cp3")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_ulysses_trains_the_reference_model(model: str, layout: str) -> None:
    """Catches heads or tokens in another order after the all-to-all, slopes and sinks of another rank's heads, windows
    counted in the rank's tokens, and gradients of repeated KV heads that are not summed (N1, N3, N8, N10)."""
    assert faults(train_layout(scenario(model), LAYOUTS[layout]), expected(model)) == []


@pytest.mark.quick("all-cp3")
@pytest.mark.parametrize(("model", "layout"), [("all", "cp3"), ("bloom", "tp2cp3"), ("windowed", "pp2cp2")])
def test_packed_documents_are_those_of_whole_samples(model: str, layout: str) -> None:
    """Catches document starts of the rank's own tokens used for whole samples, also on a stage without tokens."""
    whole = scenario(model, documents=True)
    assert faults(train_layout(whole, LAYOUTS[layout]), parity.reference_of(whole)) == []


@pytest.mark.quick("tp2cp3-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_dropout_is_that_of_the_unsharded_model(impl: Implementation, layout: str) -> None:
    """Catches a dropout mask of the probabilities that depends on the rank's first head or its first token."""
    whole = scenario_with(
        masked=True, documents=True, steps=5, model=replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    )
    run = train_layout(replace(whole, ops=OpsConfig(impl)), LAYOUTS[layout])
    assert faults(run, parity.reference_of(whole)) == []


@pytest.mark.quick("windowed")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["windowed", "capped by kernels", "gpt-j"])
def test_fused_kernels_take_the_heads_of_a_rank(model: str) -> None:
    """Catches kernels that take views of the exchanged heads for contiguous tensors, or another group's keys."""
    run = train_layout(features(model, ops=FUSED), LAYOUTS["cp3"])
    assert faults(run, reference(model)) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_the_first_loss_in_bf16_is_within_n4(layout: str) -> None:
    """N4. Catches a conversion between the all-to-alls."""
    found = train_layout(bf16("all"), LAYOUTS[layout]).losses[0]
    assert abs(found / first_loss_in_bf16("all") - 1) <= FIRST_LOSS_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2cp2", "tp2cp2"])
def test_deepspeeds_engine_trains_the_reference_model(layout: str) -> None:
    """Catches an engine that cuts samples without the metadata of whole ones, for training or validation."""
    whole = scenario("two KV heads", engine=EngineKind.deepspeed)
    assert faults(train_layout(whole, LAYOUTS[layout]), reference("two KV heads")) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", float8.RECIPES)
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_scales_of_fp8_are_those_of_one_rank(layout: str, recipe: Float8Recipe) -> None:
    """N11. Catches gradients of repeated KV heads that one rank rounds in another order than the other."""
    whole = float8.scenario("llama", recipe, seq_len=24)
    assert float8.faults(train_layout(whole, LAYOUTS[layout]), parity.reference_of(whole)) == []
