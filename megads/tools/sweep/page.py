"""Report of a sweep: one HTML page and a few PNG images, in the style of `megads report`.

Drawing functions return None if there is nothing to draw.
"""

from __future__ import annotations

import html
import math
import os
import shlex
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from urllib.parse import quote

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from megads.runtime.progress import render_duration
from megads.tools.report.html_page import (
    PAGE_FILE,
    Html,
    KeyNumber,
    fact_list,
    number_cards,
    table,
    write_pages,
)
from megads.tools.report.style import BLUE, GREEN, GRID, MUTED, ORANGE, RED, Chart, close_panel, count_axis, open_panel
from megads.tools.sweep.config import Direction
from megads.tools.sweep.points import UNFINISHED, Curve, Point, PointState, read_points, validation_of
from megads.tools.sweep.results import Ranked, SweepRecord, best_command, ranking, read_record

_MOST_LABELS = 12
"""Maximum number of labelled values on a categorical axis."""


_LOG_KEYS = ("lr", "min_lr", "weight_decay", "eps")
"""Last parts of keys whose values matter by their ratio."""
_LOG_RATIO = 10.0


def is_logarithmic(key: str, values: Sequence[float]) -> bool:
    """Whether the axis of a key is logarithmic: for a learning rate always, else if the values span a decade.

    Args:
        key: swept key.
        values: its values; with one that is not positive the axis is linear.
    """
    if min(values) <= 0:
        return False
    return key.rpartition(".")[2] in _LOG_KEYS or max(values) >= _LOG_RATIO * min(values)


def _link(folder: Path, point: Point) -> str:
    """Link from the sweep's page to a run: to its report if it has one, else to its folder; empty if it has neither.

    Args:
        folder: folder of the sweep, with the page.
        point: point of the run.
    """
    run_dir = Path(point.run_dir)
    if not point.run_dir or not run_dir.is_dir():
        return ""
    way = quote(os.path.relpath(run_dir.absolute(), folder.absolute()))
    return f"{way}/{PAGE_FILE}" if (run_dir / PAGE_FILE).is_file() else f"{way}/"


def _draw_history(record: SweepRecord, points: Sequence[Point], folder: Path, wide: bool) -> Figure | None:
    """Objective of every point in the order of the sweep, and the best value so far."""
    finished = _valued(points, PointState.finished)
    if not finished:
        return None
    figure, axes = open_panel("Objective of every point", wide)
    for state, color, marker, label in (
        (PointState.finished, BLUE, "o", "finished"),
        (PointState.pruned, ORANGE, "v", "stopped early"),
    ):
        found = _valued(points, state)
        if found:
            numbers = [point.number for point in found]
            spots = axes.scatter(numbers, _values(found), color=color, marker=marker, s=36, label=label)
            spots.set_urls([_link(folder, point) for point in found])
    best = accumulate(_values(finished), min if record.direction is Direction.minimize else max)
    axes.step([p.number for p in finished], list(best), where="post", color=GREEN, label="best so far")
    failed = [point.number for point in points if point.state in (PointState.failed, PointState.killed)]
    if failed:
        axes.plot(
            failed, [0.98] * len(failed), transform=axes.get_xaxis_transform(), linestyle="", marker="X", color=RED,
            label="failed", clip_on=False,
        )  # fmt: skip
    count_axis(axes)
    close_panel(axes, "point", record.objective_name)
    axes.margins(x=0.05)
    return figure


def _draw_parameter(record: SweepRecord, points: Sequence[Point], folder: Path, key: str, wide: bool) -> Figure | None:
    """Objective over one key; see `is_logarithmic`."""
    found = [*_valued(points, PointState.finished), *_valued(points, PointState.pruned)]
    if not found:
        return None
    figure, axes = open_panel(key, wide)
    places, names = _axis_of(found, key)
    colors = [BLUE if point.state is PointState.finished else ORANGE for point in found]
    spots = axes.scatter([places[point.assignment[key]] for point in found], _values(found), c=colors, s=22)
    spots.set_urls([_link(folder, point) for point in found])
    if names is not None:
        axes.set_xticks(range(len(names)), names)
    elif is_logarithmic(key, list(places.values())):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    ranked = ranking(points, record.direction)
    if ranked:
        best = ranked[0]
        axes.scatter(
            [places[best.point.assignment[key]]], [best.mean], s=90, facecolors="none", edgecolors=GREEN, label="best"
        )
    close_panel(axes, key, record.objective_name)
    axes.margins(x=0.08)
    return figure


