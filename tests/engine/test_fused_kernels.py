"""Fused kernels train like plain torch, in several layouts: N3, N4, N8 and N10."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.config import AttentionKind, Position
from megads.ops.config import Implementation, OpsConfig
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.engine.test_bf16_parity import FIRST, check_curve, check_first_step, curve_scenario
from tests.engine.test_parity import DOCUMENTS, FEW_STEPS, SCENARIO, reference
from tests.parity import LAYOUTS, train_layout

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("kernels")]
FUSED = OpsConfig(Implementation.fused)


@pytest.mark.quick(f"tp2pp2-{FEW_STEPS}")
@pytest.mark.parametrize(
    ("layout", "steps"), [*((layout, 50) for layout in ("single", "tp2pp2", "cp2", "zero2dp2")), ("tp2pp2", FEW_STEPS)]
)
def test_fused_kernels_equal_the_reference_in_fp32(layout: str, steps: int) -> None:
    """Catches slopes of the wrong heads, a lost vocabulary shard, wrong positions of a context rank, and drift."""
    run = train_layout(replace(SCENARIO, ops=FUSED, steps=steps), LAYOUTS[layout])
    for check in (parity.check_first_step, parity.check_curve, parity.check_replicas, parity.check_validation):
        assert check(run, reference(steps)) == []


@pytest.mark.quick("zb_h1, recomputed")
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, pp=2, sequence_parallel=True),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_h1, recompute=Recompute.selective),
        pytest.param(ParallelConfig(dp=2, zero_stage=3), marks=pytest.mark.slow),
    ],
    ids=["tp2pp2sp", "zb_h1, recomputed", "zero3dp2"],
)
def test_kernels_with_explicit_scores_equal_the_reference(parallel: ParallelConfig) -> None:
    """Catches slopes of the wrong heads in the softmax kernel, and kernels that fail with a split backward pass,
    recomputation or sharded weights: N3."""
    model = replace(SCENARIO.model, attention=AttentionKind.fused_softmax)
    run = train_layout(replace(SCENARIO, model=model, ops=FUSED, steps=FEW_STEPS), parallel)
    for check in (parity.check_first_step, parity.check_curve, parity.check_replicas):
        assert check(run, reference(FEW_STEPS)) == []


@pytest.mark.quick("rope-cp2")
@pytest.mark.parametrize("layout", ["tp2", "cp2"])
@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_fused_kernels_keep_packed_documents_apart(position: Position, layout: str) -> None:
    """Catches a document boundary that the kernel ignores."""
    scenario = replace(DOCUMENTS[position.value], ops=FUSED)
    expected = parity.reference_of(DOCUMENTS[position.value])
    assert parity.check_first_step(train_layout(scenario, LAYOUTS[layout]), expected) == []


@pytest.mark.quick("tp2cp2")
@pytest.mark.parametrize("layout", ["single", "tp2cp2"])
def test_first_step_of_fused_kernels_in_bf16_is_within_n4(layout: str) -> None:
    """Catches a softmax or an accumulation in bf16."""
    check_first_step(layout, train_layout(replace(FIRST, ops=FUSED), LAYOUTS[layout]))


@pytest.mark.slow
def test_curve_of_fused_kernels_in_bf16_is_within_n4() -> None:
    """Catches, within 200 steps, weight gradients that are lost, counted twice or rounded more than torch's: N4."""
    losses = train_layout(replace(curve_scenario(2), ops=FUSED), LAYOUTS["tp2pp2"]).losses
    check_curve("tp2pp2, fused", losses)


@pytest.mark.slow
def test_first_step_of_augmented_attention_is_within_n4() -> None:
    """Catches slopes of the wrong heads, or rounded to bf16: N4."""
    model = replace(FIRST.model, attention=AttentionKind.augmented)
    check_first_step("tp2pp2", train_layout(replace(FIRST, model=model, ops=FUSED), LAYOUTS["tp2pp2"]))
