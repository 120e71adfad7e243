"""One HTML file that needs nothing else: no script, no network, images inside. Its own policy forbids both."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from megads import __version__
from megads.monitor.console import render_event
from megads.tools.report.history import RunHistory, StoredCheckpoint, number
from megads.tools.report.style import palette_css
from megads.tools.report.summary import Figure, facts, figures, size, status

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MOST_EVENTS = 200


def run_page(history: RunHistory, pictures: Sequence[str]) -> str:
    """The report of one run.

    Args:
        history: what to show.
        pictures: its charts, as `picture` gives them.
    """
    words, kind = status(history)
    badge = f'<span class="status {kind}">{html.escape(words)}</span>'
    rest = [
        ("Events", _events(history.events)),
        ("Checkpoints on disk", _checkpoints(history.checkpoints)),
        ("Config", _config(history.config_text)),
    ]
    body = [
        f"<header><h1>{html.escape(history.run_id)}</h1>{badge}</header>",
        number_cards(figures(history)),
        fact_list(facts(history)),
        f'<div class="charts">{"".join(pictures)}</div>',
        *(f"<h2>{title}</h2>{content}" for title, content in rest if content),
        footer(history.unreadable_lines),
    ]
    return document(history.run_id, body)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page around the parts of a body."""
    css = resources.files(__package__).joinpath("page.css").read_text()
    colors = (
        f":root{{{palette_css(dark=False)}}}@media (prefers-color-scheme: dark){{:root{{{palette_css(dark=True)}}}}}"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(title)} - megads report</title>",
            f"<style>{css}{colors}</style></head>",
            "<body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def picture(page_svg: str, narrow_svg: str | None, wide: bool) -> str:
    """A chart on the page.

    Args:
        page_svg: as on a wide window; its class is "page" where another takes its place on a narrow one.
        narrow_svg: for a narrow window; its class is "narrow".
        wide: takes the width of the page.
    """
    return f'<figure class="card{" wide" if wide else ""}">{page_svg}{narrow_svg or ""}</figure>'


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    """A table in a card that scrolls sideways where it must."""
    cells = "".join(
        f'<th class="number">{name[1:]}</th>' if name.startswith(">") else f"<th>{name}</th>" for name in head
    )
    return (
        f'<div class="card scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def footer(unreadable_lines: int) -> str:
    """Who wrote the page, when, and what it does not show."""
    skipped = f" {unreadable_lines:,} unreadable lines were passed over." if unreadable_lines else ""
    return f"<footer>Written by megads {__version__} at {_utc(time.time())} UTC from the run's files.{skipped}</footer>"


def number_cards(numbers: Iterable[Figure]) -> str:
    """The numbers to look at first, in large letters."""
    cards = (
        f'<div class="card"><dt>{html.escape(item.label)}</dt><dd><div class="value">{html.escape(item.value)}</div>'
        f'<div class="note">{html.escape(item.note)}</div></dd></div>'
        for item in numbers
    )
    return f'<dl class="numbers">{"".join(cards)}</dl>'


def fact_list(rows: Iterable[tuple[str, str]]) -> str:
    """Labels and values in a card."""
    items = (f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd></div>" for label, value in rows)
    return f'<dl class="facts card">{"".join(items)}</dl>'


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    """The events as a table; checkpoints are left out first where there are too many rows, then the middle."""
    shown = [event for event in events if event.get("event") not in ("launch", "exit") or event.get("exit_code")]
    if len(shown) > _MOST_EVENTS:
        shown = [event for event in shown if event.get("event") != "checkpoint_saved"]
    rows = [_event_row(event) for event in shown]
    if len(rows) > _MOST_EVENTS:
        rows[_MOST_EVENTS // 4 : -3 * _MOST_EVENTS // 4] = []
    hidden = len(events) - len(rows)
    note = f'<tr><td></td><td></td><td class="detail">{hidden:,} more in events.jsonl</td></tr>' if hidden else ""
    return table(("time, UTC", "event", "details"), [*rows, note]) if rows else ""


def _event_row(event: Mapping[str, Any]) -> str:
    name = str(event.get("event", "event")).replace("_", " ")
    line = render_event(event)
    detail = line.removeprefix(name).removeprefix(": ")
    level = str(event.get("level", "info"))
    kind = "error" if level == "error" or "failed" in name else "warning" if level == "warning" else "info"
    return (
        f'<tr class="{kind}"><td class="time">{_utc(number(event.get("time")))}</td>'
        f'<td class="event">{html.escape(name)}</td><td class="detail">{html.escape(detail)}</td></tr>'
    )


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
