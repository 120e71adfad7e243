"""Estimated costs of stages, and the partition that evens them out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.schedule import ScheduleName
from megads.plan.flops import hardware_flops_per_token, model_flops_per_token
from megads.plan.memory import Workload
from megads.plan.step_time import Speed, estimated_costs, outlook, with_estimated_partition

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=4096)
WORK = Workload(seq_len=32, micro_batch_size=2, micro_batches=6, weight_bytes=2)
SPEED = Speed(tflops=2.0)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_costs_add_up_to_the_model(name: ScheduleName) -> None:
    """Catches a layer that costs nothing, or attention's products counted otherwise than in the MFU."""
    costs = estimated_costs(MODEL, ParallelConfig(pp=2, tp=2, schedule=name), WORK, SPEED)
    total = sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    assert total == pytest.approx(model_flops_per_token(MODEL, 32) * 64 / 2 / 2e12)
    assert sum(costs.forward) == pytest.approx(total / 3)
    assert sum(costs.backward_weight) < sum(costs.forward) < sum(costs.backward_input)


def test_a_head_in_chunks_is_done_forward() -> None:
    """Catches a head whose gradients are paid for where they are not made, or that a chunk of all tokens changes."""
    plain, cut, whole = (
        estimated_costs(MODEL, ParallelConfig(pp=2, schedule=ScheduleName.zb_h1), replace(WORK, loss_chunk=n), SPEED)
        for n in (None, 20, 64)
    )
    assert plain == whole and plain.forward[0] == cut.forward[0]
    assert cut.forward[1] - plain.forward[1] == pytest.approx(2 * 2 * 4096 * 64 * 64 / 2e12)
    assert sum(map(sum, (cut.forward, cut.backward_input, cut.backward_weight))) == pytest.approx(
        sum(map(sum, (plain.forward, plain.backward_input, plain.backward_weight)))
    )


def test_recomputation_costs() -> None:
    """Catches recomputed blocks that are free on the clock."""
    parallel = ParallelConfig(pp=2, recompute=Recompute.full, recompute_blocks=[4, 0])
    plain, recomputed = (estimated_costs(MODEL, p, WORK, SPEED) for p in (ParallelConfig(pp=2), parallel))
    modes = [Recompute.full] * 4 + [Recompute.none] * 4
    more = hardware_flops_per_token(MODEL, 32, modes) - model_flops_per_token(MODEL, 32)
    assert recomputed.backward_input[0] - plain.backward_input[0] == pytest.approx(more * 64 / 2e12)
    assert recomputed.backward_input[1] == plain.backward_input[1]


def test_messages_cost_their_bytes() -> None:
    """Catches messages that are as large as all tensor-parallel ranks' together, or free."""
    speed = replace(SPEED, gigabytes_per_s=3.0, latency_us=5.0)
    cut = ParallelConfig(pp=2, tp=2, sequence_parallel=True)
    costs = estimated_costs(MODEL, cut, WORK, speed)
    assert costs.latency == pytest.approx(5e-6)
    assert costs.transfer == pytest.approx(64 * 64 * 2 / 2 / 3e9)
    free, paid = (outlook(MODEL, cut, WORK, s).timeline.step_time for s in (SPEED, speed))
    assert paid > free + 2 * costs.latency


def test_an_estimated_partition_is_faster() -> None:
    """Catches auto that is no better than counting layers where the head is heavy, or changes another layout."""
    given = ParallelConfig(pp=2, partition=Partition.auto)
    heavy = replace(MODEL, vocab_size=8192)
    chosen = with_estimated_partition(heavy, given, 32)
    assert chosen.partition is Partition.weighted and chosen.layer_costs is not None
    assert chosen.layer_costs[0] == 0 and chosen.layer_costs[2] == pytest.approx(8192 / (12 * 64 + 2 * 32), rel=1e-4)
    times = [outlook(heavy, p, WORK, SPEED).timeline.step_time for p in (ParallelConfig(pp=2), chosen)]
    assert times[1] < 0.85 * times[0]
    assert with_estimated_partition(heavy, ParallelConfig(pp=2), 32) == ParallelConfig(pp=2)


def test_even_stages_wait_as_the_formula_says() -> None:
    """Catches an outlook of another schedule or number of micro-batches than the layout's."""
    even = replace(MODEL, vocab_size=1)
    found = outlook(even, ParallelConfig(pp=4, partition=Partition.uniform), WORK, SPEED)
    assert found.unit_bubble_share == pytest.approx(3 / 9)
    assert found.bubble_share == pytest.approx(3 / 9, abs=2e-3), "but for the head's one row"
    assert found.over_ideal == pytest.approx(1.5, rel=5e-3) and found.waiting == (4, 3, 2, 1)
