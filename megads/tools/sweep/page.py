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
from megads.tools.sweep.results import (
    SweepRecord,
    best_command,
    number_texts,
    ranking,
    read_record,
    state_counts,
    state_text,
)

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
    finished, objectives = _valued(points, PointState.finished)
    if not finished:
        return None
    figure, axes = open_panel("Objective of every point", wide)
    for state, color, marker, label in (
        (PointState.finished, BLUE, "o", "finished"),
        (PointState.pruned, ORANGE, "v", "stopped early"),
    ):
        found, values = _valued(points, state)
        if found:
            spots = axes.scatter([p.number for p in found], values, color=color, marker=marker, s=36, label=label)
            spots.set_urls([_link(folder, point) for point in found])
    best = accumulate(objectives, min if record.direction is Direction.minimize else max)
    axes.step([point.number for point in finished], list(best), where="post", color=GREEN, label="best so far")
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
    finished, objectives = _valued(points, PointState.finished)
    pruned, last_values = _valued(points, PointState.pruned)
    found = [*finished, *pruned]
    if not found:
        return None
    figure, axes = open_panel(key, wide)
    places, names = _axis_of(found, key)
    colors = [BLUE] * len(finished) + [ORANGE] * len(pruned)
    spots = axes.scatter(
        [places[point.assignment[key]] for point in found], [*objectives, *last_values], c=colors, s=22
    )
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
    found, objectives = _valued([point for point in points if point.repeats is None], PointState.finished)
    keys = [key for key in record.space if len({point.assignment[key] for point in found}) > 1]
    if len(found) < 2 or len(keys) < 2:
        return None
    figure, axes = open_panel("All keys at once", wide)
    columns = []
    for position, key in enumerate(keys):
        places, names = _axis_of(found, key)
        low, *_, high = places
        axes.annotate(low, (position, 0), xytext=(3, -9), textcoords="offset points", color=MUTED)
        axes.annotate(high, (position, 1), xytext=(3, 4), textcoords="offset points", color=MUTED)
        numbers = [places[point.assignment[key]] for point in found]
        if names is None and is_logarithmic(key, numbers):
            numbers = [math.log(number) for number in numbers]
        columns.append(numbers)
    columns.append(objectives)
    for position, numbers in enumerate(columns):
        low_end, span = min(numbers), max(numbers) - min(numbers)
        columns[position] = [(number - low_end) / span if span else 0.5 for number in numbers]
        axes.axvline(position, color=GRID, linewidth=1)
    good = {ranked.point.number for ranked in ranking(found, record.direction)[: max(1, len(found) // 3)]}
    for place, point in sorted(enumerate(found), key=lambda item: item[1].number in good):
        color, alpha, width = (GREEN, 0.9, 1.6) if point.number in good else (MUTED, 0.3, 1.0)
        values = [column[place] for column in columns]
        axes.plot(range(len(columns)), values, color=color, alpha=alpha, linewidth=width)
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
    labels = set()
    for point in sorted(points, key=lambda point: point.number == best):
        curve = Curve(Path(point.run_dir), validation_of(record.settings["objective"]))
        if not point.run_dir or not curve.read():
            continue
        label, color = ("best", GREEN) if point.number == best else ("stopped early", ORANGE)
        if point.number != best and point.state is not PointState.pruned:
            label, color = "others", MUTED
        axes.plot(
            *zip(*sorted(curve.values.items()), strict=True), color=color, label=None if label in labels else label,
            linewidth=2 if label == "best" else 1, alpha=0.6 if label == "others" else 1,
            marker="o" if len(curve.values) < 20 else "", markersize=3,
        )  # fmt: skip
        labels.add(label)
    if not labels:
        return None
    axes.yaxis.set_major_locator(MaxNLocator(6))
    count_axis(axes)
    close_panel(axes, "step", "validation loss")
    axes.margins(x=0.03)
    return figure


def _valued(points: Sequence[Point], state: PointState) -> tuple[list[Point], list[float]]:
    """The points in a state that have an objective, and their objectives."""
    found = [(point, point.objective) for point in points if point.state is state and point.objective is not None]
    return [point for point, _ in found], [value for _, value in found]


def _axis_of(points: Sequence[Point], key: str) -> tuple[dict[str, float], list[str] | None]:
    """Axis position of each value of a key, ascending, and the tick labels if the values are not numbers."""
    values = {point.assignment[key] for point in points}
    try:
        return {value: float(value) for value in sorted(values, key=float)}, None
    except ValueError:
        shown = sorted(values)
        names = [value if len(value) <= 24 else value[:21] + "..." for value in shown]
        if len(names) > _MOST_LABELS:
            names = [""] * len(names)
        return {value: float(place) for place, value in enumerate(shown)}, names


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
    charts = [
        Chart("history", "Objective of every point, and the best so far",
              partial(_draw_history, record, points, folder), True),
        *(
            Chart(f"parameter_{place}", f"Objective over {key}", partial(_draw_parameter, record, points, folder, key))
            for place, key in enumerate(list(record.space)[:_MOST_PARAMETERS])
        ),
        Chart("parallel", "Every point as a line over all keys", partial(_draw_parallel, record, points), True),
        Chart("curves", "Validation curves of all points", partial(_draw_curves, record, points), True),
    ]  # fmt: skip
    return write_pages(folder, charts, record.name, partial(_page, record, points, folder)).page


def _page(record: SweepRecord, points: Sequence[Point], folder: Path, pictures: Sequence[str]) -> list[str]:
    ranked = ranking(points, record.direction)
    numbers, winner = [KeyNumber(state, str(number)) for state, number in state_counts(points).items()], ""
    if ranked:
        best = ranked[0]
        label = f"best {record.objective_name}, point {best.point.number}"
        numbers.insert(0, KeyNumber(label, f"{best.mean:.6g}", best.seeds))
        command = html.escape(shlex.join(best_command(best.point, record)))
        winner = (
            '<h2>Winner</h2><details class="card"><summary>The winner\'s command line</summary>'
            f"<pre>{command}</pre></details>"
        )
    keys, rows = list(record.space), []
    for point in points:
        cells = [
            ("number", str(point.number)),
            ("", state_text(point)),
            *(("number", text) for text in number_texts(point)),
            *(("", point.assignment.get(key, "")) for key in keys),
        ]
        line = "".join(f'<td class="{css}">{html.escape(text)}</td>' for css, text in cells)
        run, link = html.escape(point.run_dir), html.escape(_link(folder, point))
        named = f'<a href="{link}">{run}</a>' if link else run
        kind = "error" if point.state in (PointState.failed, PointState.killed) else "info"
        reason = f'<td class="detail">{html.escape(point.reason)}</td>'
        rows.append(Html(f'<tr class="{kind}">{line}<td>{named}</td>{reason}</tr>'))
    # A leading ">" marks a column of numbers.
    head = (">point", "state", f">{record.objective_name}", ">steps", ">time", *keys, "run", "reason")
    open_points = sum(point.state in UNFINISHED for point in points)
    status = f"{open_points} points to go" if open_points else "finished"
    return [
        f"<header><h1>{html.escape(record.name)}</h1>"
        f'<span class="status {"open" if open_points else "good"}">{status}</span></header>',
        number_cards(numbers),
        fact_list(record.space.items()) if record.space else "",
        f'<div class="charts">{"".join(pictures)}</div>',
        winner,
        f"<h2>Points</h2>{table(head, rows)}",
    ]
