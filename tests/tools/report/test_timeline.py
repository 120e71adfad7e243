"""Tests when the starts of a run began and how they ended, and the step timelines that its ranks write."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.parallel.schedule import ScheduleName, build_schedule
from megads.parallel.schedule_simulation import ScheduleCosts, simulate_schedule
from megads.runtime.hooks import Span
from megads.runtime.run_dir import CONFIG_FILE
from megads.tools.plan.step_time import RankTrace, simulated_step
from megads.tools.report.config import ReportConfig
from megads.tools.report.history import read_history, read_steps
from megads.tools.report.page import write_report
from megads.tools.report.style import house_style
from megads.tools.report.timeline import draw_step_timeline, find_starts, schedule_of
from tests.tools.report.test_page import assert_self_contained
from tests.tools.report.written_runs import (
    BEGIN,
    STEP_TIME_S,
    write_eventful_run,
    write_events,
    write_start,
    write_steps,
)


def test_starts_of_an_eventful_run(tmp_path: Path) -> None:
    """Catches a killed start that is shown to last until the next one begins, and a lost exit code."""
    write_eventful_run(tmp_path)
    killed, failed, stopped = find_starts(read_history(tmp_path))
    assert (killed.begin, killed.end, killed.exit_code) == (BEGIN, BEGIN + 55, None)
    assert failed.exit_code == 1
    assert (stopped.begin, stopped.end, stopped.exit_code) == (BEGIN + 180, BEGIN + 234, 5)


def test_what_is_said_before_a_launch_is_of_that_start(tmp_path: Path) -> None:
    """Catches a killed start that is shown to last until the run is started again with another config."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 2)
    write_events(tmp_path, ("config_changed", {"time": BEGIN + 90, "message": "optim.lr 1 -> 2"}))
    write_start(tmp_path, 0, BEGIN + 91)
    killed, _ = find_starts(read_history(tmp_path))
    assert killed.end == BEGIN + 1


def test_timing_steps_is_no_start_of_its_own(tmp_path: Path) -> None:
    """Catches a new run by train.minutes that is said to have been started twice."""
    write_events(
        tmp_path,
        ("launch", {"time": BEGIN}),
        ("steps_timed", {"time": BEGIN + 5}),
        ("exit", {"time": BEGIN + 5, "exit_code": 0}),
        ("length_fixed", {"time": BEGIN + 5}),
    )
    write_start(tmp_path, 0, BEGIN + 6)
    write_steps(tmp_path, 1, 2)
    write_events(tmp_path, ("exit", {"time": BEGIN + 9, "exit_code": 5}), ("launch", {"time": BEGIN + 20}))
    first, again = find_starts(read_history(tmp_path))
    assert (first.begin, first.end, first.exit_code, again.begin) == (BEGIN, BEGIN + 9, 5, BEGIN + 20)


