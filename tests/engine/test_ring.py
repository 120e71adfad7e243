"""Ring attention trains the same model as one process: N1, N3, N8 and N10 on large weights."""

from __future__ import annotations

from functools import partial

import pytest

from megads.ops.config import Float8Recipe, Implementation
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.engine.context_kinds import (
    faults_of_deepspeed,
    faults_of_documents,
    faults_of_dropout,
    faults_of_float8,
    faults_of_kernels,
    faults_of_model,
    first_loss_is_within_n4,
)
from tests.engine.test_float8 import RECIPES

pytestmark = pytest.mark.distributed

ring = partial(ParallelConfig, cp_kind=ContextParallelKind.ring)
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
    ("eight heads", "cp4"),
    ("eight heads", "tp2cp2"),
    ("narrow", "tp2pp2cp2"),
    ("windowed", "pp2cp3"),
    ("windowed", "cp2dp2"),
    ("windowed", "cp2 zb_v, recomputed"),
    ("capped", "cp3, cores recomputed"),
    ("windowed", "zero2cp2"),
    ("two KV heads", "zero3cp2tp2"),
]


@pytest.mark.quick("windowed-cp3", "all-tp2cp3", "narrow-cp2")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_ring_attention_trains_the_reference_model(model: str, layout: str) -> None:
    """Catches blocks that are combined without their log-sum-exps, positions or windows counted in a block, keys that
    are not sent although a query sees them, and gradients of keys that reach another rank (N1, N3, N8, N10)."""
    assert faults_of_model(model, LAYOUTS[layout]) == []


@pytest.mark.quick("all-cp3")
@pytest.mark.parametrize(
    ("model", "layout"), [("all", "cp3"), ("bloom", "tp2cp3"), ("windowed", "pp2cp2"), ("narrow", "cp4")]
)
def test_packed_documents_are_those_of_whole_samples(model: str, layout: str) -> None:
    """Catches document starts of other queries, and queries that see no key of a block, also on a middle stage."""
    assert faults_of_documents(model, LAYOUTS[layout]) == []


@pytest.mark.quick("tp2cp2-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("layout", ["cp2", "cp4", "tp2cp2", "tp2cp3", "cp3, cores recomputed"])
def test_dropout_is_that_of_the_unsharded_model(impl: Implementation, layout: str) -> None:
    """Catches a dropout mask of the probabilities that depends on the block, the rank's first head or first token."""
    assert faults_of_dropout(impl, LAYOUTS[layout]) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["windowed", "gpt-j"])
def test_other_operators_may_be_kernels(model: str) -> None:
    """Catches megads' kernels before and after attention that take the layout of its output for another one."""
    assert faults_of_kernels(model, LAYOUTS["cp3"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_the_first_loss_in_bf16_is_within_n4(layout: str) -> None:
    """N4. Catches parts of the output that are combined in bf16."""
    assert first_loss_is_within_n4(LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2cp2", "tp2cp2"])
def test_deepspeeds_engine_trains_the_reference_model(layout: str) -> None:
    """Catches an engine that cuts samples for another kind of context parallelism, for training or validation."""
    assert faults_of_deepspeed(LAYOUTS[layout]) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_scales_of_fp8_are_those_of_one_rank(layout: str, recipe: Float8Recipe) -> None:
    """N11. Catches gradients of queries and keys that are rounded before they are summed over blocks."""
    assert faults_of_float8(recipe, LAYOUTS[layout]) == []
