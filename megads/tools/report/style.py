"""Style of the charts: a palette for light and dark pages, figures, and their output as SVG and PNG.

Colours are based on Okabe and Ito (2008), which remain distinct with colour vision deficiency; dark pages use lighter
variants.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator


@dataclass(frozen=True)
class Shade:
    """One colour as hex strings for light and dark pages."""

    light: str
    dark: str


PALETTE = {
    "ink": Shade("#1f2328", "#e6edf3"),
    "muted": Shade("#5b6570", "#9aa4af"),
    "grid": Shade("#e3e7eb", "#2d343c"),
    "blue": Shade("#0072b2", "#58b2e8"),
    "green": Shade("#00805d", "#2ec49a"),
    "orange": Shade("#c77700", "#f0a530"),
    "red": Shade("#c4450c", "#ff8552"),
    "pink": Shade("#b3578b", "#e08fbd"),
    "sky": Shade("#3d9bd1", "#9ad4f7"),
    "yellow": Shade("#9a8c00", "#e8dc4a"),
    "black": Shade("#30363d", "#c9d1d9"),
}
INK, MUTED, GRID = (PALETTE[name].light for name in ("ink", "muted", "grid"))
BLUE, GREEN, ORANGE, RED = (PALETTE[name].light for name in ("blue", "green", "orange", "red"))
PINK = PALETTE["pink"].light
CYCLE = tuple(PALETTE[name].light for name in ("blue", "orange", "green", "pink", "red", "sky", "yellow", "black"))
"""Colours of the runs in a comparison, in order."""

REGULAR_INCHES = (5.7, 3.0)
WIDE_INCHES = (11.6, 3.7)
_PNG_DPI = 160
_LEGEND_LETTERS_PER_INCH = 14
"""Letters of a legend that fit on an inch; the line and the gap of an entry count as 6 letters."""
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelsize": 8.5,
    "axes.titlesize": 8.5,
    "axes.prop_cycle": f"cycler('color', {[colour.removeprefix('#') for colour in CYCLE]})",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.0,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.5,
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.08,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "path.simplify_threshold": 0.3,
}


@dataclass(frozen=True)
class Chart:
    """One chart of a report.

    Attributes:
        name: file name without .png.
        description: alternative text for screen readers.
        draw: draws the figure in full page width (True) or half (False); returns None if there is nothing to draw.
        wide: whether the chart takes the full page width on wide windows.
    """

    name: str
    description: str
    draw: Callable[[bool], Figure | None]
    wide: bool = False


@contextmanager
def house_style() -> Iterator[None]:
    """Context manager that draws and saves in this style, regardless of the user's matplotlibrc."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def open_figure(title: str, wide: bool, height_inches: float | None = None) -> Figure:
    """Returns an empty figure with a left-aligned title."""
    width, height = WIDE_INCHES if wide else REGULAR_INCHES
    figure = Figure(figsize=(width, height_inches or height))
    figure.suptitle(title, x=0.01, horizontalalignment="left", color=INK)
    return figure


def open_panel(title: str, wide: bool = False) -> tuple[Figure, Axes]:
    """Returns a figure with a title and one pair of axes."""
    figure = open_figure(title, wide)
    return figure, figure.add_subplot()


def close_panel(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels the axes and puts the legend, if any curve has a label, above them."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure = axes.get_figure(root=True)
        room = _LEGEND_LETTERS_PER_INCH * (figure.get_size_inches()[0] if figure else 0)
        rows = math.ceil(sum(len(label) + 6 for label in labels) / room)
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=math.ceil(len(handles) / rows), borderpad=0,
            borderaxespad=0.3,
        )  # fmt: skip


def count_axis(axes: Axes) -> None:
    """Formats the x axis as integers with thousands separators."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))


def png(figure: Figure) -> bytes:
    """The figure as a PNG with a white background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_PNG_DPI, facecolor="white")
    return buffer.getvalue()


def svg(figure: Figure, name: str, css_class: str, description: str) -> str:
    """The figure as inline SVG, which uses the page's font and --chart-<colour> variables.

    Args:
        figure: figure drawn in this style.
        name: name that is unique on the page, so that ids inside the SVGs do not collide.
        css_class: class of the SVG element.
        description: alternative text, without markup.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for colour, shade in PALETTE.items():
        text = text.replace(shade.light, f"var(--chart-{colour})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    assert view_box is not None
    head = f'<svg class="{css_class}" role="img" aria-label="{description}" {view_box[0]}>'
    return head + text[text.index(">") + 1 :]


def palette_css(dark: bool) -> str:
    """CSS declarations of the --chart-<colour> variables."""
    return "".join(f"--chart-{name}:{shade.dark if dark else shade.light};" for name, shade in PALETTE.items())
