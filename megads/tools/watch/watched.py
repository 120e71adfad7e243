"""Watched runs: their current list, the recorded history of each, and its charts.

Reading a run takes time proportional to its steps, and drawing it some seconds. Both are done only after a file of the
run has changed, and use at most a tenth of a CPU core.
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
"""Inode, size and modification time of every file of a run that a report reads."""

_PAUSE_FACTOR = 9.0
"""Pause after reading or drawing before it is repeated, as a multiple of its duration."""
_DRAWING = threading.Lock()
"""Serializes drawing: matplotlib's settings are global to the process."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return any((folder / name).exists() for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE))


def signature(run_dir: Path) -> Signature:
    """Returns a value that changes whenever the report of the run may change."""
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
    """A cached value that is recomputed after its inputs have changed, at a limited rate.

    While one thread computes it, other threads get the previous value.

    Args:
        make: computes the value.
        now: clock, in seconds.
    """

    def __init__(self, make: Callable[[], T], now: Callable[[], float] = time.monotonic):
        self._make, self._now = make, now
        self._lock = threading.Lock()
        self._made: tuple[object, T] | None = None
        self._paused_until = 0.0

    def of(self, state: object) -> T:
        """Returns the value for a state of the inputs, or the previous value during the pause after a computation.

        Args:
            state: state of the inputs; equal as long as they have not changed.
        """
        made = self._made
        if made is not None and (made[0] == state or self._now() < self._paused_until):
            return made[1]
        if not self._lock.acquire(blocking=made is None):
            assert made is not None
            return made[1]
        try:
            if self._made is None or self._made[0] != state:
                begin = self._now()
                self._made = (state, self._make())
                end = self._now()
                self._paused_until = end + _PAUSE_FACTOR * (end - begin)
            return self._made[1]
        finally:
            self._lock.release()


class WatchedRun:
    """One watched run.

    Args:
        run_dir: run directory.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.key = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        """Identifies the run in URLs."""
        self._history = Renewed(self._read)
        self._pictures = Renewed(self._draw)

    def history(self) -> RunHistory | str:
        """Returns the recorded history, or a message why nothing can be shown yet."""
        return self._history.of(signature(self.run_dir))

    def pictures(self) -> list[str]:
        """Returns the charts of the run as parts of a page."""
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
    """The configured runs.

    Args:
        names: run directories, ids of runs in runs/, or folders of runs.

    Raises:
        ConfigError: A name is none of these.
    """

    def __init__(self, names: Sequence[str]):
        self._places = [_place(name) for name in names]
        self._known: dict[Path, WatchedRun] = {}
        self._comparison = Renewed(self._draw)
        self._compared: list[RunHistory] = []

    def find(self) -> tuple[list[WatchedRun], int]:
        """Returns the runs to show, newest first, and the number of older runs that are left out."""
        found = dict.fromkeys(path for place in self._places for path in _runs_of(place))
        newest = sorted(found, key=_last_change, reverse=True)
        for path in newest[:MOST_RUNS]:
            self._known.setdefault(path, WatchedRun(path))
        return [self._known[path] for path in newest[:MOST_RUNS]], max(0, len(newest) - MOST_RUNS)

    def with_key(self, key: str) -> WatchedRun | None:
        """Returns the run with a key, even if newer runs have displaced it from the list; None if there is none."""
        self.find()
        return next((run for run in self._known.values() if run.key == key), None)

    def comparison(self, histories: Sequence[RunHistory]) -> list[str]:
        """Returns the charts that compare runs, as parts of a page."""
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
