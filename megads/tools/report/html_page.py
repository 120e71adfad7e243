"""HTML pages in the style of `megads report`: their parts, their charts, and the files they are written to.

A page has inline images and no scripts, and its Content-Security-Policy forbids scripts and network access."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from megads import __version__
from megads.api import ConfigError, atomic_writer
from megads.tools.report.style import Chart, house_style, palette_css, png, svg

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PAGE_FILE = "report.html"
PICTURES_FOLDER = "report"
TRACE_FILE, PROFILE_FILE = "timeline.trace.json", "profile.trace.json.gz"


@dataclass(frozen=True)
class KeyNumber:
    """A key number of a report, shown in a large font.

    Attributes:
        label: name of the number.
        value: number with its unit.
        note: context, such as a reference value; may be empty.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class WrittenReport:
    """Files of a written report.

    Attributes:
        page: path of the HTML page.
        pictures: paths of the PNG files, in the order of the page.
        traces: paths of the Perfetto traces of timed and of profiled steps, if the run has some.
        said: sentence that compares a step with its plan; empty without a plan.
    """

    page: Path
    pictures: tuple[Path, ...]
    traces: tuple[Path, ...] = ()
    said: str = ""


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


class Html(str):
    """HTML as it stands; other text is escaped."""


def escaped(text: str) -> str:
    """Returns a text as HTML."""
    return text if isinstance(text, Html) else html.escape(text)


def table(head: Sequence[str], rows: Iterable[Html | Sequence[str]], kind: str = "") -> str:
    """An HTML table in a card that scrolls horizontally if needed.

    Args:
        head: column titles; a leading `>` marks a numeric column.
        rows: cells of each row, or the row as HTML.
        kind: CSS class of the table.
    """
    classes = [' class="number"' if name.startswith(">") else "" for name in head]
    titles = [f"<th{css}>{escaped(name[1:] if css else name)}</th>" for name, css in zip(head, classes, strict=True)]
    lines = []
    for row in rows:
        cells = [f"<td{css}>{escaped(cell)}</td>" for cell, css in zip(row, classes, strict=False)]
        lines.append(row if isinstance(row, Html) else f"<tr>{''.join(cells)}</tr>")
    opened = f'<table class="{kind}">' if kind else "<table>"
    return (
        f'<div class="card scroll">{opened}<thead><tr>{"".join(titles)}</tr></thead><tbody>{"".join(lines)}</tbody>'
        "</table></div>"
    )


def footer(unreadable_lines: int, live: bool = False) -> str:
    """Footer with version, time and the number of skipped lines; a live page has no time: only its runs change it."""
    skipped = f" {unreadable_lines:,} unreadable lines were skipped." if unreadable_lines else ""
    written = f"Written by megads {__version__} at {utc_text(time.time())} UTC from the run's files."
    if live:
        written = f"megads {__version__}, from the runs' files."
    return f"<footer>{written}{skipped}</footer>"


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


def utc_text(seconds: float) -> str:
    """Formats seconds since the epoch as date and time in UTC; empty if there is no such date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def write_pages(
    folder: Path,
    charts: Sequence[Chart],
    title: str,
    body: Callable[[Sequence[str]], Sequence[str]],
    unreadable_lines: int = 0,
    traces: Mapping[str, bytes] | None = None,
) -> WrittenReport:
    """Draws charts and writes them together with the page.

    Args:
        folder: output folder; created if missing.
        charts: charts in the order of the page.
        title: title of the page.
        body: builds the parts of the page from its charts as HTML (see `picture`).
        unreadable_lines: number of skipped lines, for the footer.
        traces: Perfetto traces by file name; None if there are none.

    Raises:
        ConfigError: The files cannot be written.
    """
    pictures = folder / PICTURES_FOLDER
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        pngs = dict[str, bytes]()
        text = document(title, [*body(draw_charts(charts, pngs)), footer(unreadable_lines)])
        files = {pictures / name: content for name, content in (traces or {}).items()}
        drawn = {pictures / f"{name}.png": content for name, content in pngs.items()}
        # The page is last, so that it never refers to missing pictures.
        for path, content in (files | drawn | {folder / PAGE_FILE: text.encode()}).items():
            with atomic_writer(path) as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}): choose another place with output=<folder>"
        ) from error
    return WrittenReport(folder / PAGE_FILE, tuple(drawn), tuple(pictures / name for name in traces or {}))


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
