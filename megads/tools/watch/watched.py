"""The runs that are watched: which they are now, what each has recorded, and its pictures.

Reading a run again costs time that grows with its steps, and drawing it some seconds. Both happen only when a file of
the run has changed, and take at most a tenth of a processor.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from megads.errors import ConfigError
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, find_run, slowdowns_path
from megads.tools.report.charts import run_charts
from megads.tools.report.config import MOST_RUNS
from megads.tools.report.history import RunHistory, read_history
from megads.tools.report.page import comparison_charts, draw_charts

T = TypeVar("T")
Signature = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of every file of a run that a report reads."""

_RESTS = 9.0
"""How many times as long as a reading or a drawing took nothing is read or drawn again."""
_DRAWING = threading.Lock()
"""matplotlib's settings belong to the process."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return any((folder / name).exists() for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE))


def signature(run_dir: Path) -> Signature:
    """Changes with everything that a report of the run shows."""
    names = [run_dir / name for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, "checkpoints")]
    found = []
    for path in (*names, slowdowns_path(run_dir)):
        try:
            about = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return tuple(found)


class Renewed(Generic[T]):
    """A value that is made again when what it is made of has changed, but not all the time.

    While one thread makes it, others get the last one.

    Args:
        make: makes it.
        now: a clock, in seconds.
    """

    def __init__(self, make: Callable[[], T], now: Callable[[], float] = time.monotonic):
        self._make, self._now = make, now
        self._lock = threading.Lock()
        self._made: tuple[object, T] | None = None
        self._rests_until = 0.0

    def of(self, state: object) -> T:
        """The value for a state of what it is made of, or the last one where that took long and was a moment ago.

        Args:
            state: equal while nothing has changed.
        """
        made = self._made
        if made is not None and (made[0] == state or self._now() < self._rests_until):
            return made[1]
        if not self._lock.acquire(blocking=made is None):
            assert made is not None
            return made[1]
        try:
            if self._made is None or self._made[0] != state:
                begin = self._now()
                self._made = (state, self._make())
                end = self._now()
                self._rests_until = end + _RESTS * (end - begin)
            return self._made[1]
        finally:
            self._lock.release()


class WatchedRun:
    """One run.

    Args:
        run_dir: its directory.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        """Names the run in an address."""
        self._history = Renewed(self._read)
        self._pictures = Renewed(self._draw)

    def history(self) -> RunHistory | str:
        """What it has recorded, or why nothing can be shown yet."""
        return self._history.of(signature(self.run_dir))

    def pictures(self) -> list[str]:
        """Its charts, as parts of a page."""
        return self._pictures.of(signature(self.run_dir))

    def _read(self) -> RunHistory | str:
        try:
            return read_history(self.run_dir)
        except ConfigError as error:
            return str(error)

    def _draw(self) -> list[str]:
        history = self.history()
        if isinstance(history, str):
            return []
        with _DRAWING:
            return draw_charts(run_charts(history))


class WatchedRuns:
    """The runs that were asked for, as they are now.

    Args:
        names: run directories, ids of runs in runs/, folders of runs.

    Raises:
        ConfigError: one of them is none of these.
    """

    def __init__(self, names: Sequence[str]):
        self._places = [_place(name) for name in names]
        self._known: dict[Path, WatchedRun] = {}
        self._comparison = Renewed(self._draw)
        self._compared: list[RunHistory] = []

    def find(self) -> tuple[list[WatchedRun], int]:
        """The runs to show, the newest first, and how many older ones of the folders are left out."""
        found = dict.fromkeys(path for place in self._places for path in _runs_of(place))
        newest = sorted(found, key=_last_change, reverse=True)
        for path in newest[:MOST_RUNS]:
            self._known.setdefault(path, WatchedRun(path))
        return [self._known[path] for path in newest[:MOST_RUNS]], max(0, len(newest) - MOST_RUNS)

    def with_key(self, key: str) -> WatchedRun | None:
        """The run of an address, also where newer ones have taken its place meanwhile."""
        self.find()
        return next((run for run in self._known.values() if run.key == key), None)

    def comparison(self, histories: Sequence[RunHistory]) -> list[str]:
        """The charts that compare runs, as parts of a page."""
        self._compared = list(histories)
        return self._comparison.of(tuple(signature(history.run_dir) for history in histories))

    def _draw(self) -> list[str]:
        with _DRAWING:
            return draw_charts(comparison_charts(self._compared))


def _place(name: str) -> Path:
    if name == "runs" and not Path(name).is_dir():
        raise ConfigError("there is no folder runs/ here: give a run directory, or a folder of runs, as run=<folder>")
    return find_run(name)


def _runs_of(place: Path) -> Iterable[Path]:
    if is_run(place):
        return [place]
    try:
        return [path for path in place.iterdir() if path.is_dir() and is_run(path)]
    except OSError:
        return []


def _last_change(run_dir: Path) -> int:
    return max((changed for _, _, changed in signature(run_dir)), default=0)
