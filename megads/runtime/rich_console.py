"""Rich console that escapes control characters, and redrawn lines at the bottom of a terminal, below scrolling text.

Separate from `terminal_text`, as rich is slow to import. Terminal modes are only changed within one update, so that a
killed process leaves a usable terminal.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table

from megads.runtime.terminal_text import visible

_SMALLEST_TEXT = 12
_ANY = 10_000


def output_width(pipe_width: int) -> int:
    """Returns the columns of the terminal or of COLUMNS; `pipe_width` for a file or a pipe, which have none."""
    asked = os.environ.get("COLUMNS", "")
    if not sys.stdout.isatty() and not (asked.isdecimal() and int(asked)):
        return pipe_width
    return shutil.get_terminal_size().columns


def fitting_tables(table: Table, width: int) -> list[Table]:
    """Cuts a table that is too wide into several, each with its first column.

    Numbers are never cut: rich would shorten or fold them to fit all columns into the width.

    Args:
        table: the table.
        width: columns of the terminal.
    """
    padding = table.padding[1] + table.padding[3] + (table.box is not None)
    needs = [_need(column) + padding for column in table.columns]
    if sum(needs) + 1 <= width and not any(needs[0] + need > width for need in needs[1:]):
        groups = [list(range(len(needs)))]
    else:
        groups = [[0]]
        for place in range(1, len(needs)):
            if len(groups[-1]) > 1 and sum(needs[other] for other in groups[-1]) + needs[place] + 1 > width:
                groups.append([0])
            groups[-1].append(place)
    return [_part(table, group, needs, padding, width) for group in groups]


def _part(table: Table, places: Sequence[int], needs: Sequence[int], padding: int, width: int) -> Table:
    part = copy.copy(table)
    part.columns = []
    # Room for headers on one line.
    spare = max(0, width - 1 - sum(needs[place] for place in places))
    for number, place in enumerate(places):
        column = copy.copy(table.columns[place])
        column._index = number
        if column.justify == "right":
            more = min(spare, max(0, cell_len(str(column.header)) + padding - needs[place]))
            spare -= more
            column.width = needs[place] - padding + more
        part.columns.append(column)
    return part


def _need(column: Column) -> int:
    """Fewest characters of a column: its numbers whole, its texts and its header by words."""
    cells = [str(cell) for cell in column._cells]
    header = max((cell_len(word) for word in str(column.header).split()), default=0)
    if column.justify == "right":
        return max([header, *(cell_len(line) for cell in cells for line in cell.splitlines())])
    longest = max((cell_len(line) for cell in cells for line in cell.splitlines()), default=0)
    return max(header, min(longest, _SMALLEST_TEXT))


class VisibleConsole(Console):
    """Escapes control characters in any text, as `terminal_text.visible`; rich's own codes are kept.

    Tables that are too wide are cut between columns.
    """

    def print(self, *objects: Any, **how: Any) -> None:
        for printed in objects:
            is_wide = isinstance(printed, Table) and printed.width is None and len(printed.columns) > 1
            if is_wide and self.measure(printed, options=self.options.update(max_width=_ANY)).maximum > self.width:
                for part in fitting_tables(printed, self.width):
                    super().print(part, **how)
            else:
                super().print(printed, **how)
        if not objects:
            super().print(**how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE_END, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_STYLE_CODE = re.compile(r"\x1b\[[0-9;]*m")


class LiveRegion:
    """Tracks the drawn lines, and returns the text to write for each update."""

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._above: list[str] = []

    def print_above(self, line: str) -> None:
        """Queues a line that the next `update` prints above the region."""
        self._above.append(line)

    def update(self, lines: Sequence[str], width: int) -> str:
        """Returns the text that replaces the region with `lines` and prints the queued lines above it.

        Args:
            lines: new lines of the region, without control codes other than colors; empty removes the region.
            width: current columns of the terminal; if it has become narrower, the old lines are wrapped.
        """
        rows = sum(max(1, -(-_cells(line) // max(1, width))) for line in self._drawn)
        up = f"\x1b[{rows}A" if rows else ""
        # These lines may wrap, over rows of the old region.
        above = _ERASE_BELOW + "".join(f"{line}\n" for line in self._above) if self._above else ""
        # A full line needs no erasing, and erasing at its end would remove its last character.
        region = "".join(f"{line}{_ERASE_LINE_END if _cells(line) < width else ''}\n" for line in lines)
        self._above = []
        self._drawn = list(lines)
        return f"{_BEGIN_UPDATE}\r{up}{above}{_NO_WRAP}{region}{_WRAP}{_ERASE_BELOW}{_END_UPDATE}"

    def one_line(self, text: str, out: TextIO) -> str:
        """Returns the text that replaces the region with one line, cut to the terminal's width; empty removes it."""
        width = terminal_size(out).columns
        fitting = set_cell_size(text, width - 1) if cell_len(text) >= width else text
        return self.update([fitting] if text else [], width)


def _cells(line: str) -> int:
    """Returns the columns of a line; color codes have no width."""
    return cell_len(_STYLE_CODE.sub("", line))


def terminal_size(out: TextIO) -> os.terminal_size:
    """Returns columns and rows of a terminal; 80 x 24 if its size is unknown or it is closed."""
    try:
        size = os.get_terminal_size(out.fileno())
    except OSError:
        return os.terminal_size((80, 24))
    return size if size.columns and size.lines else os.terminal_size((80, 24))
