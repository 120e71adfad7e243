"""Steps in one form: costs that are found again, and a trace that Perfetto can join."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megads.engine.timeline import Span
from megads.parallel.schedule import ScheduleName, build_schedule
from megads.parallel.schedule_simulation import ScheduleCosts, run_clock
from megads.plan.step_trace import (
    RankTrace,
    idle_share,
    mean_costs,
    measured_layer_costs,
    perfetto_trace,
    simulated_step,
)

COSTS = ScheduleCosts([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [0.5, 1.0, 1.5, 2.0], latency=0.25)


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "interleaved"])
def test_costs_are_found_again(name: str) -> None:
    """Catches means over the wrong stage or part, and a wait for work that is taken for the way of a message."""
    ranks = 4 if name == "zb_h1" else 2
    timeline = run_clock(build_schedule(name, ranks, None, 6), COSTS)
    found = mean_costs(simulated_step(timeline), 4)
    assert found.forward == pytest.approx(COSTS.forward)
    whole = [a + b for a, b in zip(COSTS.backward_input, COSTS.backward_weight, strict=True)]
    assert [a + b for a, b in zip(found.backward_input, found.backward_weight, strict=True)] == pytest.approx(whole)
    if name != "interleaved":
        assert found.backward_weight == pytest.approx(COSTS.backward_weight)
    assert found.latency == pytest.approx(0.25)
    again = run_clock(build_schedule(name, ranks, None, 6), found)
    assert again.step_time == pytest.approx(timeline.step_time)


def test_costs_of_layers_are_found() -> None:
    """Catches a block that is counted at the ends twice, or the final norm as one: 4 a block, 1 and 6 at the ends."""
    blocks, bounds = (1, 3, 2, 0), (0, 2, 5, 7, 9)
    totals = [4.0 * number for number in blocks]
    totals[0] += 1
    totals[-1] += 6
    costs = ScheduleCosts([total / 4 for total in totals], [total / 2 for total in totals], [t / 4 for t in totals])
    assert measured_layer_costs(costs, bounds) == pytest.approx((0.25, 1.0, 1.5))
    two = ScheduleCosts([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    assert measured_layer_costs(two, (0, 3, 7)) is None, "ends alone do not tell blocks from the rest"


def test_idle_time_is_the_clock_s() -> None:
    """Catches a share that counts waits as work; the clock has it from the schedule's busy times."""
    for name in ScheduleName:
        timeline = run_clock(build_schedule(name, 2, None, 5), replace(COSTS, latency=0.0))
        assert idle_share(simulated_step(timeline)) == pytest.approx(timeline.bubble_share)
    waits = RankTrace(0, 0, (), (Span("receive_gradient", 0, 0, 0.0, 9.0), Span("forward", 0, 0, 9.0, 10.0)))
    assert idle_share([waits]) == 0.0 and idle_share([]) == 0.0


def test_a_trace_for_perfetto() -> None:
    """Catches times in seconds, ranks without a name, and arrows that begin or end nowhere, or run backwards."""
    traces = simulated_step(run_clock(build_schedule("zb_v", 2, None, 3), COSTS))
    events = json.loads(json.dumps(perfetto_trace({"step 7": traces})))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(trace.bars) for trace in traces)
    first = min((event for event in slices if event["cat"] == "forward"), key=lambda event: event["ts"])
    assert (first["ts"], first["dur"], first["name"], first["tid"]) == (0.0, 1e6, "forward 0", 0)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"step 7", "rank 0 (pipeline rank 0)", "rank 1 (pipeline rank 1)"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in ("s", "f"))
    # Down 0 -> 1 and 2 -> 3, up again 3 -> 2 and 1 -> 0, for each micro-batch; 1 -> 2 stays on its rank.
    assert len(starts) == 3 * 4 and starts.keys() == ends.keys()
    for name, start in starts.items():
        assert start["tid"] != ends[name]["tid"]
        assert ends[name]["ts"] - start["ts"] >= 0.25e6 - 1e-3
