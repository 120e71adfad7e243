"""The timeline of a step, written by real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megads.engine.timeline_hook import TimelineHook, timeline_path
from megads.parallel.pipeline_actions import ActionKind
from megads.parallel.schedule import build_schedule
from megads.runtime.hooks import StepInfo, TrainState
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, Scenario, build_engine, scenario_with, step_batches

pytestmark = pytest.mark.distributed

INFO = StepInfo(
    step=0, samples=0, tokens=0, loss=0.0, grad_norm=0.0, lr=0.0, global_batch_size=0, seq_len=0, step_time_s=0.0,
    data_time_s=0.0, skipped=False, culprit="", batch_hash="",
)  # fmt: skip


def _train(scenario: Scenario, layout: str, folder: Path) -> None:
    engine = build_engine(scenario, LAYOUTS[layout])
    hook = TimelineHook(engine, folder, 2, engine.grid)
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


def test_engines_without_a_pipeline_are_timed_too(tmp_path: Path) -> None:
    """Catches an engine that times nothing, or every step."""
    run_ranks(_train, 2, scenario_with(global_batch_size=8, micro_batch_size=2), "zero2dp2", tmp_path)
    assert len(list((tmp_path / "timeline").iterdir())) == 2
    spans = json.loads(timeline_path(tmp_path, 2, 1).read_text())["spans"]
    passes = [(kind, micro_batch, 0) for micro_batch in range(2) for kind in ("forward", "backward")]
    assert [(s["kind"], s["micro_batch"], s["stage"]) for s in spans] == [*passes, ("optimizer_step", None, None)]
    assert all(one["end_s"] <= other["start_s"] for one, other in pairwise(spans))


def test_a_timeline_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a run that ends because something else lies where its timeline goes."""
    timeline_path(tmp_path, 2, 0).mkdir(parents=True)
    run_ranks(_train, 1, scenario_with(global_batch_size=4, micro_batch_size=2), "single", tmp_path)
    assert [path.name for path in (tmp_path / "timeline").iterdir()] == [timeline_path(tmp_path, 2, 0).name]


def test_every_action_of_a_step_is_there_on_a_common_clock(tmp_path: Path) -> None:
    """Catches steps that nobody asked for, actions without a time, waits that count as work, and clocks that differ: a
    stage cannot begin before the one that it waits for has ended."""
    scenario = scenario_with(global_batch_size=8, micro_batch_size=2)
    run_ranks(_train, 2, scenario, "pp2", tmp_path)
    assert len(list((tmp_path / "timeline").iterdir())) == 2
    schedule = build_schedule("1f1b", 2, 1, 4)
    ends: dict[tuple[str, int, int], float] = {}
    starts: dict[tuple[str, int, int], float] = {}
    for rank in range(2):
        spans = _spans(tmp_path, rank)
        timed = [(s["kind"], s["micro_batch"], s["stage"]) for s in spans]
        listed = [(a.kind, a.micro_batch, a.stage) for a in schedule.actions[rank] if a.kind is not ActionKind.load]
        assert timed == [*listed, ("reduce_gradients", None, None), ("optimizer_step", None, None)]
        for key, span in zip(timed, spans, strict=True):
            starts[key], ends[key] = span["start_s"], span["end_s"]
    for micro_batch in range(4):
        assert ends["forward", micro_batch, 0] < starts["forward", micro_batch, 1]
        assert starts["receive_activation", micro_batch, 1] <= ends["receive_activation", micro_batch, 1]
        assert ends["receive_activation", micro_batch, 1] <= starts["forward", micro_batch, 1]
        assert ends["backward", micro_batch, 1] < starts["backward", micro_batch, 0]
