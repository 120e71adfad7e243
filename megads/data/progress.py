"""How far a pass over input files is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megads.runtime.visible_console import VisibleConsole

LINE_INTERVAL_S = 10.0


class ByteProgress:
    """Shows bytes done, rate and remaining time on stderr.

    Args:
        label: what is going on.
        total_bytes: size of the whole input; 0 is unknown, such as a pipe's.
    """

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._start_s = self._last_line_s = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(
                TextColumn("{task.description}"),
                *columns,
                TextColumn("{task.fields[note]}"),
                console=VisibleConsole(stderr=True),
            )
            self._task = self._bar.add_task(label, total=self._total_bytes or None, note="")

    def update(self, done_bytes: int, note: str = "") -> None:
        """Shows that `done_bytes` of the input are done; `note` is further text, such as a count of tokens."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, note=note)
            return
        now_s = time.monotonic()
        if now_s - self._last_line_s < LINE_INTERVAL_S or not done_bytes:
            return
        self._last_line_s = now_s
        rate = done_bytes / (now_s - self._start_s)
        if not self._total_bytes:
            sys.stderr.write(f"{self._label}: {done_bytes / 1e6:,.1f} MB, {rate / 1e6:.2f} MB/s, {note}\n")
            sys.stderr.flush()
            return
        remaining_s = (self._total_bytes - done_bytes) / rate
        sys.stderr.write(
            f"{self._label}: {100 * done_bytes / self._total_bytes:.0f}% of {self._total_bytes / 1e6:,.1f} MB, "
            f"{rate / 1e6:.2f} MB/s, {remaining_s:,.0f} s left, {note}\n"
        )
        sys.stderr.flush()

    def __enter__(self) -> ByteProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