def _draw_parallel(record: SweepRecord, points: Sequence[Point], wide: bool) -> Figure | None:
    """Parallel coordinates of the finished points: all keys and the objective; the best third is highlighted."""
    found = [point for point in _valued(points, PointState.finished) if point.repeats is None]
    keys = [key for key in record.space if len({point.assignment[key] for point in found}) > 1]
    if len(found) < 2 or len(keys) < 2:
        return None
    figure, axes = open_panel("All keys at once", wide)
    columns = []
    for key in keys:
        places, names = _axis_of(found, key)
        numbers = [places[point.assignment[key]] for point in found]
        if names is None and is_logarithmic(key, numbers):
            numbers = [math.log(number) for number in numbers]
        columns.append(_unit(numbers))
    columns.append(_unit(_values(found)))
    good = {ranked.point.number for ranked in ranking(found, record.direction)[: max(1, len(found) // 3)]}
    for place, point in sorted(enumerate(found), key=lambda item: item[1].number in good):
        best = point.number in good
        axes.plot(
            range(len(columns)), [column[place] for column in columns], color=GREEN if best else MUTED,
            alpha=0.9 if best else 0.3, linewidth=1.6 if best else 1,
        )  # fmt: skip
    for position, key in enumerate(keys):
        low, high = _ends(found, key)
        axes.annotate(low, (position, 0), xytext=(3, -9), textcoords="offset points", color=MUTED)
        axes.annotate(high, (position, 1), xytext=(3, 4), textcoords="offset points", color=MUTED)
    for position in range(len(columns)):
        axes.axvline(position, color=GRID, linewidth=1)
    axes.set_xticks(range(len(columns)), [*keys, record.objective_name])
    axes.set_yticks([])
    axes.set_ylim(-0.1, 1.1)
    close_panel(axes, "", "least to greatest")
    return figure


def _draw_curves(record: SweepRecord, points: Sequence[Point], wide: bool) -> Figure | None:
    """Validation curves of all points over steps."""
    ranked = ranking(points, record.direction)
    best = ranked[0].point.number if ranked else None
    figure, axes = open_panel("Validation curves", wide)
    drawn, labelled = False, set()
    for point in sorted(points, key=lambda point: point.number == best):
        if not point.run_dir:
            continue
        curve = Curve(Path(point.run_dir), validation_of(record.settings["objective"]))
        curve.read()
        values = {step: value for step, value in sorted(curve.values.items()) if math.isfinite(value)}
        if not values:
            continue
        drawn = True
        label, color = ("best", GREEN) if point.number == best else ("stopped early", ORANGE)
        if point.number != best and point.state is not PointState.pruned:
            label, color = "others", MUTED
        axes.plot(
            list(values), list(values.values()), color=color, label=None if label in labelled else label,
            linewidth=2 if label == "best" else 1, alpha=0.6 if label == "others" else 1,
            marker="o" if len(values) < 20 else "", markersize=3,
        )  # fmt: skip
        labelled.add(label)
    if not drawn:
        return None
    axes.yaxis.set_major_locator(MaxNLocator(6))
    count_axis(axes)
    close_panel(axes, "step", "validation loss")
    axes.margins(x=0.03)
    return figure


def _valued(points: Sequence[Point], state: PointState) -> list[Point]:
    return [point for point in points if point.state is state and point.objective is not None]


def _values(points: Sequence[Point]) -> list[float]:
    return [point.objective for point in points if point.objective is not None]


def _axis_of(points: Sequence[Point], key: str) -> tuple[dict[str, float], list[str] | None]:
    """Axis position of each value of a key, and the tick labels if the values are not numbers."""
    values = list(dict.fromkeys(point.assignment[key] for point in points))
    try:
        return {value: float(value) for value in values}, None
    except ValueError:
        shown = sorted(values)
        names = [value if len(value) <= 24 else value[:21] + "..." for value in shown]
        if len(names) > _MOST_LABELS:
            names = [""] * len(names)
        return {value: float(place) for place, value in enumerate(shown)}, names


def _ends(points: Sequence[Point], key: str) -> tuple[str, str]:
    places, _ = _axis_of(points, key)
    ordered = sorted(places, key=lambda value: places[value])
    return ordered[0], ordered[-1]


def _unit(numbers: Sequence[float]) -> list[float]:
    low, high = min(numbers), max(numbers)
    return [0.5 if high == low else (number - low) / (high - low) for number in numbers]


_KINDS = {PointState.finished: "good", PointState.failed: "bad", PointState.killed: "bad"}
_MOST_PARAMETERS = 8


def write_page(folder: Path) -> Path:
    """Writes the report of a sweep, finished or not.

    Args:
        folder: folder of the sweep.

    Returns:
        Path of the page, report.html in the folder; the images are in report/.

    Raises:
        ConfigError: the folder is not writable.
    """
    record, points = read_record(folder), read_points(folder)
    charts = _sweep_charts(record, points, folder)
    return write_pages(folder, charts, record.name, partial(_page, record, points, folder)).page


def _sweep_charts(record: SweepRecord, points: Sequence[Point], folder: Path) -> list[Chart]:
    """The charts of a sweep in the order of the page."""
    keys = list(record.space)[:_MOST_PARAMETERS]
    history = partial(_draw_history, record, points, folder)
    return [
        Chart("history", "Objective of every point, and the best so far", history, True),
        *(
            Chart(f"parameter_{place}", f"Objective over {key}", partial(_draw_parameter, record, points, folder, key))
            for place, key in enumerate(keys)
        ),
        Chart("parallel", "Every point as a line over all keys", partial(_draw_parallel, record, points), True),
        Chart("curves", "Validation curves of all points", partial(_draw_curves, record, points), True),
    ]


def _page(record: SweepRecord, points: Sequence[Point], folder: Path, pictures: Sequence[str]) -> list[str]:
    ranked = ranking(points, record.direction)
    winner = ""
    if ranked:
        command = html.escape(shlex.join(best_command(ranked[0].point, record)))
        winner = f'<details class="card"><summary>The winner\'s command line</summary><pre>{command}</pre></details>'
    open_points = sum(point.state in UNFINISHED for point in points)
    status = f"{open_points} points to go" if open_points else "finished"
    return [
        f"<header><h1>{html.escape(record.name)}</h1>"
        f'<span class="status {"open" if open_points else "good"}">{status}</span></header>',
        number_cards(_numbers(record, points, ranked)),
        fact_list(record.space.items()) if record.space else "",
        f'<div class="charts">{"".join(pictures)}</div>',
        f"<h2>Winner</h2>{winner}" if winner else "",
        f"<h2>Points</h2>{_points_table(record, points, folder)}",
    ]


def _numbers(record: SweepRecord, points: Sequence[Point], ranked: Sequence[Ranked]) -> list[KeyNumber]:
    """The best objective with its point and seeds, and the number of points in each state."""
    counts = [
        KeyNumber(str(state), str(number))
        for state in PointState
        if (number := sum(point.state is state for point in points))
    ]
    if not ranked:
        return counts
    best = ranked[0]
    note = "" if best.spread is None else f"mean of {len(best.objectives)} seeds, standard deviation {best.spread:.3g}"
    return [KeyNumber(f"best {record.objective_name}, point {best.point.number}", f"{best.mean:.6g}", note), *counts]


def _points_table(record: SweepRecord, points: Sequence[Point], folder: Path) -> str:
    keys = list(record.space)
    head = (">point", "state", f">{record.objective_name}", ">steps", ">time", *keys, "run", "reason")
    rows = []
    for point in points:
        cells = [
            ("number", str(point.number)),
            ("", point.state if point.repeats is None else f"{point.state}, seed of {point.repeats}"),
            ("number", "" if point.objective is None else f"{point.objective:.6g}"),
            ("number", f"{point.step:,}"),
            ("number", render_duration(point.trained_s) if point.trained_s else ""),
            *(("", point.assignment.get(key, "")) for key in keys),
        ]
        run, link = html.escape(point.run_dir), html.escape(_link(folder, point))
        named = f'<a href="{link}">{run}</a>' if link else run
        cells_after = f"<td>{named}</td>"
        cells_after += f'<td class="detail">{html.escape(point.reason)}</td>'
        kind = "error" if _KINDS.get(point.state) == "bad" else "info"
        line = "".join(f'<td class="{css}">{html.escape(text)}</td>' for css, text in cells)
        rows.append(Html(f'<tr class="{kind}">{line}{cells_after}</tr>'))
    return table(head, rows)
