"""Heartbeats: what each rank does, for whoever watches it from outside.

A rank's main thread notes its step and phase, and a second thread counts beats. Both go into a small memory-mapped file
among the node's temporary files, so that neither costs a system call. A stopped process, and one whose interpreter is
held by native code, no longer beats. A main thread that waits for a disk or in a collective does: its beats go on while
its phase stays the same.

No clock is in the file: the monitor goes by its own, so that ranks with wrong clocks are not blamed.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megads.runtime.rank_evidence import dump_flights_on_request

INTERVAL_S = 0.5
"""Between two beats, and between two looks of the monitor."""
LOST_AFTER_S = 10.0
"""Without a beat a rank counts as silent."""
STOPPED_AFTER_S = 2.0
"""The same for a process of which the kernel says that it is stopped."""

LOADING_DATA, ENGINE_STEP, AGREEING = "loading data", "engine step", "agreeing on a stop"
"""Phases of every step, in this order; the hooks follow, each by its class's name."""
VALIDATING, SAVING = "validating", "saving"
SLOW_PHASES = (VALIDATING, SAVING)
"""Phases between two steps that may last longer than a step: their names begin so."""

_PHASE_BYTES = 48
_RECORD = struct.Struct(f"<QQQ{_PHASE_BYTES}s")
_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "a debugger has stopped its process",
    "D": "its process waits for a disk or a device",
    "R": "native code holds its interpreter, or the machine is overloaded",
    "S": "native code holds its interpreter",
    "Z": "its process has ended",
}
_STOPPED = ("T", "t")


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeats."""
    return folder / f"rank_{rank:05d}"


class Heartbeat:
    """A rank's own end.

    Args:
        record: of `_RECORD.size` bytes; None sends nothing.

    Attributes:
        made_s: when it was made, in seconds since 1970.
    """

    def __init__(self, record: mmap.mmap | None = None) -> None:
        self._record = record
        self._beats = self._changes = self._step = 0
        self._phase = b"starting"
        self._ended = threading.Event()
        self.made_s = time.time()
        self._spent, self._timed, self._since_s = defaultdict[str, float](float), "starting", time.perf_counter()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Notes what the rank does from here on.

        Args:
            phase: a few words.
            step: number of the step; None leaves it.
        """
        now_s = time.perf_counter()
        self._spent[self._timed] += now_s - self._since_s
        self._timed, self._since_s = phase.partition(",")[0], now_s
        self._changes += 1
        self._step = self._step if step is None else step
        self._phase = phase.encode()[:_PHASE_BYTES]
        self._write()

    def spent(self) -> dict[str, float]:
        """Seconds in each phase so far, in the order of their first begin; what follows a comma in one is left out."""
        seconds = dict(self._spent)
        seconds[self._timed] = seconds.get(self._timed, 0.0) + time.perf_counter() - self._since_s
        return seconds

    def beat(self) -> None:
        """Body of the second thread."""
        while not self._ended.wait(INTERVAL_S):
            self._beats += 1
            self._write()

    def end(self) -> None:
        """The last beat: the monitor expects none after it."""
        self._ended.set()
        self._beats = 2**64 - 1
        self._write()

    def _write(self) -> None:
        if self._record is not None:
            self._record[:] = _RECORD.pack(self._beats, self._changes, self._step, self._phase)


@contextmanager
def heartbeat(folder: Path | None, rank: int) -> Iterator[Heartbeat]:
    """Sends heartbeats for as long as the block runs; an error leaves them as they are for the monitor to read.

    Args:
        folder: of the monitor; None sends none, as in a process that was started by hand.
        rank: of this process.
    """
    record = _record(folder, rank)
    own = Heartbeat(record)
    if folder is not None and record is not None:
        threading.Thread(target=own.beat, name="heartbeat", daemon=True).start()
        dump_flights_on_request(folder, rank)
    yield own
    own.end()


def _record(folder: Path | None, rank: int) -> mmap.mmap | None:
    """The mapped file; None without a folder, or where the disk takes no file: training goes on without heartbeats."""
    if folder is None:
        return None
    try:
        with heartbeat_path(folder, rank).open("w+b") as file:
            # Allocated, not sparse: writing to a mapped page that a full disk cannot hold kills with SIGBUS.
            os.posix_fallocate(file.fileno(), 0, _RECORD.size)
            return mmap.mmap(file.fileno(), _RECORD.size)
    except OSError as error:
        logging.getLogger(__name__).warning("no heartbeats are sent: %s takes no file (%s)", folder, error)
        return None


@dataclass(frozen=True)
class RankPosition:
    """What is known of a rank from its heartbeats.

    Attributes:
        rank: the rank.
        step: it was in.
        phase: it was in.
        phase_s: seconds that it has been in that phase.
        silent_s: seconds since its last beat.
        state: of its process, as /proc has it; empty where nobody looked.
        node: that it is on; empty on a run of one machine.
    """

    rank: int
    step: int
    phase: str
    phase_s: float
    silent_s: float = 0.0
    state: str = ""
    node: str = ""

    @property
    def lost(self) -> bool:
        """Whether it is silent for so long that it is worth a warning."""
        return self.silent_s >= (STOPPED_AFTER_S if self.stopped else LOST_AFTER_S)

    @property
    def stopped(self) -> bool:
        """Whether the kernel says that the process does nothing at all."""
        return self.state in _STOPPED

    @property
    def name(self) -> str:
        """As in rank 3 on node-7."""
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """Step and phase."""
        return f"in step {self.step}, {self.phase}" if self.step else self.phase

    def __str__(self) -> str:
        return self.silence if self.lost else f"{self.place} for {self.phase_s:.0f} s"

    @property
    def silence(self) -> str:
        """That it sends no heartbeat, and why, as far as the kernel says."""
        why = f": {_STATES[self.state]}" if self.state in _STATES else ""
        return f"sends no heartbeat for {self.silent_s:.0f} s{why}; last {self.place}"


