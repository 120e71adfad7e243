"""Draws a report and puts its files in place."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megads.data.atomic_file import atomic_writer
from megads.errors import ConfigError
from megads.report.charts import run_charts
from megads.report.comparison import comparison_charts, comparison_page
from megads.report.config import ReportConfig
from megads.report.history import read_history
from megads.report.page import picture, run_page
from megads.report.style import Chart, house_style, png, svg

PAGE_FILE = "report.html"
PICTURES_FOLDER = "report"


@dataclass(frozen=True)
class WrittenReport:
    """Where a report's files are.

    Attributes:
        page: the HTML file.
        pictures: the PNG files, the most telling first.
    """

    page: Path
    pictures: tuple[Path, ...]


def write_report(config: ReportConfig) -> WrittenReport:
    """Reads the runs, draws them and writes the page and the pictures.

    Raises:
        ConfigError: a run cannot be read, or the files cannot be written.
    """
    histories = [read_history(find_run(name)) for name in config.runs]
    folder = Path(config.output) if config.output else histories[0].run_dir
    if len(histories) == 1:
        return write_pages(folder, run_charts(histories[0]), partial(run_page, histories[0]))
    return write_pages(folder, comparison_charts(histories), partial(comparison_page, histories))


def write_pages(folder: Path, charts: Sequence[Chart], page: Callable[[Sequence[str]], str]) -> WrittenReport:
    """Draws charts and writes them with the page around them.

    Args:
        folder: takes the page and the pictures; made where it is missing.
        charts: in the order of the page; the most telling first.
        page: makes the page from its pictures, as page.picture gives them.

    Raises:
        ConfigError: the files cannot be written.
    """
    try:
        (folder / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
        with house_style():
            parts, pngs = _draw(charts)
        return _write(folder, page(parts), pngs)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to ({error.strerror}): choose another place with output=<folder>"
        ) from error


def find_run(name: str) -> Path:
    """The directory of a run, given itself or by the id of a run in runs/.

    Raises:
        ConfigError: neither is there; names the runs that are.
    """
    given, by_id = Path(name), Path("runs") / name
    if given.is_dir():
        return given
    if by_id.is_dir():
        return by_id
    known = sorted(path.parent for path in Path("runs").glob("*/config.yaml"))
    hint = f"; runs here: {', '.join(map(str, known[:10]))}" if known else ", as megads train names it at its start"
    raise ConfigError(f"run = {name}: there is no such run directory, and no run of that id in runs/{hint}")


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


def _write(folder: Path, page: str, pictures: dict[str, bytes]) -> WrittenReport:
    """The page goes last: it is there only once its pictures are."""
    paths = {name: folder / PICTURES_FOLDER / f"{name}.png" for name in pictures}
    for name, path in paths.items():
        with atomic_writer(path) as file:
            file.write(pictures[name])
    with atomic_writer(folder / PAGE_FILE) as file:
        file.write(page.encode())
    return WrittenReport(folder / PAGE_FILE, tuple(paths.values()))
