"""A sweep as one HTML page and a few PNG pictures, in the looks of `megads report`."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megads.monitor.console import render_duration
from megads.tools.report.page import document, fact_list, footer, number_cards, table, write_pages
from megads.tools.report.style import Chart
from megads.tools.report.summary import KeyNumber
from megads.tools.sweep.charts import draw_curves, draw_history, draw_parallel, draw_parameter
from megads.tools.sweep.points import UNFINISHED, Point, PointState, read_points
from megads.tools.sweep.record import SweepRecord, read_record
from megads.tools.sweep.results import Ranked, best_command, ranking

_KINDS = {PointState.finished: "good", PointState.failed: "bad", PointState.killed: "bad"}
_MOST_PARAMETERS = 8


def write_page(folder: Path) -> Path:
    """Draws a sweep as it stands, finished or not.

    Args:
        folder: the sweep's.

    Returns:
        The page, report.html in the folder; the pictures are in report/.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    record, points = read_record(folder), read_points(folder)
    return write_pages(folder, sweep_charts(record, points), partial(_page, record, points)).page


def sweep_charts(record: SweepRecord, points: Sequence[Point]) -> list[Chart]:
    """The charts of a sweep in the order of its page."""
    keys = list(record.space)[:_MOST_PARAMETERS]
    return [
        Chart("history", "Objective of every point, and the best so far", partial(draw_history, record, points), True),
        *(
            Chart(f"parameter_{place}", f"Objective over {key}", partial(draw_parameter, record, points, key))
            for place, key in enumerate(keys)
        ),
        Chart("parallel", "Every point as a line over all keys", partial(draw_parallel, record, points), True),
        Chart("curves", "Validation curves of all points", partial(draw_curves, record, points), True),
    ]


def _page(record: SweepRecord, points: Sequence[Point], pictures: Sequence[str]) -> str:
    ranked = ranking(points, record.direction)
    winner = ""
    if ranked:
        command = html.escape(shlex.join(best_command(ranked[0].point, record)))
        winner = f'<details class="card"><summary>The winner\'s command line</summary><pre>{command}</pre></details>'
    open_points = sum(point.state in UNFINISHED for point in points)
    status = f"{open_points} points to go" if open_points else "finished"
    body = [
        f"<header><h1>{html.escape(record.name)}</h1>"
        f'<span class="status {"open" if open_points else "good"}">{status}</span></header>',
        number_cards(_numbers(record, points, ranked)),
        fact_list(record.space.items()) if record.space else "",
        f'<div class="charts">{"".join(pictures)}</div>',
        f"<h2>Winner</h2>{winner}" if winner else "",
        f"<h2>Points</h2>{_points_table(record, points)}",
        footer(0),
    ]
    return document(record.name, body)


def _numbers(record: SweepRecord, points: Sequence[Point], ranked: Sequence[Ranked]) -> list[KeyNumber]:
    """The best objective, what it was reached with, and how the points ended."""
    counts = [
        KeyNumber(str(state), str(number))
        for state in PointState
        if (number := sum(point.state is state for point in points))
    ]
    if not ranked:
        return counts
    best = ranked[0]
    note = "" if best.spread is None else f"mean of {len(best.objectives)} seeds, deviation {best.spread:.3g}"
    return [KeyNumber(f"best {record.objective_name}, point {best.point.number}", f"{best.mean:.6g}", note), *counts]


def _points_table(record: SweepRecord, points: Sequence[Point]) -> str:
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
            ("", point.run_dir),
            ("detail", point.reason),
        ]
        kind = "error" if _KINDS.get(point.state) == "bad" else "info"
        line = "".join(f'<td class="{css}">{html.escape(text)}</td>' for css, text in cells)
        rows.append(f'<tr class="{kind}">{line}</tr>')
    # A leading ">" is the table's sign for numbers.
    return table([name[0] + html.escape(name[1:]) for name in head], rows)