@dataclass
class _Seen:
    beats: int = 0
    changes: int = 0
    silent_s: float = 0.0
    phase_s: float = 0.0
    position: RankPosition | None = None
    said: bool = False


class HeartbeatMonitor:
    """Reads the heartbeats of a node's ranks.

    Args:
        node: name of this node; empty on a run of one machine.
    """

    def __init__(self, node: str = "") -> None:
        self._node = node
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        with suppress(OSError):  # without room for temporary files a run goes on unwatched
            self._temporary = tempfile.TemporaryDirectory(prefix="megads-heartbeats-", ignore_cleanup_errors=True)
        self._seen: dict[int, _Seen] = {}
        self._last_look_s: float | None = None
        self.looks = 0
        """So often the heartbeats were read."""

    @property
    def folder(self) -> Path | None:
        """For the ranks' heartbeats; readable and writable by this user only."""
        return Path(self._temporary.name) if self._temporary is not None else None

    def close(self) -> None:
        """Removes the folder."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def look(self, pids: Mapping[int, int]) -> list[RankPosition]:
        """Reads all heartbeats if that is due; returns the ranks that fell silent, or are heard again, since then.

        Args:
            pids: of the ranks, by rank; those that have ended are passed over.
        """
        now = time.monotonic()
        passed_s = 0.0 if self._last_look_s is None else now - self._last_look_s
        if self.folder is None or (self._last_look_s is not None and passed_s < INTERVAL_S):
            return []
        self._last_look_s = now
        self.looks += 1
        # A monitor that was itself held up, with the machine or its job, does not blame the ranks for it.
        passed_s = min(passed_s, 2 * INTERVAL_S)
        changed = []
        for rank, pid in pids.items():
            seen = self._seen.setdefault(rank, _Seen())
            seen.position = self._read(heartbeat_path(self.folder, rank), rank, pid, seen, passed_s)
            lost = seen.position is not None and seen.position.lost
            if lost != seen.said and seen.position is not None:
                changed.append(seen.position)
            seen.said = lost
        return changed

    def phase(self, rank: int) -> str:
        """What a rank does at this moment; empty where nothing is known."""
        try:
            *_, phase = _RECORD.unpack(heartbeat_path(Path(str(self.folder)), rank).read_bytes())
        except (OSError, struct.error):
            return ""
        return _words(phase)

    def positions(self) -> list[RankPosition]:
        """Of all ranks that send heartbeats, as of the last look."""
        return [seen.position for _, seen in sorted(self._seen.items()) if seen.position is not None]

    def _read(self, path: Path, rank: int, pid: int, seen: _Seen, passed_s: float) -> RankPosition | None:
        """None for a rank that has sent none yet, or its last."""
        try:
            beats, changes, step, phase = _RECORD.unpack(path.read_bytes())
        except (OSError, struct.error):
            return None
        if beats == 2**64 - 1:
            return None
        seen.silent_s = 0.0 if (beats, changes) != (seen.beats, seen.changes) else seen.silent_s + passed_s
        seen.phase_s = 0.0 if changes != seen.changes else seen.phase_s + passed_s
        seen.beats, seen.changes = beats, changes
        state = "".join(process_stat(pid)[:1]) if seen.silent_s >= STOPPED_AFTER_S else ""
        if state in ("", "Z") and seen.silent_s >= STOPPED_AFTER_S:
            return None
        return RankPosition(rank, step, _words(phase), seen.phase_s, seen.silent_s, state, self._node)


def _words(phase: bytes) -> str:
    return phase.rstrip(b"\0").decode(errors="replace")


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on, see proc(5); none where there is no such process."""
    with suppress(OSError):
        # The name before them may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def process_started_s() -> float:
    """When this process started or was forked, in seconds since 1970, to a hundredth of a second.

    Where there is no /proc that is unknown: now.
    """
    with suppress(OSError, ValueError, IndexError):
        ticks = int(process_stat(os.getpid())[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def render_positions(positions: Iterable[RankPosition]) -> str:
    """Where ranks are, those at the same place together: ranks 0-2 in step 7, engine; rank 3 in step 7, data."""
    places: dict[tuple[int, str], list[RankPosition]] = {}
    for position in positions:
        places.setdefault((position.step, position.phase), []).append(position)
    shown = []
    for group in places.values():
        ranks = sorted(position.rank for position in group)
        some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        longest = max(group, key=lambda position: position.phase_s)
        shown.append(f"rank{'s' if len(ranks) > 1 else ''} {some}: {longest}")
    return "; ".join(shown)
