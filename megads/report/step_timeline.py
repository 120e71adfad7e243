"""Timed steps of a run: read from the ranks' files, drawn above the same step on the clock, written for Perfetto."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megads.errors import ConfigError
from megads.parallel.schedule import Schedule, build_schedule
from megads.parallel.schedule_clock import run_clock
from megads.plan.step_trace import RankTrace, mean_costs, measured_layer_costs, perfetto_trace, simulated_step
from megads.report.history import RunHistory, number
from megads.report.step_picture import Panel, draw_steps
from megads.runtime.files import read_json
from megads.runtime.spans import Span

TIMELINE_FOLDER = "timeline"
_FILE = re.compile(r"step_(\d+)\.rank_(\d+)\.json")
_MOST_STEPS = 5
"""Timed steps that are read, the last ones; each has thousands of events on many ranks."""


def read_steps(run_dir: Path) -> dict[int, list[RankTrace]]:
    """The timed steps of a run, ascending, each with the ranks that left a file that can be read."""
    files: dict[int, list[Path]] = {}
    for path in sorted((run_dir / TIMELINE_FOLDER).glob("step_*.json")):
        name = _FILE.fullmatch(path.name)
        if name is not None:
            files.setdefault(int(name[1]), []).append(path)
    steps = {}
    for step, paths in sorted(files.items())[-_MOST_STEPS:]:
        records = [record for record in map(_record, paths) if record is not None]
        if records:
            steps[step] = _traces(records)
    return steps


def _record(path: Path) -> Mapping[str, Any] | None:
    """What a rank wrote; None where it is not that: a process was killed, or the disk was full."""
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    places = isinstance(record, dict) and isinstance(record.get("spans"), list)
    return record if places and math.isfinite(number(record.get("rank"))) else None


def _traces(records: Sequence[Mapping[str, Any]]) -> list[RankTrace]:
    """Rows by rank, on rank 0's clock, from the first thing that any of them did."""
    rows = {int(number(record["rank"])): (record, _bars(record)) for record in records}
    begin = min((bar.start_s for _, bars in rows.values() for bar in bars), default=0.0)
    traces = []
    for rank, (record, bars) in sorted(rows.items()):
        moved = [Span(bar.kind, bar.micro_batch, bar.stage, bar.start_s - begin, bar.end_s - begin) for bar in bars]
        replica = tuple(_place(record, axis) for axis in ("dp", "cp", "tp"))
        ordered = tuple(sorted(moved, key=lambda bar: (bar.start_s, -bar.end_s)))
        traces.append(RankTrace(rank, _place(record, "pp"), replica, ordered))
    return traces


def _place(record: Mapping[str, Any], axis: str) -> int:
    value = number(record.get(axis, 0))
    return int(value) if math.isfinite(value) else 0


def _bars(record: Mapping[str, Any]) -> list[Span]:
    offset = number(record.get("clock_offset_s", 0.0))
    offset = offset if math.isfinite(offset) else 0.0
    bars = []
    for span in record["spans"]:
        if not isinstance(span, dict) or not isinstance(span.get("kind"), str):
            continue
        start, end = (number(span.get(key)) + offset for key in ("start_s", "end_s"))
        if start <= end:
            bars.append(Span(span["kind"], _index(span.get("micro_batch")), _index(span.get("stage")), start, end))
    return bars


def _index(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def schedule_of(history: RunHistory, traces: Sequence[RankTrace]) -> Schedule | None:
    """The schedule that a measured step ran; None where config and micro-batches do not say it."""
    numbers = {bar.micro_batch for trace in traces for bar in trace.bars if bar.micro_batch is not None}
    if numbers != set(range(len(numbers))) or not numbers:
        return None
    ranks = 1 + max(trace.pipeline_rank for trace in traces)
    settings = [history.setting(f"parallel.{key}") for key in ("virtual_stages", "contiguous_micro_batches")]
    virtual, contiguous = (value if isinstance(value, int) else None for value in settings)
    name = str(history.setting("parallel.schedule") or "1f1b")
    try:
        return build_schedule(name, ranks, virtual, len(numbers), contiguous=contiguous)
    except ConfigError:
        return None


def layer_costs(history: RunHistory) -> tuple[float, float, float] | None:
    """Costs of the embedding, a block and the head in blocks, over all timed steps; None where they cannot be told."""
    traces = [trace for step in read_steps(history.run_dir).values() for trace in step]
    bounds = history.last_event("start").get("stages")
    if not traces or not isinstance(bounds, list) or not all(isinstance(bound, int) for bound in bounds):
        return None
    return measured_layer_costs(mean_costs(traces, len(bounds) - 1), bounds)


def draw_step_timeline(history: RunHistory, steps: Mapping[int, list[RankTrace]], wide: bool = True) -> Figure | None:
    """The last timed step as it was, below it as the clock has it with the measured mean costs."""
    if not steps:
        return None
    most = max(len(traces) for traces in steps.values())
    step, traces = next((step, traces) for step, traces in reversed(list(steps.items())) if len(traces) == most)
    panels = [Panel(f"measured, step {step:,}", traces)]
    schedule = schedule_of(history, traces)
    if schedule is not None:
        costs = mean_costs(traces, schedule.placement.num_stages)
        simulated = simulated_step(run_clock(schedule, costs))
        panels.append(Panel(f"{schedule.name} simulated with these mean costs", simulated))
    return draw_steps(panels, wide)


def step_trace_json(run_dir: Path) -> bytes | None:
    """The last timed steps for ui.perfetto.dev; None where there are none."""
    steps = read_steps(run_dir)
    if not steps:
        return None
    return json.dumps(perfetto_trace({f"step {step}": traces for step, traces in steps.items()})).encode()
