"""Ulysses inside groups of context-parallel ranks, and all-gather or ring between them, train the same model as one
process: N1, N3, N8 and N10 on large weights."""

from __future__ import annotations

from functools import partial

import pytest

from megads.ops.config import Float8Recipe, Implementation
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from tests.engine.context_kinds import (
    faults_of_deepspeed,
    faults_of_documents,
    faults_of_dropout,
    faults_of_float8,
    faults_of_model,
)
from tests.engine.test_float8 import RECIPES

pytestmark = pytest.mark.distributed

gather = partial(ParallelConfig, cp_kind=ContextParallelKind.allgather, cp_ulysses=2)
ring = partial(ParallelConfig, cp_kind=ContextParallelKind.ring, cp_ulysses=2)
LAYOUTS = {
    "cp4 gather": gather(cp=4),
    "cp4 ring": ring(cp=4),
    "cp6 gather, three exchange": gather(cp=6, cp_ulysses=3),
    "cp6 ring": ring(cp=6),
    "tp2cp4 gather": gather(tp=2, cp=4, sequence_parallel=True),
    "pp2cp4 ring, zb_v, recomputed": ring(cp=4, pp=2, schedule=ScheduleName.zb_v, recompute=Recompute.full),
    "cp4 gather, cores recomputed": gather(cp=4, recompute=Recompute.selective),
    "cp4 ring, cores recomputed": ring(cp=4, recompute=Recompute.selective),
    "zero2cp4 gather": gather(cp=4, zero_stage=2),
    "zero3cp4 ring": ring(cp=4, zero_stage=3),
}
# KV heads of the two ranks that exchange heads: 2 divide, 1 is sent twice.
CASES = [
    ("bloom", "cp6 gather, three exchange"),
    ("eight heads", "cp4 gather"),
    ("narrow", "cp4 ring"),
    ("windowed", "cp6 ring"),
    ("multi-query", "cp4 ring, cores recomputed"),
    ("capped", "cp4 gather, cores recomputed"),
    ("two KV heads", "tp2cp4 gather"),
    ("gemma3", "pp2cp4 ring, zb_v, recomputed"),
    ("windowed", "zero2cp4 gather"),
    ("two KV heads", "zero3cp4 ring"),
]


@pytest.mark.quick("eight heads-cp4 gather", "narrow-cp4 ring")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_two_levels_train_the_reference_model(model: str, layout: str) -> None:
    """Catches groups of other ranks than those whose tokens are adjacent, tokens of a group in another order, slopes
    and sinks of another rank's heads, and positions or windows counted in a group's tokens (N1, N3, N8, N10)."""
    assert faults_of_model(model, LAYOUTS[layout]) == []


@pytest.mark.parametrize(("model", "layout"), [("all", "cp4 gather"), ("windowed", "cp4 ring")])
def test_packed_documents_are_those_of_whole_samples(model: str, layout: str) -> None:
    """Catches document starts of the rank's own tokens, or of whole samples, for the tokens of a group."""
    assert faults_of_documents(model, LAYOUTS[layout]) == []


@pytest.mark.quick("fused-cp4 gather")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("impl", "layout"), [(Implementation.fused, "cp4 gather"), (Implementation.torch, "cp4 ring, cores recomputed")]
)
def test_dropout_is_that_of_the_unsharded_model(impl: Implementation, layout: str) -> None:
    """Catches a dropout mask of the probabilities that depends on the rank's first head or its group's first token."""
    assert faults_of_dropout(impl, LAYOUTS[layout]) == []


@pytest.mark.slow
def test_deepspeeds_engine_trains_the_reference_model() -> None:
    """Catches an engine that cuts samples without the metadata of a group's tokens, for training or validation."""
    assert faults_of_deepspeed(LAYOUTS["cp4 ring"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_of_fp8_are_those_of_one_rank(recipe: Float8Recipe) -> None:
    """N11. Catches scales that only the ranks of a group agree on."""
    assert faults_of_float8(recipe, LAYOUTS["cp4 gather"]) == []
