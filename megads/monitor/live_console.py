"""The console on a terminal: a panel at the bottom, events scrolling above it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len

from megads.monitor.console import Console, render_validation
from megads.monitor.live_panel import Look, PanelState, RunProgress, panel_lines

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


_REFRESH_S = 0.25
_COLORS = {"debug": "2", "warning": "33", "error": "31"}


class LiveConsole(Console):
    """Shows steps in a panel and everything else as lines above it.

    Args:
        run_dir: the run directory; what earlier starts left is shown from the beginning.
        out: the terminal.
        title: the run's name.
        level: lowest level of the lines above the panel.
        total_steps: planned length, or None when unknown.
        color: colors are wanted.
        size: asks for the terminal's size; a window may be resized at any time.
    """

    def __init__(
        self,
        run_dir: Path,
        out: TextIO,
        title: str,
        level: str = "info",
        total_steps: int | None = None,
        color: bool = True,
        size: Callable[[], os.terminal_size] | None = None,
    ):
        super().__init__(run_dir, out, level, total_steps=total_steps)
        self._progress = RunProgress.of_earlier_starts(run_dir, total_steps)
        self._title = title
        self._look = Look(color, self._outlet.unicode)
        self._size = size or (lambda: _terminal_size(out))
        self._region = LiveRegion()
        self._open = True
        self._started = self._last_step = time.monotonic()
        self._next_draw = 0.0

    def poll(self) -> None:
        super().poll()
        # A terminal that is behind gets no frame: what it shows next is as new as it can be.
        if self._open and time.monotonic() >= self._next_draw and self._outlet.idle:
            self._draw()

    def close(self) -> None:
        """Leaves the last panel on the screen."""
        if self._open:
            self._draw()
            self._open = False
        super().close()

    def _draw(self) -> None:
        now = time.monotonic()
        self._next_draw = now + _REFRESH_S
        width, height = self._size()
        moment = PanelState(self._title, time.time(), now - self._started, now - self._last_step)
        lines = panel_lines(self._progress, moment, width, height, self._look)
        self._outlet.write(self._region.update(lines, width))

    def _show_event(self, event: Mapping[str, Any]) -> None:
        self._progress.add_event(event)
        super()._show_event(event)

    def _show_metrics(self, record: Mapping[str, Any]) -> None:
        self._progress.add_metrics(record)
        if "loss" in record:
            self._last_step = time.monotonic()
        else:
            self.say(render_validation(record))

    def _print(self, line: str, level: str) -> None:
        if not self._open:
            super()._print(line, level)
            return
        for part in line.splitlines():
            clean = "".join(character if character.isprintable() else "?" for character in part.expandtabs())
            code = _COLORS.get(level) if self._look.color else None
            self._region.print_above(f"\x1b[{code}m{clean}\x1b[0m" if code else clean)
        self._next_draw = 0.0


def _terminal_size(out: TextIO) -> os.terminal_size:
    """Asks the terminal; one that does not know its size, or is gone, counts as 80 x 24."""
    try:
        size = os.get_terminal_size(out.fileno())
    except OSError:
        return os.terminal_size((80, 24))
    return size if size.columns and size.lines else os.terminal_size((80, 24))
