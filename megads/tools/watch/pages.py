"""Pages of `megads watch`: all runs, and one run, built from parts of `megads report` and the current status."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megads import __version__
from megads.tools.report.history import RunHistory, number
from megads.tools.report.page import comparison_body, document, event_row, level_of, names, run_body, table
from megads.tools.report.summary import facts, key_numbers, last, loss_text, short, status
from megads.tools.watch.watched import WatchedRun, WatchedRuns

POLICY = "default-src 'none'; connect-src 'self'; script-src 'self'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: only this server's script may run, and it may connect only to this server."""
SCRIPT_PATH = "/watch.js"
_MOST_FAULTS = 30


def page(title: str, body: Sequence[str], refresh_s: float) -> str:
    """Returns a complete page.

    Args:
        title: title of the page.
        body: parts of the body, as HTML.
        refresh_s: refresh interval of the body, in seconds.
    """
    head = f'<script src="{SCRIPT_PATH}" data-every-s="{refresh_s:g}" defer></script>'
    return document(title, body, POLICY, head)


def overview(runs: WatchedRuns) -> list[str]:
    """Returns the body of the page of all runs: status table, common charts, warnings and faults."""
    shown, hidden = runs.find()
    read = [(run, run.history()) for run in shown]
    histories = [history for _, history in read if isinstance(history, RunHistory)]
    body = ["<header><h1>Runs</h1></header>", _runs(read)]
    if hidden:
        body.append(f"<p>{hidden:,} older runs are not shown; run=&lt;run directory&gt; shows any of them.</p>")
    if histories:
        body += ["<h2>Curves</h2>", *comparison_body(histories, runs.comparison(histories))]
    body.append(_faults(histories))
    return [*body, _footer(histories)]


def of_run(run: WatchedRun) -> list[str]:
    """Returns the body of the page of one run: its current report."""
    back = '<p><a href="/">all runs</a></p>'
    history = run.history()
    if isinstance(history, str):
        return [back, f"<header><h1>{html.escape(run.run_dir.name)}</h1></header>", f"<p>{html.escape(history)}</p>"]
    age = f"<p>last step {_last_step(history)}</p>"
    return [back, *run_body(history, run.pictures()), age, _footer([history])]


def _runs(read: Sequence[tuple[WatchedRun, RunHistory | str]]) -> str:
    """Returns the table with one row per run."""
    if not read:
        return "<p>No run has begun yet; the first appears here when it does.</p>"
    head = ("run", "status", ">step", "last step", ">train loss", ">tokens/s", ">effective time", ">faults", ">starts")
    known = iter(names([history for _, history in read if isinstance(history, RunHistory)]))
    rows = []
    for run, history in read:
        name = next(known).strip() if isinstance(history, RunHistory) else run.run_dir.name
        link = f'<td><a href="/run/{run.key}">{html.escape(name)}</a></td>'
        cells = _cells(history) if isinstance(history, RunHistory) else f'<td colspan="8">{html.escape(history)}</td>'
        rows.append(f"<tr>{link}{cells}</tr>")
    return table(head, rows)


def _cells(history: RunHistory) -> str:
    """Returns the cells of a run's status, in the columns of `_runs`."""
    words, kind = status(history)
    numbers = {item.label: item.value for item in key_numbers(history)}
    planned = number(history.last_event("start").get("total_steps"))
    steps = f"{history.step[-1]:,.0f}" + (f" of {planned:,.0f}" if math.isfinite(planned) else "")
    cells = (
        steps, loss_text(last(history.columns["loss"])), short(last(history.columns["tokens_per_s"])),
        numbers.get("effective time", ""), numbers.get("faults", "0"), dict(facts(history)).get("starts", "1"),
    )  # fmt: skip
    right = [f'<td class="number">{html.escape(cell)}</td>' for cell in cells]
    badge = f'<td><span class="status {kind}">{html.escape(words)}</span></td>'
    return f"{badge}{right[0]}<td>{_last_step(history)}</td>{''.join(right[1:])}"


def _last_step(history: RunHistory) -> str:
    """Returns the end of the last step; the page's script shows the age, so that the HTML stays unchanged."""
    ended = last(history.columns["time"])
    if not math.isfinite(ended):
        return "unknown"
    return f'<time data-ended-s="{ended:.3f}">{time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ended))} UTC</time>'


def _footer(histories: Sequence[RunHistory]) -> str:
    unreadable = sum(history.unreadable_lines for history in histories)
    skipped = f" {unreadable:,} unreadable lines were skipped." if unreadable else ""
    return f"<footer>megads {__version__}, from the runs' files.{skipped}</footer>"


def _faults(histories: Sequence[RunHistory]) -> str:
    """Returns the table of the newest warnings and errors of all runs; empty if there are none."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for name, history in zip(names(histories), histories, strict=True):
        found += [(name.strip(), event) for event in history.events if level_of(event) != "info"]
    newest = sorted(found, key=lambda item: number(item[1].get("time")), reverse=True)[:_MOST_FAULTS]
    if not newest:
        return ""
    rows = [event_row(event, f"<td>{html.escape(name)}</td>") for name, event in newest]
    head = ("run", "time, UTC", "event", "details")
    return f"<h2>Warnings and faults, the newest first</h2>{table(head, rows, 'events')}"
