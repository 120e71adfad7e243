"""A few lines that stay at the bottom of a terminal while others scroll above them.

Every change is one write. Nothing is switched on that a killed process could leave on: the cursor stays visible and
rests below the region, so a terminal is clean at any moment, even after SIGKILL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len

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


def _cells(line: str) -> int:
    """Columns that a line takes, its color codes none."""
    return cell_len(_STYLE_CODE.sub("", line))
