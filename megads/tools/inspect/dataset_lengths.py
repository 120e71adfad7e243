"""Lengths of a dataset's documents: a table with bars on the terminal, or a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from megads.data.indexed.actions import LengthStatistics
from megads.errors import ConfigError, DataError
from megads.runtime.visible_console import VisibleConsole

_BAR_WIDTH = 40


def bucket_names(count: int) -> list[str]:
    """Returns the lengths in each of the first buckets of a histogram by powers of two."""
    return ["0", "1", *(f"{1 << i - 1:,} to {(1 << i) - 1:,}" for i in range(2, count))][:count]


def print_lengths(statistics: LengthStatistics) -> None:
    """Prints the counts and the histogram of one dataset."""
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
    """Draws the lengths of datasets into a PNG file.

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
    from megads.tools.inspect.length_chart import draw_lengths
    from megads.tools.report.style import house_style, png

    histograms = {Path(one.prefix).name: one.histogram for one in counted}
    with house_style():
        picture = png(draw_lengths(histograms))
    try:
        Path(output).write_bytes(picture)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another output") from error
