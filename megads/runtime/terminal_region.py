"""Lines at the bottom of a terminal that are drawn again and again, below text that scrolls.

No mode is left on between two updates but for the update itself, so that a killed process leaves a usable terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len, set_cell_size

_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE_END, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_STYLE_CODE = re.compile(r"\x1b\[[0-9;]*m")


class LiveRegion:
    """Knows what is drawn, and says what to write to change it."""

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._above: list[str] = []

    def print_above(self, line: str) -> None:
        """Keeps a line that the next `update` scrolls above the region."""
        self._above.append(line)

    def update(self, lines: Sequence[str], width: int) -> str:
        """Returns the text that replaces the region by `lines` and scrolls the kept lines above it.

        Args:
            lines: the new region; color codes are allowed, no other control codes. Empty removes it.
            width: columns of the terminal now; one that became narrower has folded the old lines.
        """
        rows = sum(max(1, -(-_cells(line) // max(1, width))) for line in self._drawn)
        up = f"\x1b[{rows}A" if rows else ""
        # These may fold, over rows of the old region.
        above = _ERASE_BELOW + "".join(f"{line}\n" for line in self._above) if self._above else ""
        # A full line needs no erasing, and erasing at its end would take its last character.
        region = "".join(f"{line}{_ERASE_LINE_END if _cells(line) < width else ''}\n" for line in lines)
        self._above = []
        self._drawn = list(lines)
        return f"{_BEGIN_UPDATE}\r{up}{above}{_NO_WRAP}{region}{_WRAP}{_ERASE_BELOW}{_END_UPDATE}"

    def one_line(self, text: str, out: TextIO) -> str:
        """Returns the text that makes the region this one line, cut to the terminal's width; empty removes it."""
        width = terminal_size(out).columns
        fitting = set_cell_size(text, width - 1) if cell_len(text) >= width else text
        return self.update([fitting] if text else [], width)


def _cells(line: str) -> int:
    """Columns that a line takes, its color codes none."""
    return cell_len(_STYLE_CODE.sub("", line))


def terminal_size(out: TextIO) -> os.terminal_size:
    """Returns columns and rows as the terminal says; one that does not know its size, or is gone, counts as 80 x 24."""
    try:
        size = os.get_terminal_size(out.fileno())
    except OSError:
        return os.terminal_size((80, 24))
    return size if size.columns and size.lines else os.terminal_size((80, 24))
