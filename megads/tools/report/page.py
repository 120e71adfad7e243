"""Reports of one or several runs: a self-contained HTML page, and its charts as PNG files.

The page has inline images and no scripts, and its Content-Security-Policy forbids scripts and network access."""

from __future__ import annotations

import gzip
import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megads.api import find_run, render_event
from megads.monitor.accounting import Accounting, Activity
from megads.tools.plan.step_estimate import PHASES
from megads.tools.plan.step_time import perfetto_trace
from megads.tools.profile.operators import OperatorTable, merged_profile, read_operators
from megads.tools.report.charts import axis_top, envelope, finite, run_charts, smooth, smoothing_width
from megads.tools.report.config import ReportConfig
from megads.tools.report.evaluations import needle_table, position_table
from megads.tools.report.history import FloatArray, RunHistory, number, read_history
from megads.tools.report.html_page import (
    PROFILE_FILE,
    TRACE_FILE,
    Html,
    WrittenReport,
    fact_list,
    number_cards,
    table,
    utc_text,
    write_pages,
)
from megads.tools.report.planned_step import StepComparison, compare_step
from megads.tools.report.style import (
    CYCLE,
    PALETTE,
    Chart,
    close_panel,
    count_axis,
    open_panel,
)
from megads.tools.report.summary import facts, key_numbers, loss_text, median, short, size, status

_MOST_EVENTS = 200
EVENT_COLUMNS = ("time, UTC", "event", "details")


def run_body(
    history: RunHistory,
    pictures: Sequence[str],
    compared: StepComparison | None = None,
    operators: OperatorTable | None = None,
) -> list[str]:
    """The report of one run without footer, as HTML parts.

    Args:
        history: history of the run.
        pictures: charts as HTML, from `picture`.
        compared: comparison of a timed step with its plan; None if no step was timed.
        operators: operators of the profiled steps; None if none was profiled.
    """
    words, kind = status(history)
    checkpoints = [
        (item.name, f"{item.step:,}", size(item.size_bytes), "yes" if item.committed else "no")
        for item in history.checkpoints
    ]
    config = (
        f'<details class="card"><summary>config.yaml</summary><pre>{html.escape(history.config_text)}</pre></details>'
    )
    badge = f'<span class="status {kind}">{html.escape(words)}</span>'
    rest = [
        ("Training phases", _phases(history)),
        ("Where the time went", _activities(history.accounting)),
        ("A step compared with its plan", _compared(compared)),
        *_operators(operators),
        ("Evaluations", _evaluations(history.events)),
        ("Loss by position in the sequence", position_table(history)),
        ("Needles in haystacks: right answers (those of greedy generation)", needle_table(history)),
        ("Events", _events(history.events)),
        ("Checkpoints on disk", table(("folder", ">step", ">size", "complete"), checkpoints) if checkpoints else ""),
        ("Config", config if history.config_text else ""),
    ]
    return [
        f"<header><h1>{html.escape(history.run_id)}</h1>{badge}</header>",
        number_cards(key_numbers(history)),
        fact_list(facts(history)),
        f'<div class="charts">{"".join(pictures)}</div>',
        *(f"<h2>{title}</h2>{content}" for title, content in rest if content),
    ]


def _evaluations(events: Sequence[Mapping[str, Any]]) -> str:
    """Table of `megads evaluate` results; the last value of each metric and step is shown."""
    found: dict[tuple[float, str], float] = {}
    for event in events:
        results = event.get("results")
        if event.get("event") == "evaluation" and isinstance(results, Mapping):
            found |= {(number(event.get("step")), str(name)): number(value) for name, value in results.items()}
    rows = [
        (f"{step:,.0f}", name, f"{value:.4g}")
        for (step, name), value in sorted(found.items())
        if not name.endswith("_stderr")
    ]
    return table((">step", "what", ">value"), rows) if found else ""


