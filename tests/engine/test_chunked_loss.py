"""Chunked output projection and loss train like full logits, in several layouts and schedules: N3, N4, N10."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megads.ops.config import Implementation, OpsConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_bf16_parity import check_curve, curve_scenario
from tests.engine.test_parity import FEW_STEPS, SCENARIO, reference
from tests.parity import LAYOUTS, MODEL, Scenario, build_engine, scenario_with, step_batches, train_layout

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("kernels")]
CHUNK = 13
"""Divides no micro-batch, so that chunks differ in length."""
CHUNKED = {impl: OpsConfig(impl, loss_chunk=CHUNK) for impl in (Implementation.fused, Implementation.torch)}


FUSED, TORCH = CHUNKED
CASES = [
    *(("single", FUSED), ("tp2dp2sp", FUSED), ("pp2 zb_v", TORCH), ("cp2dp2", FUSED), ("zero2dp2", TORCH)),
    *(("single", TORCH), ("tp2pp2", FUSED), ("tp2pp2", TORCH), ("tp2dp2sp", TORCH), ("pp2 zb_v", FUSED)),
]


@pytest.mark.quick(f"pp2 zb_v-torch-{FEW_STEPS}", f"cp2dp2-fused-{FEW_STEPS}")
@pytest.mark.parametrize(
    ("layout", "impl", "steps"),
    [*((*case, 50) for case in CASES), ("pp2 zb_v", TORCH, FEW_STEPS), ("cp2dp2", FUSED, FEW_STEPS)],
)
def test_chunked_loss_equals_the_reference_in_fp32(layout: str, impl: Implementation, steps: int) -> None:
    """Catches main_grad reduced before the last chunk is accumulated, a lost contribution to a tied weight, collectives
    out of order with the pipeline's p2p, and validation that trains."""
    run = train_layout(replace(SCENARIO, ops=CHUNKED[impl], steps=steps), LAYOUTS[layout])
    for check in (parity.check_first_step, parity.check_curve, parity.check_replicas, parity.check_validation):
        assert check(run, reference(steps)) == []


def _step(scenario: Scenario) -> tuple[int, list[str]]:
    """Largest number of tokens whose logits are in one tensor, and keys of weights whose gradients are accumulated."""
    engine = build_engine(scenario, ParallelConfig())
    optimizer, added, largest = engine.optimizer, [], 0
    inner = optimizer.add

    def add(weight: Any, gradient: Any) -> None:
        added.append(weight.placement.key)
        inner(weight, gradient)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            turned = (scenario.model.hidden_size, scenario.model.vocabulary)  # the weight
            if isinstance(made, torch.Tensor) and made.shape[-1:] == turned[1:] and made.shape != turned:
                largest = max(largest, made.numel() // turned[1])
            return made

    optimizer.add = add
    with Watch():
        engine.step(step_batches(scenario, 0), scenario.lr)
    return largest, added


@pytest.mark.quick("fused")
@pytest.mark.parametrize("impl", CHUNKED)
def test_loss_chunk_reaches_the_head_and_bypasses_autograd(impl: Implementation) -> None:
    """Catches ops.loss_chunk that does not reach the head, and embedding or head gradients computed by autograd."""
    scenario = scenario_with(ops=CHUNKED[impl], model=replace(MODEL, tie_embeddings=False))
    [(largest, added)] = run_ranks(_step, 1, scenario)
    assert 1 < largest <= CHUNK
    micro_batches = scenario.global_batch_size // scenario.micro_batch_size
    tokens = scenario.micro_batch_size * scenario.seq_len
    assert added.count("head.weight") == micro_batches * -(-tokens // CHUNK)
    assert added.count("embedding.word.weight") == micro_batches


@pytest.mark.slow
def test_chunked_loss_works_with_zero3_sharded_weights() -> None:
    """Catches a head that reads its weight outside of the call for which ZeRO-3 all-gathers it: N3."""
    run = train_layout(replace(SCENARIO, ops=CHUNKED[TORCH]), LAYOUTS["zero3dp2"])
    for check in (parity.check_first_step, parity.check_curve, parity.check_validation):
        assert check(run, reference()) == []


@pytest.mark.slow
def test_schedules_of_equal_placement_agree_to_the_bit() -> None:
    """Catches chunks accumulated in another order when the backward pass is split."""
    scenario = replace(SCENARIO, ops=CHUNKED[FUSED])
    one, other = (
        train_layout(scenario, ParallelConfig(pp=2, schedule=schedule))
        for schedule in (ScheduleName("1f1b"), ScheduleName.zb_h1)
    )
    assert one.losses == other.losses and one.norms == other.norms


@pytest.mark.slow
def test_chunked_loss_in_bf16_stays_within_n4_over_200_steps() -> None:
    """Catches an extra rounding of gradients per chunk that exceeds the bounds within 200 steps: N4."""
    losses = train_layout(replace(curve_scenario(2), ops=CHUNKED[FUSED]), LAYOUTS["tp2pp2"]).losses
    check_curve("tp2pp2, in chunks, fused", losses)
