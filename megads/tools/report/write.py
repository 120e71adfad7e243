"""Draws a report and puts its files in place."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megads.errors import ConfigError
from megads.runtime.files import atomic_writer
from megads.runtime.run_dir import find_run
from megads.tools.report.charts import run_charts
from megads.tools.report.comparison import comparison_charts, comparison_page
from megads.tools.report.config import ReportConfig
from megads.tools.report.history import read_history
from megads.tools.report.page import picture, run_page
from megads.tools.report.step_timeline import step_trace_json
from megads.tools.report.style import Chart, house_style, png, svg

PAGE_FILE = "report.html"
PICTURES_FOLDER = "report"
TRACE_FILE = "timeline.trace.json"


@dataclass(frozen=True)
class WrittenReport:
    """Where a report's files are.

    Attributes:
        page: the HTML file.
        pictures: the PNG files, the most telling first.
        trace: timed steps for ui.perfetto.dev; None where the run has none.
    """

    page: Path
    pictures: tuple[Path, ...]
    trace: Path | None = None


def write_report(config: ReportConfig) -> WrittenReport:
    """Reads the runs, draws them and writes the page and the pictures.

    Raises:
        ConfigError: a run cannot be read, or the files cannot be written.
    """
    histories = [read_history(find_run(name)) for name in config.runs]
    folder = Path(config.output) if config.output else histories[0].run_dir
    if len(histories) == 1:
        trace = step_trace_json(histories[0].run_dir)
        return write_pages(folder, run_charts(histories[0]), partial(run_page, histories[0]), trace)
    return write_pages(folder, comparison_charts(histories), partial(comparison_page, histories))


def write_pages(
    folder: Path, charts: Sequence[Chart], page: Callable[[Sequence[str]], str], trace: bytes | None = None
) -> WrittenReport:
    """Draws charts and writes them with the page around them.

    Args:
        folder: takes the page and the pictures; made where it is missing.
        charts: in the order of the page; the most telling first.
        page: makes the page from its pictures, as page.picture gives them.
        trace: timed steps for ui.perfetto.dev, where there are any.

    Raises:
        ConfigError: the files cannot be written.
    """
    try:
        (folder / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
        with house_style():
            parts, pngs = _draw(charts)
        return _write(folder, page(parts), pngs, trace)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}): choose another place with output=<folder>"
        ) from error


def _draw(charts: Sequence[Chart]) -> tuple[list[str], dict[str, bytes]]:
    """Returns the charts as parts of the page, and as PNGs by name; wide ones are drawn again for narrow windows."""
    parts, pngs = [], {}
    for chart in charts:
        figure = chart.draw(chart.wide)
        if figure is None:
            continue
        description = html.escape(chart.description, quote=True)
        pngs[chart.name] = png(figure)
        narrow = chart.draw(False) if chart.wide else None
        narrow_svg = svg(narrow, f"{chart.name}-narrow", "narrow", description) if narrow else None
        parts.append(picture(svg(figure, chart.name, "page" if narrow else "", description), narrow_svg, chart.wide))
    return parts, pngs


def _write(folder: Path, page: str, pictures: dict[str, bytes], trace: bytes | None) -> WrittenReport:
    """The page goes last: it is there only once its pictures are."""
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