def _phases(history: RunHistory) -> str:
    """Table of the training phases so far: sequence length, batch, tokens, speed and loss of each."""
    columns, rows = history.columns, []
    # A phase covers the steps after the one at which it began, up to the beginning of the next.
    begins = [*history.phase_begins, math.inf]
    for phase, (first, after) in enumerate(pairwise(begins), 1):
        inside = (history.step > first) & (history.step <= after)
        if not inside.any():
            continue
        length, batch, tokens, loss = (
            columns[key][inside] for key in ("seq_len", "global_batch_size", "tokens", "loss")
        )
        before = columns["tokens"][history.step <= first]
        speed, mfu = (median(finite(columns[key][inside])) for key in ("tokens_per_s", "mfu"))
        rows.append(
            (
                f"{phase}",
                f"{history.step[inside][0]:,.0f} to {history.step[inside][-1]:,.0f}",
                f"{length[-1]:,.0f}",
                f"{batch[-1]:,.0f}",
                f"{length[-1] * batch[-1]:,.0f}",
                f"{tokens[-1] - (before[-1] if len(before) else 0):,.0f}",
                f"{speed:,.0f}",
                f"{mfu:.1%}",
                loss_text(float(loss[-1])),
            )
        )
    head = ("phase", ">steps", ">tokens a sample", ">samples a step", ">tokens a step", ">tokens trained")
    return table((*head, ">tokens/s", ">MFU", ">last loss"), rows) if rows else ""


_MEANINGS = {
    Activity.queue: "waiting for the scheduler to start the job again",
    Activity.start: "starting the command and its ranks up to the first step, and ending them",
    Activity.load: "verifying and loading the checkpoint that a start continues from",
    Activity.train: "steps that count",
    Activity.validate: "validations and tasks during training",
    Activity.save: "blocked on checkpoints",
    Activity.detect: "from the first sign of a fault until all ranks had ended",
    Activity.recover: "from there to the next step",
    Activity.lost: "steps that were trained again or not finished",
    Activity.stopped: "not running",
}


def _activities(accounting: Accounting | None) -> str:
    """Table of the wall time by activity, with the total."""
    if accounting is None or not accounting.wall_us:
        return ""
    rows = [(str(activity), us, _MEANINGS[activity]) for activity, us in accounting.spent_us.items()]
    rows.append(("wall time", accounting.wall_us, "from the first command on"))
    cells = [(name, f"{us / 1e6:,.1f}", f"{us / accounting.wall_us:.2%}", meaning) for name, us, meaning in rows]
    return table(("activity", ">seconds", ">share", "what it is"), cells)


def _compared(compared: StepComparison | None) -> str:
    """Table of the parts of a timed step and of its plan, and a sentence about the part that differs most."""
    if compared is None:
        return ""

    planned_s = compared.planned_s or {}
    parts = [(name, seconds, planned_s.get(name), PHASES[name]) for name, seconds in compared.measured_s.items()]
    whole = sum(planned_s.values()) if planned_s else None
    parts.append(("step", sum(compared.measured_s.values()), whole, f"step {compared.step:,}"))
    rows = [
        (
            name,
            "" if planned is None else f"{planned:.4f}",
            f"{measured:.4f}",
            f"{measured / planned:.2f}" if planned else "",
            what,
        )
        for name, measured, planned, what in parts
    ]
    head = ("part", ">planned, s", ">measured, s", ">ratio", "what")
    return f"<p>{html.escape(compared.sentence)}</p>{table(head, rows)}"


_MOST_OPERATORS = 40


