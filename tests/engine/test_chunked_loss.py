"""Output projection and loss in chunks train what whole logits train, in layouts and schedules: N3, N4, N10."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.ops.config import Implementation, OpsConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.engine.test_bf16_parity import check_curve, curve_scenario
from tests.engine.test_parity import SCENARIO, reference
from tests.parity import LAYOUTS, train_layout

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("kernels")]
CHUNK = 13
"""Divides no micro-batch: chunks differ in length."""
CHUNKED = {impl: OpsConfig(impl, loss_chunk=CHUNK) for impl in (Implementation.fused, Implementation.torch)}


FUSED, TORCH = CHUNKED
SLOW = [("single", TORCH), ("tp2pp2", FUSED), ("tp2pp2", TORCH), ("tp2dp2sp", TORCH), ("pp2 zb_v", FUSED)]


@pytest.mark.parametrize(
    ("layout", "impl"),
    [
        ("single", FUSED),
        ("tp2dp2sp", FUSED),
        ("pp2 zb_v", TORCH),
        ("cp2dp2", FUSED),
        ("zero2dp2", TORCH),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_fp32(layout: str, impl: Implementation) -> None:
    """Catches sums that are reduced before the last chunk is in, a tied weight's second half that is lost, messages out
    of order beside the pipeline's, and validation that trains."""
    run = train_layout(replace(SCENARIO, ops=CHUNKED[impl]), LAYOUTS[layout])
    for check in (parity.check_first_step, parity.check_curve, parity.check_replicas, parity.check_validation):
        assert check(run, reference()) == []


@pytest.mark.slow
def test_sharded_weights() -> None:
    """Catches a head that reads its weight outside of the call for which ZeRO-3 gathers it: N3."""
    run = train_layout(replace(SCENARIO, ops=CHUNKED[TORCH]), LAYOUTS["zero3dp2"])
    for check in (parity.check_first_step, parity.check_curve, parity.check_validation):
        assert check(run, reference()) == []


def test_schedules_of_equal_placement_agree_to_the_bit() -> None:
    """Catches chunks that are added in another order where the backward pass is split."""
    scenario = replace(SCENARIO, ops=CHUNKED[FUSED])
    one, other = (
        train_layout(scenario, ParallelConfig(pp=2, schedule=schedule))
        for schedule in (ScheduleName("1f1b"), ScheduleName.zb_h1)
    )
    assert one.losses == other.losses and one.norms == other.norms


@pytest.mark.slow
@pytest.mark.parametrize("impl", CHUNKED)
def test_curve_in_bf16(impl: Implementation) -> None:
    """Catches gradients that are rounded once a chunk more than the numerics allow within 200 steps: N4."""
    losses = train_layout(replace(curve_scenario(2), ops=CHUNKED[impl]), LAYOUTS["tp2pp2"]).losses
    check_curve(f"tp2pp2, in chunks, {impl}", losses)
