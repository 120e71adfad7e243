"""Ring attention trains the same model as one process: N1, N3, N8 and N10 on large weights."""

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


def ring(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(cp_kind=ContextParallelKind.ring, **sizes)


LAYOUTS = {
    "cp2": ring(cp=2),
    "cp3": ring(cp=3),
    "cp4": ring(cp=4),
    "tp2cp2": ring(tp=2, cp=2),
    "tp2cp3": ring(tp=2, cp=3, sequence_parallel=True),
    "tp2pp2cp2": ring(tp=2, pp=2, cp=2),
    "pp2cp2": ring(pp=2, cp=2),
    "pp2cp3": ring(pp=2, cp=3),
    "cp2dp2": ring(cp=2, dp=2, bucket_elements=parity.SMALL_BUCKET),
    "cp2 zb_v, recomputed": ring(cp=2, pp=2, schedule=ScheduleName.zb_v, recompute=Recompute.full),
    "cp3, cores recomputed": ring(cp=3, recompute=Recompute.selective),
    "zero2cp2": ring(cp=2, zero_stage=2),
    "zero3cp2tp2": ring(cp=2, tp=2, zero_stage=3),
}
SINKS = {"num_heads": 8, "num_kv_heads": 2, "position": Position.alibi, "attention_sinks": True}
NARROW = {"window": 3, "num_kv_heads": 2}
"""A window of at most a chunk: most shifts are omitted, and parts of chunks are sent."""
MODELS_OF_RINGS = MODELS | {"sinks": SINKS, "narrow": NARROW, "bloom": {}}
CASES = [
    ("bloom", "cp2"),
    ("bloom", "cp3"),
    ("bloom", "cp4"),
    ("bloom", "tp2cp3"),
    ("windowed", "cp2"),
    ("windowed", "cp3"),
    ("narrow", "cp2"),
    ("narrow", "cp3"),
    ("narrow", "cp4"),
    ("all", "cp2"),
    ("all", "cp4"),
    ("all", "tp2cp3"),
    ("capped", "cp2"),
    ("capped", "cp3"),
    ("qwen", "tp2cp3"),
    ("olmo2", "cp2"),
    ("gemma3", "pp2cp2"),
    ("gemma3", "cp3"),
    ("phi3 128k", "cp2"),
    ("multi-query", "cp3"),
    ("multi-query", "tp2cp3"),
    ("two KV heads", "cp4"),
    ("sinks", "cp4"),
    ("sinks", "tp2cp2"),
    ("narrow", "tp2pp2cp2"),
    ("windowed", "pp2cp3"),
    ("windowed", "cp2dp2"),
    ("windowed", "cp2 zb_v, recomputed"),
    ("capped", "cp3, cores recomputed"),
    ("windowed", "zero2cp2"),
    ("two KV heads", "zero3cp2tp2"),
]


def scenario(name: str, **changes: Any) -> Scenario:
    if name in MODELS:
        return features(name, **changes)
    return scenario_with(**{"steps": 5, "masked": True, "model": replace(MODEL, **MODELS_OF_RINGS[name])} | changes)


def expected(name: str) -> Run:
    return reference(name) if name in MODELS else parity.reference_of(scenario(name))


@pytest.mark.quick("windowed-cp3", "sinks-cp4", "all-tp2cp3", "narrow-cp2")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_ring_attention_trains_the_reference_model(model: str, layout: str) -> None:
    """Catches blocks that are combined without their log-sum-exps, positions or windows counted in a block, keys that
    are not sent although a query sees them, and gradients of keys that reach another rank (N1, N3, N8, N10)."""
    assert faults(train_layout(scenario(model), LAYOUTS[layout]), expected(model)) == []


@pytest.mark.quick("all-cp3")
@pytest.mark.parametrize(
    ("model", "layout"), [("all", "cp3"), ("bloom", "tp2cp3"), ("windowed", "pp2cp2"), ("narrow", "cp4")]
)
def test_packed_documents_are_those_of_whole_samples(model: str, layout: str) -> None:
    """Catches document starts of other queries, and queries that see no key of a block, also on a middle stage."""
    whole = scenario(model, documents=True)
    assert faults(train_layout(whole, LAYOUTS[layout]), parity.reference_of(whole)) == []


@pytest.mark.quick("tp2cp3-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("layout", ["cp2", "cp4", "tp2cp3", "cp3, cores recomputed"])
def test_dropout_is_that_of_the_unsharded_model(impl: Implementation, layout: str) -> None:
    """Catches a dropout mask of the probabilities that depends on the block, the rank's first head or first token."""
    whole = scenario_with(
        masked=True, documents=True, steps=5, model=replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    )
    run = train_layout(replace(whole, ops=OpsConfig(impl)), LAYOUTS[layout])
    assert faults(run, parity.reference_of(whole)) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["windowed", "gpt-j"])
def test_other_operators_may_be_kernels(model: str) -> None:
    """Catches megads' kernels before and after attention that take the layout of its output for another one."""
    run = train_layout(features(model, ops=FUSED), LAYOUTS["cp3"])
    assert faults(run, reference(model)) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_the_first_loss_in_bf16_is_within_n4(layout: str) -> None:
    """N4. Catches parts of the output that are combined in bf16."""
    found = train_layout(bf16("all"), LAYOUTS[layout]).losses[0]
    assert abs(found / first_loss_in_bf16("all") - 1) <= FIRST_LOSS_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2cp2", "tp2cp2"])
def test_deepspeeds_engine_trains_the_reference_model(layout: str) -> None:
    """Catches an engine that cuts samples for another kind of context parallelism, for training or validation."""
    whole = scenario("two KV heads", engine=EngineKind.deepspeed)
    assert faults(train_layout(whole, LAYOUTS[layout]), reference("two KV heads")) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", float8.RECIPES)
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_scales_of_fp8_are_those_of_one_rank(layout: str, recipe: Float8Recipe) -> None:
    """N11. Catches gradients of queries and keys that are rounded before they are summed over blocks."""
    whole = float8.scenario("llama", recipe, seq_len=24)
    assert float8.faults(train_layout(whole, LAYOUTS[layout]), parity.reference_of(whole)) == []
