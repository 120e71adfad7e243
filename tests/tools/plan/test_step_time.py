"""Estimated costs of stages, the partition that evens them out, and steps as traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megads.launch.layout import with_estimated_partition
from megads.model.config import LayerKind, ModelConfig
from megads.model.model_size import hardware_flops_per_token, model_flops_per_token
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.schedule import ScheduleName, build_schedule
from megads.parallel.schedule_simulation import ScheduleCosts, simulate_schedule
from megads.runtime.hooks import Span
from megads.tools.plan.step_time import (
    RankTrace,
    Speed,
    estimated_costs,
    forecast_schedule,
    idle_share,
    mean_costs,
    measured_layer_costs,
    perfetto_trace,
    simulated_step,
)
from megads.tools.plan.workload import Workload

MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=4096)
WORK = Workload(seq_len=32, micro_batch_size=2, micro_batches=6, weight_bytes=2)
SPEED = Speed(tflops=2.0)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_costs_add_up_to_the_model(name: ScheduleName) -> None:
    """Catches a layer without cost, and attention GEMMs counted differently than in the MFU."""
    costs = estimated_costs(MODEL, ParallelConfig(pp=2, tp=2, schedule=name), WORK, SPEED)
    total = sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    assert total == pytest.approx(model_flops_per_token(MODEL, 32) * 64 / 2 / 2e12)
    assert sum(costs.forward) == pytest.approx(total / 3)
    assert sum(costs.backward_weight) < sum(costs.forward) < sum(costs.backward_input)


def test_layers_that_differ_cost_their_own_flops() -> None:
    """Catches stages charged for the mean layer, and partition=auto that cuts by the number of blocks."""
    kinds = [LayerKind(layers=4, window=2), LayerKind(window=0, layers=4)]
    model, work = replace(MODEL, layer_pattern=kinds, vocab_size=64), replace(WORK, seq_len=512)
    given = ParallelConfig(pp=2, partition=Partition.auto)
    chosen = with_estimated_partition(model, given, 512)
    assert chosen.layer_costs is not None and len(chosen.layer_costs) == 10
    even, costs = (estimated_costs(model, p, work, SPEED) for p in (ParallelConfig(pp=2), chosen))
    assert sum(even.forward) == pytest.approx(sum(costs.forward))
    assert even.forward[1] > 1.5 * even.forward[0] and max(costs.forward) < 0.9 * max(even.forward)
    total = sum(map(sum, (costs.forward, costs.backward_input, costs.backward_weight)))
    assert total == pytest.approx(model_flops_per_token(model, 512) * 1024 / 2e12)


def test_a_head_in_chunks_is_done_forward() -> None:
    """Catches head gradients not charged to the pass that computes them, or changed by a chunk of all tokens."""
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
    """Catches activation recomputation that costs no time."""
    parallel = ParallelConfig(pp=2, recompute=Recompute.full, recompute_blocks=[4, 0])
    plain, recomputed = (estimated_costs(MODEL, p, WORK, SPEED) for p in (ParallelConfig(pp=2), parallel))
    modes = [Recompute.full] * 4 + [Recompute.none] * 4
    more = hardware_flops_per_token(MODEL, 32, modes) - model_flops_per_token(MODEL, 32)
    assert recomputed.backward_input[0] - plain.backward_input[0] == pytest.approx(more * 64 / 2e12)
    assert recomputed.backward_input[1] == plain.backward_input[1]


def test_messages_cost_their_bytes() -> None:
    """Catches p2p transfers that are as large as all tensor-parallel ranks' together, or free."""
    speed = replace(SPEED, gigabytes_per_s=3.0, latency_us=5.0)
    cut = ParallelConfig(pp=2, tp=2, sequence_parallel=True)
    costs = estimated_costs(MODEL, cut, WORK, speed)
    assert costs.latency == pytest.approx(5e-6)
    assert costs.transfer == pytest.approx(64 * 64 * 2 / 2 / 3e9)
    free, paid = (forecast_schedule(MODEL, cut, WORK, s).timeline.step_time for s in (SPEED, speed))
    assert paid > free + 2 * costs.latency


def test_an_estimated_partition_is_faster() -> None:
    """Catches partition=auto no faster than equal layer counts under a large head, or that changes other layouts."""
    given = ParallelConfig(pp=2, partition=Partition.auto)
    heavy = replace(MODEL, vocab_size=8192)
    chosen = with_estimated_partition(heavy, given, 32)
    assert chosen.partition is Partition.weighted and chosen.layer_costs is not None
    assert chosen.layer_costs[0] == 0 and chosen.layer_costs[2] == pytest.approx(8192 / (12 * 64 + 2 * 32), rel=1e-4)
    times = [forecast_schedule(heavy, p, WORK, SPEED).timeline.step_time for p in (ParallelConfig(pp=2), chosen)]
    assert times[1] < 0.85 * times[0]
    assert with_estimated_partition(heavy, ParallelConfig(pp=2), 32) == ParallelConfig(pp=2)


