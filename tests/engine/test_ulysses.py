"""Ulysses context parallelism trains the same model as one process: N1, N3, N8 and N10 on large weights."""

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

ulysses = partial(ParallelConfig, cp_kind=ContextParallelKind.ulysses)
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


@pytest.mark.quick("windowed-cp2", "eight heads-cp4", "all-tp2cp3")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_ulysses_trains_the_reference_model(model: str, layout: str) -> None:
    """Catches heads or tokens in another order after the all-to-all, slopes and sinks of another rank's heads, windows
    counted in the rank's tokens, and gradients of repeated KV heads that are not summed (N1, N3, N8, N10)."""
    assert faults_of_model(model, LAYOUTS[layout]) == []


@pytest.mark.quick("all-cp3")
@pytest.mark.parametrize(("model", "layout"), [("all", "cp3"), ("bloom", "tp2cp3"), ("windowed", "pp2cp2")])
def test_packed_documents_are_those_of_whole_samples(model: str, layout: str) -> None:
    """Catches document starts of the rank's own tokens used for whole samples, also on a stage without tokens."""
    assert faults_of_documents(model, LAYOUTS[layout]) == []


@pytest.mark.quick("tp2cp3-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_dropout_is_that_of_the_unsharded_model(impl: Implementation, layout: str) -> None:
    """Catches a dropout mask of the probabilities that depends on the rank's first head or its first token."""
    assert faults_of_dropout(impl, LAYOUTS[layout]) == []


@pytest.mark.quick("windowed")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model", ["windowed", "capped by kernels", "gpt-j"])
def test_fused_kernels_take_the_heads_of_a_rank(model: str) -> None:
    """Catches kernels that take views of the exchanged heads for contiguous tensors, or another group's keys."""
    assert faults_of_kernels(model, LAYOUTS["cp3"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_the_first_loss_in_bf16_is_within_n4(layout: str) -> None:
    """N4. Catches a conversion between the all-to-alls."""
    assert first_loss_is_within_n4(LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "pp2cp2", "tp2cp2"])
def test_deepspeeds_engine_trains_the_reference_model(layout: str) -> None:
    """Catches an engine that cuts samples without the metadata of whole ones, for training or validation."""
    assert faults_of_deepspeed(LAYOUTS[layout]) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["cp2", "tp2cp3"])
def test_scales_of_fp8_are_those_of_one_rank(layout: str, recipe: Float8Recipe) -> None:
    """N11. Catches gradients of repeated KV heads that one rank rounds in another order than the other."""
    assert faults_of_float8(recipe, LAYOUTS[layout]) == []
