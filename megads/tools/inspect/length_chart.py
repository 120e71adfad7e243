"""How long the documents of datasets are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megads.tools.report.style import CYCLE, close_panel, open_panel


def draw_lengths(histograms: Mapping[str, npt.NDArray[np.int64]]) -> Figure:
    """Draws histograms over powers of two as steps, so that several can be told apart where they overlap.

    Args:
        histograms: by name, int64 [buckets]: documents of 0 tokens, 1, 2 to 3, ... 2^(i-1) to 2^i - 1.
    """
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