def test_a_run_in_progress_lasts_as_long_as_its_steps(tmp_path: Path) -> None:
    """Catches a run of hours that is shown to end with its first event."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 40, step_time_s=lambda step: STEP_TIME_S)
    [start] = find_starts(read_history(tmp_path))
    assert start.exit_code is None
    assert start.end == pytest.approx(BEGIN + 1 + 40 * STEP_TIME_S)


def test_no_launch_no_starts(tmp_path: Path) -> None:
    """Catches events of another writer that are read as starts."""
    write_steps(tmp_path, 1, 2)
    write_events(tmp_path, ("checkpoint_saved", {"step": 2}), ("launch", {"time": "yesterday"}))
    assert find_starts(read_history(tmp_path)) == []


SECONDS = ScheduleCosts([0.02] * 4, [0.03] * 4, [0.01] * 4, latency=0.004)


def write_timeline(run_dir: Path, step: int, *, replicas: int = 1) -> list[RankTrace]:
    """Writes files of pp=2 x dp=`replicas` ranks, each with its own clock; returns the step of one pipeline."""
    traces = simulated_step(simulate_schedule(build_schedule("zb_v", 2, None, 4), SECONDS))
    folder = run_dir / "timeline"
    folder.mkdir(parents=True, exist_ok=True)
    for replica in range(replicas):
        for trace in traces:
            rank = replica * 2 + trace.rank
            ahead = 1000.0 * rank
            after = Span("optimizer_step", None, None, 1.0, 1.1)
            spans = [asdict(bar) for bar in sorted((*trace.bars, after), key=lambda bar: bar.end_s)]
            for span in spans:
                span["start_s"] += ahead + 50
                span["end_s"] += ahead + 50
            record = {"step": step, "rank": rank, "pp": trace.rank, "tp": 0, "cp": 0, "dp": replica}
            path = folder / f"step_{step:08d}.rank_{rank:05d}.json"
            path.write_text(json.dumps({**record, "clock_offset_s": -ahead, "spans": spans}))
    return traces


def write_run(run_dir: Path) -> None:
    write_start(run_dir, 0, BEGIN)
    write_steps(run_dir, 1, 3)
    config = RootConfig()
    config.run.id, config.train.steps = "timed", 3
    config.parallel.pp, config.parallel.schedule = 2, ScheduleName["zb_v"]
    freeze(config, run_dir / CONFIG_FILE)


def test_clocks_are_joined(tmp_path: Path) -> None:
    """Catches a clock offset with the wrong sign, ranks in the wrong order, and spans that lose their micro-batch."""
    written = write_timeline(tmp_path, 5, replicas=2)
    [(step, traces)] = read_steps(tmp_path).items()
    assert step == 5 and [trace.rank for trace in traces] == [0, 1, 2, 3]
    assert [trace.pipeline_rank for trace in traces] == [0, 1, 0, 1]
    assert [trace.replica for trace in traces] == [(0, 0, 0)] * 2 + [(1, 0, 0)] * 2
    for trace, original in zip(traces, written * 2, strict=True):
        passes = [bar for bar in trace.bars if bar.kind != "optimizer_step"]
        assert len(passes) == len(original.bars) == len(trace.bars) - 1
        for bar, one in zip(
            sorted(passes, key=lambda bar: (bar.kind, bar.micro_batch, bar.stage)),
            sorted(original.bars, key=lambda bar: (bar.kind, bar.micro_batch or 0, bar.stage or 0)),
            strict=True,
        ):
            assert (bar.kind, bar.micro_batch, bar.stage) == (one.kind, one.micro_batch, one.stage)
            assert (bar.start_s, bar.end_s) == pytest.approx((one.start_s, one.end_s), abs=1e-9)


def test_torn_files_are_passed_over(tmp_path: Path) -> None:
    """Catches a report that fails because a rank was killed while writing, and a drawn step that lacks ranks."""
    write_run(tmp_path)
    write_timeline(tmp_path, 5)
    write_timeline(tmp_path, 6)
    (tmp_path / "timeline" / "step_00000006.rank_00001.json").write_text('{"rank": 1, "spans": [')
    (tmp_path / "timeline" / "step_00000006.rank_00002.part").write_text("")
    odd = [3, {"kind": 4}, {"kind": "forward", "micro_batch": "1", "stage": -1, "start_s": 1, "end_s": 2}]
    (tmp_path / "timeline" / "step_00000007.rank_00000.json").write_text(json.dumps({"rank": 0, "spans": odd}))
    steps = read_steps(tmp_path)
    assert {step: len(traces) for step, traces in steps.items()} == {5: 2, 6: 1, 7: 1}
    assert [(bar.micro_batch, bar.stage) for bar in steps[7][0].bars] == [(None, None)]
    with house_style():
        figure = draw_step_timeline(read_history(tmp_path))
    assert figure is not None
    assert [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes] == [
        "measured, step 5",
        "zb_v simulated with these mean costs",
    ]


def test_the_simulated_step_is_the_run_s(tmp_path: Path) -> None:
    """Catches a simulated step with another schedule than the run's, or with other costs than the measured ones."""
    write_run(tmp_path)
    written = write_timeline(tmp_path, 5)
    history = read_history(tmp_path)
    assert schedule_of(history, read_steps(tmp_path)[5]) == build_schedule("zb_v", 2, None, 4)
    with house_style():
        figure = draw_step_timeline(history)
    assert figure is not None
    measured, simulated = (axes.get_title(loc="left").rpartition(": ")[2] for axes in figure.axes)
    assert measured == simulated
    end = max(bar.end_s for trace in written for bar in trace.bars)
    assert figure.axes[0].get_xlim()[1] == pytest.approx(max(end, 1.1))


def test_report_has_the_picture_and_the_trace(tmp_path: Path) -> None:
    """Catches a report without the timed steps; `test_page` has runs without any."""
    write_run(tmp_path)
    write_events(tmp_path, ("start", {"step": 3, "total_steps": 3, "stages": [0, 2, 4, 6, 9]}))
    write_timeline(tmp_path, 5)
    write_timeline(tmp_path, 6)
    written = write_report(ReportConfig(run=str(tmp_path)))
    assert "step_timeline.png" in [path.name for path in written.pictures]
    page = written.page.read_text()
    assert_self_contained(page)
    assert "measured, step 6" in page and "weight gradient" in page
    # The clock's costs are equal on all four stages, and by the start event they hold 1, 2, 2 and 1 blocks.
    assert "[1.00,1,1.00]: embedding, a block, head, measured" in page
    assert written.traces == (tmp_path / "report" / "timeline.trace.json",)
    events = json.loads(written.traces[0].read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"step 5", "step 6"}