def _operators(times: OperatorTable | None) -> list[tuple[str, str]]:
    """Tables of the parts of the code and of their longest operators in profiled steps, with their titles."""
    if times is None:
        return []
    steps = f"steps {times.first_step:,} to {times.last_step:,}"
    ranks = "rank " + str(times.ranks[0]) if len(times.ranks) == 1 else f"ranks {', '.join(map(str, times.ranks))}"
    what = "time on the GPU" if times.on_gpu else "time on the CPU, without the operators inside"
    parts, scale = times.parts(), 1e3 / times.num_steps
    total = sum(parts.values()) or 1.0
    of_parts = [(part, f"{scale * seconds:,.3f}", f"{seconds / total:.1%}") for part, seconds in parts.items()]
    rows = [
        (
            row.part,
            row.phase,
            row.name,
            f"{row.calls / times.num_steps:,.1f}",
            f"{scale * row.seconds:,.3f}",
            f"{row.seconds / total:.1%}",
        )
        for row in times.rows[:_MOST_OPERATORS]
    ]
    head = ("part", "phase", "operator", ">calls", ">ms", ">share")
    note = f"<p>{html.escape(f'{what}; mean of a step, {ranks}')}</p>"
    return [
        (f"Parts of a step, {steps}", note + table(("part", ">ms", ">share"), of_parts)),
        (f"Longest operators, {steps}", table(head, rows)),
    ]


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    """Table of events; if there are too many, saved checkpoints are left out first, then rows in the middle."""
    shown = [event for event in events if event.get("event") not in ("launch", "exit") or event.get("exit_code")]
    if len(shown) > _MOST_EVENTS:
        shown = [event for event in shown if event.get("event") != "checkpoint_saved"]
    rows = [event_table_row(event) for event in shown]
    if len(rows) > _MOST_EVENTS:
        rows[_MOST_EVENTS // 4 : -3 * _MOST_EVENTS // 4] = []
    hidden = len(events) - len(rows)
    note = Html(f'<tr><td></td><td></td><td class="detail">{hidden:,} more in events.jsonl</td></tr>')
    return table(EVENT_COLUMNS, [*rows, note] if hidden else rows, "events") if rows else ""


def event_table_row(event: Mapping[str, Any], before: str = "") -> Html:
    """A row of the event table.

    Args:
        event: event as recorded by the run.
        before: additional leading cells, as HTML.
    """
    name = str(event.get("event", "event")).replace("_", " ")
    line = render_event(event)
    detail = line.removeprefix(name).removeprefix(": ")
    return Html(
        f'<tr class="{event_severity(event)}">{before}<td class="time">{utc_text(number(event.get("time")))}</td>'
        f'<td class="event">{html.escape(name)}</td><td class="detail">{html.escape(detail)}</td></tr>'
    )


def event_severity(event: Mapping[str, Any]) -> str:
    """Severity of an event: "error", "warning" or "info"."""
    level = str(event.get("level", "info"))
    if level == "error" or "failed" in str(event.get("event")):
        return "error"
    return "warning" if level == "warning" else "info"


_UNCOMPARED = ("run", "logging")
"""Config sections that do not affect what a run computes; left out of comparisons."""


def comparison_charts(histories: Sequence[RunHistory], colors: Sequence[str] = CYCLE) -> list[Chart]:
    """The charts of a comparison in the order of the page.

    Args:
        histories: histories of the runs.
        colors: colour of each run.
    """
    losses = partial(_draw_losses, histories, colors)
    return [
        Chart("loss", "Loss of every run over tokens", partial(losses, "tokens"), wide=True),
        Chart("loss_over_steps", "Loss of every run over steps", partial(losses, "steps")),
        Chart("throughput", "Tokens per second of every run over steps", partial(_draw_speeds, histories, colors)),
    ]


def _draw_losses(histories: Sequence[RunHistory], colors: Sequence[str], key: str, wide: bool) -> Figure:
    """Draws smoothed training losses as lines and validation losses as points, over tokens or steps."""
    figure, axes = open_panel(f"Loss over {key}", wide)
    shown = []
    for name, history, color in zip(names(histories), histories, colors, strict=False):
        loss = history.columns["loss"]
        # Smoothing would widen spikes.
        if (top := axis_top(loss)) is not None:
            loss = np.where(loss > top, np.nan, loss)
        places = history.columns.get(key, history.step)
        if not np.isfinite(places).all():
            places = history.step
        loss = _draw_smoothed(axes, places, loss, name, color)
        shown.append(loss)
        for validation in history.validations:
            place = np.interp(validation.step, history.step, places)
            axes.plot(place, finite(validation.loss), color=color, linestyle="", marker="D", markersize=4)
    axes.set_ylim(top=axis_top(np.concatenate(shown)))
    count_axis(axes)
    if key == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    close_panel(axes, key, "nats per token (points: validation)")
    return figure


def _draw_speeds(histories: Sequence[RunHistory], colors: Sequence[str], wide: bool) -> Figure:
    """Draws smoothed tokens per second."""
    figure, axes = open_panel("Throughput", wide)
    for name, history, color in zip(names(histories), histories, colors, strict=False):
        _draw_smoothed(axes, history.step, history.columns["tokens_per_s"], name, color)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    count_axis(axes)
    close_panel(axes, "step", "tokens/s, smoothed")
    return figure


def _draw_smoothed(axes: Axes, places: FloatArray, values: FloatArray, name: str, color: str) -> FloatArray:
    """Draws a smoothed curve and returns its values."""
    values = smooth(values, smoothing_width(len(values)))
    curve = envelope(places, values)
    axes.plot(curve.step, curve.mean, color=color, label=name, marker="o" if len(values) == 1 else "", markersize=3.5)
    return values


def _comparison_page(histories: Sequence[RunHistory], pictures: Sequence[str]) -> list[str]:
    header = f"<header><h1>{html.escape(', '.join(names(histories)))}</h1></header>"
    return [header, *comparison_body(histories, pictures)]


def comparison_body(
    histories: Sequence[RunHistory], pictures: Sequence[str], colors: Sequence[str] = CYCLE
) -> list[str]:
    """The report of several runs without header and footer, as HTML parts.

    Args:
        histories: histories of the runs.
        pictures: charts as HTML, from `picture`.
        colors: colour of each run, in the tables as in the charts.
    """
    numbers = [
        {"status": status(history)[0]}
        | {item.label: item.value for item in key_numbers(history)}
        | dict(facts(history))
        for history in histories
    ]
    configs = [dict(_flat(history.config)) for history in histories]
    heads = [Html(swatch(color) + html.escape(title)) for title, color in zip(names(histories), colors, strict=False)]
    body = [f'<div class="charts">{"".join(pictures)}</div>']
    for title, columns in (("Numbers", numbers), ("Config differences", configs)):
        labels = dict.fromkeys(label for column in columns for label in column)
        rows = [(label, *(str(column.get(label, "")) for column in columns)) for label in labels]
        if columns is configs:
            rows = [
                (key, *values)
                for key, *values in rows
                if len(set(values)) > 1 and key.partition(".")[0] not in _UNCOMPARED
            ]
        if rows:
            body.append(f"<h2>{title}</h2>{table(('', *heads), rows, 'grid')}")
    return body


def names(histories: Sequence[RunHistory]) -> list[str]:
    """Labels of the runs: the run ids, or the directories of runs that share an id."""
    ids = [history.run_id for history in histories]
    found = [str(history.run_dir) if ids.count(history.run_id) > 1 else history.run_id for history in histories]
    # matplotlib leaves labels with a leading underscore out of the legend.
    return [f" {name}" if name.startswith("_") else name for name in found]


def swatch(color: str) -> str:
    """A square in the colour of a run's curves.

    Args:
        color: one of CYCLE.
    """
    name = next(name for name, shade in PALETTE.items() if shade.light == color)
    return f'<span class="swatch" style="background:var(--chart-{name})"></span>'


def drawn_at_line(seconds: float) -> str:
    """A line that says when charts were drawn, as HTML.

    Args:
        seconds: time in seconds since 1970.
    """
    return f'<p class="note">charts drawn at {utc_text(seconds)} UTC</p>'


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write_report(config: ReportConfig) -> WrittenReport:
    """Reads the runs and writes the page and the charts.

    Raises:
        ConfigError: A run cannot be read, or the files cannot be written.
    """
    histories = [read_history(find_run(name)) for name in config.runs]
    folder = Path(config.output) if config.output else histories[0].run_dir
    if len(histories) > 1:
        unreadable = sum(history.unreadable_lines for history in histories)
        body = partial(_comparison_page, histories)
        return write_pages(folder, comparison_charts(histories), "comparison", body, unreadable)
    history = histories[0]
    steps = {f"step {step}": traces for step, traces in history.timed_steps.items()}
    traces = {TRACE_FILE: json.dumps(perfetto_trace(steps)).encode()} if steps else {}
    if (profile := merged_profile(history.run_dir)) is not None:
        traces[PROFILE_FILE] = gzip.compress(json.dumps(profile).encode(), compresslevel=4)
    compared = compare_step(history, config.device)
    operators = read_operators(history.run_dir)
    charts, body = run_charts(history, compared), partial(run_body, history, compared=compared, operators=operators)
    written = write_pages(folder, charts, history.run_id, body, history.unreadable_lines, traces)
    return replace(written, said=compared.sentence if compared is not None and config.device else "")
