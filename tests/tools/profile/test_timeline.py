"""Timers of a step, the common clock of ranks, and the timeline that real ranks write."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.engine.spans import SpanRecorder
from megads.parallel.pipeline_actions import ActionKind
from megads.parallel.schedule import build_schedule
from megads.parallel.schedule_simulation import ScheduleCosts, simulate_schedule
from megads.runtime.distributed import open_control_plane
from megads.runtime.hooks import StepInfo, TrainState
from megads.tools.profile.timeline import PINGS, TimelineHook, clock_offset_s, timeline_path
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches

INFO = StepInfo(
    step=0, samples=0, tokens=0, loss=0.0, grad_norm=0.0, lr=0.0, global_batch_size=0, seq_len=0, step_time_s=0.0,
    data_time_s=0.0, skipped=False, culprit="", batch_hash="",
)  # fmt: skip


def _train(scenario: Scenario, layout: str, folder: Path) -> None:
    engine = build_engine(scenario, LAYOUTS[layout])
    hook = TimelineHook(engine.watch_spans, folder, 2, engine.grid)
    hook.on_start(TrainState())
    for step in range(1, 4):
        engine.step(step_batches(scenario, step, engine.grid.dp.rank, engine.grid.dp.size), scenario.lr)
        hook.on_step(replace(INFO, step=step, last=step == 3))


def _spans(folder: Path, rank: int) -> list[dict[str, Any]]:
    record = json.loads(timeline_path(folder, 2, rank).read_text())
    assert (record["rank"], record["pp"], record["tp"], record["step"]) == (rank, rank, 0, 2)
    offset_s = record["clock_offset_s"]
    return [
        span | {"start_s": span["start_s"] + offset_s, "end_s": span["end_s"] + offset_s} for span in record["spans"]
    ]


@pytest.mark.distributed
def test_steps_without_a_pipeline_are_timed(tmp_path: Path) -> None:
    """Catches an engine that times no step, or every step."""
    run_ranks(_train, 2, scenario_with(global_batch_size=8, micro_batch_size=2), "zero2dp2", tmp_path)
    assert len(list((tmp_path / "timeline").iterdir())) == 2
    spans = json.loads(timeline_path(tmp_path, 2, 1).read_text())["spans"]
    passes = [(kind, micro_batch, 0) for micro_batch in range(2) for kind in ("forward", "backward")]
    assert [(s["kind"], s["micro_batch"], s["stage"]) for s in spans] == [*passes, ("optimizer_step", None, None)]
    assert all(one["end_s"] <= other["start_s"] for one, other in pairwise(spans))


@pytest.mark.distributed
def test_an_unwritable_timeline_does_not_end_the_run(tmp_path: Path) -> None:
    """Catches a run that fails because its timeline file cannot be written."""
    timeline_path(tmp_path, 2, 0).mkdir(parents=True)
    run_ranks(_train, 1, scenario_with(global_batch_size=4, micro_batch_size=2), "single", tmp_path)
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == [timeline_path(tmp_path, 2, 0).name]


@pytest.mark.distributed
@pytest.mark.always
def test_a_timed_step_has_every_action_on_a_common_clock(tmp_path: Path) -> None:
    """Catches timed steps that were not requested, actions without a time, waits counted as compute, and clocks that
    differ: a stage cannot start before the one it depends on has ended."""
    scenario = scenario_with(global_batch_size=8, micro_batch_size=2)
    run_ranks(_train, 2, scenario, "pp2", tmp_path)
    assert len(list((tmp_path / "timeline").iterdir())) == 2
    simulated = simulate_schedule(build_schedule("1f1b", 2, 1, 4), ScheduleCosts([1.0] * 2, [1.0] * 2, [1.0] * 2))
    ends: dict[tuple[str, int, int], float] = {}
    starts: dict[tuple[str, int, int], float] = {}
    for rank in range(2):
        spans = _spans(tmp_path, rank)
        timed = [(s["kind"], s["micro_batch"], s["stage"]) for s in spans]
        actions = [span.action for span in simulated.spans[rank]]
        listed = [(a.kind, a.micro_batch, a.stage) for a in actions if a.kind is not ActionKind.load]
        assert timed == [*listed, ("reduce_gradients", None, None), ("optimizer_step", None, None)]
        for key, span in zip(timed, spans, strict=True):
            starts[key], ends[key] = span["start_s"], span["end_s"]
    for micro_batch in range(4):
        assert ends["forward", micro_batch, 0] < starts["forward", micro_batch, 1]
        assert starts["receive_activation", micro_batch, 1] <= ends["receive_activation", micro_batch, 1]
        assert ends["receive_activation", micro_batch, 1] <= starts["forward", micro_batch, 1]
        assert ends["backward", micro_batch, 1] < starts["backward", micro_batch, 0]


def test_spans_last_as_long_as_what_ran_inside() -> None:
    """Catches spans recorded without a request, with lost names, or with a wrong start or end."""
    recorder = SpanRecorder(torch.device("cpu"))
    with recorder.span("before"):
        pass
    recorder.begin()
    before_s = time.monotonic()
    with recorder.span("forward", 3, 1):
        time.sleep(0.02)
    with recorder.span("optimizer_step"):
        pass
    after_s = time.monotonic()
    spans = recorder.end()
    assert [(s.kind, s.micro_batch, s.stage) for s in spans] == [("forward", 3, 1), ("optimizer_step", None, None)]
    assert before_s <= spans[0].start_s < spans[0].start_s + 0.02 <= spans[0].end_s <= spans[1].start_s <= after_s


HOSTS, AHEAD_S = ("a", "a", "b", "c", "c", "d"), {"a": 0.0, "b": 100.0, "c": -7.0, "d": 30.0}


def _offset_of_a_machine() -> tuple[float, int]:
    """The clock offset on a rank of several machines with different clocks, and the number of pings it sent."""
    import torch.distributed as dist

    original, host = time.monotonic, HOSTS[dist.get_rank()]
    time.monotonic = lambda: original() + AHEAD_S[host]
    pings, send = 0, dist.send

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal pings
        pings += 1
        send(*args, **kwargs)

    dist.send = counted
    try:
        return clock_offset_s(open_control_plane(), host), pings
    finally:
        time.monotonic, dist.send = original, send


@pytest.mark.distributed
def test_clock_offsets_between_machines_are_found() -> None:
    """Catches an offset with the wrong sign, one without a machine on the path to rank 0, and ranks of one machine that
    each measure with their own error: in the timeline a stage would start before the one it depends on."""
    found = run_ranks(_offset_of_a_machine, len(HOSTS))
    for host, (offset_s, _) in zip(HOSTS, found, strict=True):
        assert offset_s == pytest.approx(-AHEAD_S[host], abs=0.05)
    assert found[0][0] == found[1][0] == 0.0 and found[3][0] == found[4][0]
    # Rank 0 exchanges pings with two of the three other machines; only the first rank of a machine measures.
    assert [pings // PINGS for _, pings in found] == [2, 0, 2, 1, 0, 1]


def _offset_here() -> float:
    return clock_offset_s(open_control_plane())


@pytest.mark.distributed
def test_ranks_of_one_machine_share_its_clock() -> None:
    """Catches a measured, inexact offset between ranks that read the same clock."""
    assert run_ranks(_offset_here, 2) == [0.0, 0.0]
