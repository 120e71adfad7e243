"""Reports of one or several runs: a self-contained HTML page, and its charts as PNG files.

The page has inline images and no scripts, and its Content-Security-Policy forbids scripts and network access."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megads import __version__
from megads.errors import ConfigError
from megads.monitor.accounting import Accounting, Activity
from megads.monitor.console import render_event
from megads.plan.step_estimate import PHASES
from megads.runtime.files import atomic_writer
from megads.runtime.run_dir import find_run
from megads.tools.report.charts import axis_top, envelope, finite, run_charts, smooth, smoothing_width
from megads.tools.report.config import ReportConfig
from megads.tools.report.history import FloatArray, RunHistory, StoredCheckpoint, number, read_history
from megads.tools.report.planned_step import StepComparison, compare_step
from megads.tools.report.style import (
    CYCLE,
    PALETTE,
    Chart,
    close_panel,
    count_axis,
    house_style,
    open_panel,
    palette_css,
    png,
    svg,
)
from megads.tools.report.summary import KeyNumber, facts, key_numbers, short, size, status
from megads.tools.report.timeline import step_trace_json

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MOST_EVENTS = 200


def run_page(history: RunHistory, pictures: Sequence[str], compared: StepComparison | None = None) -> str:
    """The report of one run as a complete page, see `run_body`."""
    return document(history.run_id, [*run_body(history, pictures, compared), footer(history.unreadable_lines)])


def run_body(history: RunHistory, pictures: Sequence[str], compared: StepComparison | None = None) -> list[str]:
    """The report of one run without footer, as HTML parts.

    Args:
        history: history of the run.
        pictures: charts as HTML, from `picture`.
        compared: comparison of a timed step with its plan; None if no step was timed.
    """
    words, kind = status(history)
    badge = f'<span class="status {kind}">{html.escape(words)}</span>'
    rest = [
        ("Where the time went", _activities(history.accounting)),
        ("A step compared with its plan", _compared(compared)),
        ("Evaluations", _evaluations(history.events)),
        ("Events", _events(history.events)),
        ("Checkpoints on disk", _checkpoints(history.checkpoints)),
        ("Config", _config(history.config_text)),
    ]
    return [
        f"<header><h1>{html.escape(history.run_id)}</h1>{badge}</header>",
        number_cards(key_numbers(history)),
        fact_list(facts(history)),
        f'<div class="charts">{"".join(pictures)}</div>',
        *(f"<h2>{title}</h2>{content}" for title, content in rest if content),
    ]


def document(title: str, body: Iterable[str], policy: str = _POLICY, head: str = "") -> str:
    """Builds a complete HTML page.

    Args:
        title: title of the page.
        body: parts of the body, as HTML.
        policy: Content-Security-Policy of the page.
        head: additional HTML for the head.
    """
    css = resources.files(__package__).joinpath("page.css").read_text()
    colors = (
        f":root{{{palette_css(dark=False)}}}@media (prefers-color-scheme: dark){{:root{{{palette_css(dark=True)}}}}}"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)} - megads report</title>",
            f"<style>{css}{colors}</style>{head}</head>",
            "<body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def picture(page_svg: str, narrow_svg: str | None, wide: bool) -> str:
    """A chart as an HTML figure.

    Args:
        page_svg: SVG for wide windows; has class "page" if `narrow_svg` replaces it on narrow ones.
        narrow_svg: SVG for narrow windows, with class "narrow"; None if not needed.
        wide: whether the chart takes the full page width.
    """
    return f'<figure class="card{" wide" if wide else ""}">{page_svg}{narrow_svg or ""}</figure>'


def table(head: Sequence[str], rows: Iterable[str], kind: str = "") -> str:
    """An HTML table in a card that scrolls horizontally if needed.

    Args:
        head: column titles; a leading `>` marks a numeric column.
        rows: rows as HTML.
        kind: CSS class of the table.
    """
    cells = "".join(
        f'<th class="number">{name[1:]}</th>' if name.startswith(">") else f"<th>{name}</th>" for name in head
    )
    opened = f'<table class="{kind}">' if kind else "<table>"
    return (
        f'<div class="card scroll">{opened}<thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def footer(unreadable_lines: int) -> str:
    """Footer with version, time and the number of skipped lines."""
    skipped = f" {unreadable_lines:,} unreadable lines were skipped." if unreadable_lines else ""
    return f"<footer>Written by megads {__version__} at {_utc(time.time())} UTC from the run's files.{skipped}</footer>"


def number_cards(numbers: Iterable[KeyNumber]) -> str:
    """Key numbers as cards."""
    cards = (
        f'<div class="card"><dt>{html.escape(item.label)}</dt><dd><div class="value">{html.escape(item.value)}</div>'
        f'<div class="note">{html.escape(item.note)}</div></dd></div>'
        for item in numbers
    )
    return f'<dl class="numbers">{"".join(cards)}</dl>'


def fact_list(rows: Iterable[tuple[str, str]]) -> str:
    """Label-value pairs in a card."""
    items = (f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>" for label, value in rows)
    return f'<dl class="facts card">{"".join(items)}</dl>'


def _evaluations(events: Sequence[Mapping[str, Any]]) -> str:
    """Table of `megads evaluate` results; the last value of each metric and step is shown."""
    found: dict[tuple[float, str], float] = {}
    for event in events:
        results = event.get("results")
        if event.get("event") == "evaluation" and isinstance(results, Mapping):
            found |= {(number(event.get("step")), str(name)): number(value) for name, value in results.items()}
    rows = (
        f'<tr><td class="number">{step:,.0f}</td><td>{html.escape(name)}</td><td class="number">{value:.4g}</td></tr>'
        for (step, name), value in sorted(found.items())
        if not name.endswith("_stderr")
    )
    return table((">step", "what", ">value"), rows) if found else ""


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
    cells = (
        f'<tr><td>{name}</td><td class="number">{us / 1e6:,.1f}</td>'
        f'<td class="number">{us / accounting.wall_us:.2%}</td><td>{meaning}</td></tr>'
        for name, us, meaning in [*rows, ("wall time", accounting.wall_us, "from the first command on")]
    )
    return table(("activity", ">seconds", ">share", "what it is"), cells)


def _compared(compared: StepComparison | None) -> str:
    """Table of the parts of a timed step and of its plan, and a sentence about the part that differs most."""
    if compared is None:
        return ""

    def cells(name: str, measured_s: float, planned_s: float | None, what: str) -> str:
        planned = "" if planned_s is None else f"{planned_s:.4f}"
        ratio = f"{measured_s / planned_s:.2f}" if planned_s else ""
        figures = "".join(f'<td class="number">{one}</td>' for one in (planned, f"{measured_s:.4f}", ratio))
        return f"<tr><td>{name}</td>{figures}<td>{what}</td></tr>"

    planned = compared.planned_s
    rows = [
        cells(name, measured_s, None if planned is None else planned[name], PHASES[name])
        for name, measured_s in compared.measured_s.items()
    ]
    whole = None if planned is None else sum(planned.values())
    rows.append(cells("step", sum(compared.measured_s.values()), whole, f"step {compared.step:,}"))
    said = html.escape(compared.sentence)
    return f"<p>{said}</p>{table(('part', '>planned, s', '>measured, s', '>ratio', 'what'), rows)}"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    """Table of events; if there are too many, saved checkpoints are left out first, then rows in the middle."""
    shown = [event for event in events if event.get("event") not in ("launch", "exit") or event.get("exit_code")]
    if len(shown) > _MOST_EVENTS:
        shown = [event for event in shown if event.get("event") != "checkpoint_saved"]
    rows = [event_row(event) for event in shown]
    if len(rows) > _MOST_EVENTS:
        rows[_MOST_EVENTS // 4 : -3 * _MOST_EVENTS // 4] = []
    hidden = len(events) - len(rows)
    note = f'<tr><td></td><td></td><td class="detail">{hidden:,} more in events.jsonl</td></tr>' if hidden else ""
    return table(("time, UTC", "event", "details"), [*rows, note], "events") if rows else ""


def event_row(event: Mapping[str, Any], before: str = "") -> str:
    """A row of the event table.

    Args:
        event: event as recorded by the run.
        before: additional leading cells, as HTML.
    """
    name = str(event.get("event", "event")).replace("_", " ")
    line = render_event(event)
    detail = line.removeprefix(name).removeprefix(": ")
    return (
        f'<tr class="{level_of(event)}">{before}<td class="time">{_utc(number(event.get("time")))}</td>'
        f'<td class="event">{html.escape(name)}</td><td class="detail">{html.escape(detail)}</td></tr>'
    )


def level_of(event: Mapping[str, Any]) -> str:
    """Severity of an event: "error", "warning" or "info"."""
    level = str(event.get("level", "info"))
    if level == "error" or "failed" in str(event.get("event")):
        return "error"
    return "warning" if level == "warning" else "info"


def _utc(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def _checkpoints(checkpoints: Sequence[StoredCheckpoint]) -> str:
    rows = (
        f'<tr><td>{html.escape(item.name)}</td><td class="number">{item.step:,}</td>'
        f'<td class="number">{size(item.size_bytes)}</td><td>{"yes" if item.committed else "no"}</td></tr>'
        for item in checkpoints
    )
    return table(("folder", ">step", ">size", "complete"), rows) if checkpoints else ""


def _config(text: str) -> str:
    if not text:
        return ""
    return f'<details class="card"><summary>config.yaml</summary><pre>{html.escape(text)}</pre></details>'


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
        loss = smooth(loss, smoothing_width(len(history.step)))
        curve = envelope(_places(history, key), loss)
        axes.plot(curve.step, curve.mean, color=color, label=name, marker="o" if len(loss) == 1 else "", markersize=3.5)
        shown.append(loss)
        for validation in history.validations:
            place = np.interp(validation.step, history.step, _places(history, key))
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
        speed = smooth(history.columns["tokens_per_s"], smoothing_width(len(history.step)))
        curve = envelope(history.step, speed)
        axes.plot(
            curve.step, curve.mean, color=color, label=name, marker="o" if len(speed) == 1 else "", markersize=3.5
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    count_axis(axes)
    close_panel(axes, "step", "tokens/s, smoothed")
    return figure


def _comparison_page(histories: Sequence[RunHistory], pictures: Sequence[str]) -> str:
    """The report of several runs as a complete page, see `comparison_body`."""
    header = f"<header><h1>{html.escape(', '.join(names(histories)))}</h1></header>"
    last = footer(sum(history.unreadable_lines for history in histories))
    return document("comparison", [header, *comparison_body(histories, pictures), last])


def comparison_body(
    histories: Sequence[RunHistory], pictures: Sequence[str], colors: Sequence[str] = CYCLE
) -> list[str]:
    """The report of several runs without header and footer, as HTML parts.

    Args:
        histories: histories of the runs.
        pictures: charts as HTML, from `picture`.
        colors: colour of each run, in the tables as in the charts.
    """
    titles = names(histories)
    body = [
        f'<div class="charts">{"".join(pictures)}</div>',
        f"<h2>Numbers</h2>{_grid(titles, colors, _numbers(histories))}",
    ]
    differences = list(_config_differences(histories))
    if differences:
        body.append(f"<h2>Config differences</h2>{_grid(titles, colors, differences)}")
    return body


def names(histories: Sequence[RunHistory]) -> list[str]:
    """Labels of the runs: the run ids, or the directories of runs that share an id."""
    ids = [history.run_id for history in histories]
    found = [str(history.run_dir) if ids.count(history.run_id) > 1 else history.run_id for history in histories]
    # matplotlib leaves labels with a leading underscore out of the legend.
    return [f" {name}" if name.startswith("_") else name for name in found]


def _places(history: RunHistory, key: str) -> FloatArray:
    """X values of the steps: the column `key` if it has no gaps, else the step numbers."""
    column = history.columns.get(key, history.step)
    return column if np.isfinite(column).all() else history.step


def swatch(color: str) -> str:
    """A square in the colour of a run's curves.

    Args:
        color: one of CYCLE.
    """
    name = next(name for name, shade in PALETTE.items() if shade.light == color)
    return f'<span class="swatch" style="background:var(--chart-{name})"></span>'


def drawn_at(seconds: float) -> str:
    """A line that says when charts were drawn, as HTML.

    Args:
        seconds: time in seconds since 1970.
    """
    return f'<p class="note">charts drawn at {_utc(seconds)} UTC</p>'


def _grid(titles: Sequence[str], colors: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    """Table with one column per run, headed by the colour of its curves."""
    heads = [f"{swatch(color)}{html.escape(title)}" for title, color in zip(titles, colors, strict=False)]
    lines = (
        f'<tr><td class="key">{html.escape(label)}</td><td>{"</td><td>".join(map(html.escape, cells))}</td></tr>'
        for label, cells in rows
    )
    return table(("", *heads), lines)


def _numbers(histories: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    columns = [
        {"status": status(history)[0]}
        | {item.label: item.value for item in key_numbers(history)}
        | dict(facts(history))
        for history in histories
    ]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return [(label, [column.get(label, "") for column in columns]) for label in labels]


def _config_differences(histories: Sequence[RunHistory]) -> Iterator[tuple[str, list[str]]]:
    flat = [dict(_flat(history.config)) for history in histories]
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [str(config.get(key, "")) for config in flat]
        if len(set(values)) > 1 and key.partition(".")[0] not in _UNCOMPARED:
            yield key, values


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


PAGE_FILE = "report.html"
PICTURES_FOLDER = "report"
TRACE_FILE = "timeline.trace.json"


@dataclass(frozen=True)
class WrittenReport:
    """Files of a written report.

    Attributes:
        page: path of the HTML page.
        pictures: paths of the PNG files, in the order of the page.
        trace: path of the Perfetto trace of timed steps; None if the run has none.
        said: sentence that compares a step with its plan; empty without a plan.
    """

    page: Path
    pictures: tuple[Path, ...]
    trace: Path | None = None
    said: str = ""


def write_report(config: ReportConfig) -> WrittenReport:
    """Reads the runs and writes the page and the charts.

    Raises:
        ConfigError: A run cannot be read, or the files cannot be written.
    """
    histories = [read_history(find_run(name)) for name in config.runs]
    folder = Path(config.output) if config.output else histories[0].run_dir
    if len(histories) == 1:
        trace = step_trace_json(histories[0].run_dir)
        compared = compare_step(histories[0], config.device)
        written = write_pages(
            folder, run_charts(histories[0], compared), partial(run_page, histories[0], compared=compared), trace
        )
        return replace(written, said=compared.sentence if compared is not None and config.device else "")
    return write_pages(folder, comparison_charts(histories), partial(_comparison_page, histories))


def write_pages(
    folder: Path, charts: Sequence[Chart], page: Callable[[Sequence[str]], str], trace: bytes | None = None
) -> WrittenReport:
    """Draws charts and writes them together with the page.

    Args:
        folder: output folder; created if missing.
        charts: charts in the order of the page.
        page: builds the page from its charts as HTML (see `picture`).
        trace: Perfetto trace of timed steps; None if there are none.

    Raises:
        ConfigError: The files cannot be written.
    """
    try:
        (folder / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
        pngs = dict[str, bytes]()
        parts = draw_charts(charts, pngs)
        return _write(folder, page(parts), pngs, trace)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}): choose another place with output=<folder>"
        ) from error


def draw_charts(charts: Sequence[Chart], pngs: dict[str, bytes] | None = None) -> list[str]:
    """Draws charts as parts of a page; wide ones are also drawn for narrow windows. Not thread-safe.

    Args:
        charts: charts in the order of the page; empty ones are left out.
        pngs: if given, receives the charts as PNGs by name.
    """
    parts = []
    with house_style():
        for chart in charts:
            figure = chart.draw(chart.wide)
            if figure is None:
                continue
            description = html.escape(chart.description, quote=True)
            if pngs is not None:
                pngs[chart.name] = png(figure)
            narrow = chart.draw(False) if chart.wide else None
            narrow_svg = svg(narrow, f"{chart.name}-narrow", "narrow", description) if narrow else None
            page_svg = svg(figure, chart.name, "page" if narrow else "", description)
            parts.append(picture(page_svg, narrow_svg, chart.wide))
    return parts


def _write(folder: Path, page: str, pictures: dict[str, bytes], trace: bytes | None) -> WrittenReport:
    """Writes all files, the page last, so that it never refers to missing pictures."""
    trace_path = folder / PICTURES_FOLDER / TRACE_FILE if trace else None
    if trace_path is not None and trace is not None:
        with atomic_writer(trace_path) as file:
            file.write(trace)
    paths = {name: folder / PICTURES_FOLDER / f"{name}.png" for name in pictures}
    for name, path in paths.items():
        with atomic_writer(path) as file:
            file.write(pictures[name])
    with atomic_writer(folder / PAGE_FILE) as file:
        file.write(page.encode())
    return WrittenReport(folder / PAGE_FILE, tuple(paths.values()), trace_path)
