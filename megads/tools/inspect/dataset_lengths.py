"""Document lengths of a dataset: a table with bars in the terminal, or a PNG image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.table import Table

from megads.api import ConfigError, DataError, VisibleConsole
from megads.tools.dataset.actions import LengthStatistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_BAR_WIDTH = 40


def bucket_names(count: int) -> list[str]:
    """Returns the labels of the first `count` buckets of a power-of-two histogram."""
    return ["0", "1", *(f"{1 << i - 1:,} to {(1 << i) - 1:,}" for i in range(2, count))][:count]


def print_lengths(statistics: LengthStatistics) -> None:
    """Prints the counts and the length histogram of one dataset."""
    console = VisibleConsole(highlight=False)
    several = f" in {statistics.sequences:,} sequences" if statistics.sequences != statistics.documents else ""
    console.print(
        f"{statistics.prefix}: {statistics.documents:,} documents{several}, {statistics.tokens:,} tokens "
        f"({statistics.dtype}), {statistics.tokens / statistics.documents:,.1f} a document", soft_wrap=True,
    )  # fmt: skip
    percentiles = ", ".join(f"{share}% {length:,}" for share, length in statistics.percentiles.items())
    console.print(
        f"shortest {statistics.shortest:,}, longest {statistics.longest:,}; percentiles {percentiles}", soft_wrap=True
    )
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "documents"):
        table.add_column(name, justify="right")
    table.add_column("")
    used = np.flatnonzero(statistics.histogram)
    names, most = bucket_names(int(used[-1]) + 1), int(statistics.histogram.max())
    for bucket in range(int(used[0]), int(used[-1]) + 1):
        documents = int(statistics.histogram[bucket])
        bar = "█" * max(round(_BAR_WIDTH * documents / most), 1 if documents else 0)
        table.add_row(names[bucket], f"{documents:,}", bar)
    console.print(table)


def write_picture(counted: Sequence[LengthStatistics], output: str) -> None:
    """Writes a PNG file with the length histograms of datasets.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the file cannot be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"pictures are drawn with matplotlib, and {error.name} is not installed: pip install 'megads[report]', or "
            "leave output out for a table"
        ) from error
    from megads.tools.report.style import house_style, png

    histograms = {Path(one.prefix).name: one.histogram for one in counted}
    with house_style():
        picture = png(_draw_lengths(histograms))
    try:
        Path(output).write_bytes(picture)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another output") from error


def _draw_lengths(histograms: Mapping[str, npt.NDArray[np.int64]]) -> Figure:
    """Draws power-of-two histograms as outlines, so that overlapping ones remain distinguishable.

    Args:
        histograms: histogram of each dataset by name, int64 [buckets]: number of documents with 0 tokens, 1, 2 to 3,
            ... 2^(i-1) to 2^i - 1.
    """
    from matplotlib.ticker import FuncFormatter

    from megads.tools.report.style import CYCLE, close_panel, open_panel

    figure, axes = open_panel("Lengths of documents", wide=True)
    for number, (name, histogram) in enumerate(histograms.items()):
        color = CYCLE[number % len(CYCLE)]
        edges = np.arange(histogram.size + 1)
        axes.stairs(histogram, edges, color=color, fill=True, alpha=0.25)
        axes.stairs(histogram, edges, color=color, label=name, linewidth=1.5)
    used = np.flatnonzero(np.sum(list(histograms.values()), axis=0))
    axes.set_xlim(int(used[0]) - 0.5, int(used[-1]) + 1.5)
    axes.set_ylim(bottom=0)
    ticks = np.arange(int(used[0]), int(used[-1]) + 2)
    axes.set_xticks(ticks, [f"{1 << int(tick) - 1:,}" if tick > 0 else "0" for tick in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    close_panel(axes, "tokens", "documents")
    return figure