def test_even_stages_wait_as_the_formula_says() -> None:
    """Catches an estimate for another schedule or number of micro-batches than the layout's."""
    even = replace(MODEL, vocab_size=1)
    found = forecast_schedule(even, ParallelConfig(pp=4, partition=Partition.uniform), WORK, SPEED)
    assert found.unit_bubble_share == pytest.approx(3 / 9)
    assert found.bubble_share == pytest.approx(3 / 9, abs=2e-3), "but for the head's one row"
    assert found.over_ideal == pytest.approx(1.5, rel=5e-3) and found.waiting == (4, 3, 2, 1)


COSTS = ScheduleCosts([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [0.5, 1.0, 1.5, 2.0], latency=0.25)


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "interleaved"])
def test_costs_are_found_again(name: str) -> None:
    """Catches means over the wrong stage or pass, and a wait for work that counts as p2p transfer time."""
    ranks = 4 if name == "zb_h1" else 2
    timeline = simulate_schedule(build_schedule(name, ranks, None, 6), COSTS)
    found = mean_costs(simulated_step(timeline), 4)
    assert found.forward == pytest.approx(COSTS.forward)
    whole = [a + b for a, b in zip(COSTS.backward_input, COSTS.backward_weight, strict=True)]
    assert [a + b for a, b in zip(found.backward_input, found.backward_weight, strict=True)] == pytest.approx(whole)
    if name != "interleaved":
        assert found.backward_weight == pytest.approx(COSTS.backward_weight)
    assert found.latency == pytest.approx(0.25)
    again = simulate_schedule(build_schedule(name, ranks, None, 6), found)
    assert again.step_time == pytest.approx(timeline.step_time)


def test_costs_of_layers_are_found() -> None:
    """Catches an end block counted twice, or the final norm as a block. Costs: 4 per block, 1 and 6 at the ends."""
    blocks, bounds = (1, 3, 2, 0), (0, 2, 5, 7, 9)
    totals = [4.0 * number for number in blocks]
    totals[0] += 1
    totals[-1] += 6
    costs = ScheduleCosts([total / 4 for total in totals], [total / 2 for total in totals], [t / 4 for t in totals])
    assert measured_layer_costs(costs, bounds) == pytest.approx((0.25, 1.0, 1.5))
    two = ScheduleCosts([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    assert measured_layer_costs(two, (0, 3, 7)) is None, "ends alone do not tell blocks from the rest"


def test_idle_time_is_the_clock_s() -> None:
    """Catches a share that counts waits as work; the simulation computes it from the busy times."""
    for name in ScheduleName:
        timeline = simulate_schedule(build_schedule(name, 2, None, 5), replace(COSTS, latency=0.0))
        assert idle_share(simulated_step(timeline)) == pytest.approx(timeline.bubble_share)
    waits = RankTrace(0, 0, (), (Span("receive_gradient", 0, 0, 0.0, 9.0), Span("forward", 0, 0, 9.0, 10.0)))
    assert idle_share([waits]) == 0.0 and idle_share([]) == 0.0


def test_a_trace_for_perfetto() -> None:
    """Catches times in seconds, ranks without a name, and arrows without a start or an end, or backwards in time."""
    traces = simulated_step(simulate_schedule(build_schedule("zb_v", 2, None, 3), COSTS))
    events = json.loads(json.dumps(perfetto_trace({"step 7": traces})))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(trace.bars) for trace in traces)
    first = min((event for event in slices if event["cat"] == "forward"), key=lambda event: event["ts"])
    assert (first["ts"], first["dur"], first["name"], first["tid"]) == (0.0, 1e6, "forward 0", 0)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"step 7", "rank 0 (pipeline rank 0)", "rank 1 (pipeline rank 1)"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in ("s", "f"))
    # Forward 0 -> 1 and 2 -> 3, backward 3 -> 2 and 1 -> 0, per micro-batch; 1 -> 2 stays on its rank.
    assert len(starts) == 3 * 4 and starts.keys() == ends.keys()
    for name, start in starts.items():
        assert start["tid"] != ends[name]["tid"]
        assert ends[name]["ts"] - start["ts"] >= 0.25e6 - 1e-3
