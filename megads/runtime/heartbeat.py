"""Heartbeats: step, phase and liveness of each rank, for a monitor in another process.

A rank's main thread records its step and phase, and a second thread counts beats. Both write to a small memory-mapped
file in the node's temporary folder, which needs no system call. A stopped process, and one in which native code holds
the GIL, sends no beats. A main thread that waits for a disk or in a collective does: its beats continue while its phase
stays the same.

The file contains no times: the monitor uses its own clock, so that ranks with wrong clocks are not blamed.

The monitor requests evidence from a hung rank by signals: the stacks of its threads, and the flight recorder's list of
collectives. faulthandler writes the stacks in the signal handler, even if native code holds the GIL. The flight
recorder's dump needs the GIL; a separate thread waits for that signal, as the main thread may never run Python again.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import mmap
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megads.runtime.own_folder import is_users_folder

STACKS_SIGNAL = signal.SIGRTMIN + 6
FLIGHT_SIGNAL = signal.SIGRTMIN + 7
"""Real-time signals, as SLURM, PyTorch and Python use named ones."""
_PREFIX, _ALIVE = "megads-heartbeats-", "alive"
_ABANDONED_S = 7 * 86400.0
_SETTLED_S = 0.05
_POLL_S = 0.01


def stacks_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's stacks; it exists once the rank can answer requests."""
    return folder / f"stacks_{rank:05d}"


def flight_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's flight recorder dump."""
    return folder / f"flight_{rank:05d}"


def answer_requests(folder: Path | None, rank: int) -> None:
    """Prepares this process to answer requests; to be called by the main thread before it starts other threads.

    Args:
        folder: folder of this node's heartbeats; None if they are not monitored.
        rank: rank of this process.
    """
    if folder is None:
        return
    path = stacks_path(folder, rank)
    unready = path.with_suffix(".unready")
    with suppress(OSError):  # without disk space there will be no stacks
        # Kept open: faulthandler writes to the descriptor.
        file = unready.open("ab")
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
        # Blocked in all threads, so that only sigwait() receives it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
        unready.rename(path)


def dump_flights_on_request(folder: Path, rank: int) -> None:
    """Starts the thread that dumps the flight recorder; to be called after all forks, as forks need a single thread.

    Args:
        folder: folder given to `answer_requests`; if that was not called, no thread is started.
        rank: rank of this process.
    """
    if stacks_path(folder, rank).exists():
        threading.Thread(target=_dump_flights, args=(flight_path(folder, rank),), name="evidence", daemon=True).start()


def _dump_flights(path: Path) -> None:
    while True:
        signal.sigwait({FLIGHT_SIGNAL})
        partial = path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_bytes(_flight_dump())
            partial.rename(path)


def _flight_dump() -> bytes:
    """Returns the flight recorder's record of this rank's collectives as JSON; empty if there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return b""
    native = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if torch.distributed.get_backend() == "nccl" else "_dump_fr_trace_json"
    dump = getattr(native, name, None)
    return bytes(dump()) if dump is not None else b""


def ask_ranks(folder: Path, pids: Mapping[int, int]) -> None:
    """Requests stacks and flight recorder dumps from ranks.

    Args:
        folder: folder of the node's heartbeats.
        pids: process ids by rank; a rank that is not ready yet is skipped, as the signals would kill it.
    """
    for rank, pid in pids.items():
        stacks = stacks_path(folder, rank)
        with suppress(OSError):
            flight_path(folder, rank).unlink(missing_ok=True)
            os.truncate(stacks, 0)
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, FLIGHT_SIGNAL)


def wait_for_answers(folder: Path, ranks: Iterable[int], limit_s: float) -> None:
    """Waits until all ranks have answered completely, at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    waiting = {rank: (-1, time.monotonic()) for rank in ranks}
    while waiting and time.monotonic() < deadline:
        for rank, (size, since) in list(waiting.items()):
            try:
                now = stacks_path(folder, rank).stat().st_size
            except OSError:
                del waiting[rank]
                continue
            if now != size:
                waiting[rank] = (now, time.monotonic())
            elif now and time.monotonic() - since > _SETTLED_S and flight_path(folder, rank).exists():
                del waiting[rank]
        time.sleep(_POLL_S)


INTERVAL_S = 0.5
"""Seconds between beats, and between readings of the monitor."""
LOST_AFTER_S = 10.0
"""Seconds without a beat after which a rank counts as lost."""
STOPPED_AFTER_S = 2.0
"""LOST_AFTER_S of a process that is stopped according to the kernel."""

LOADING_DATA, ENGINE_STEP, AGREEING = "loading data", "engine step", "agreeing on a stop"
"""Phases of every step, in order; followed by the hooks, each named after its class."""
VALIDATING, SAVING = "validating", "saving"
SLOW_PHASES = (VALIDATING, SAVING)
"""Prefixes of the names of phases between steps that may last longer than a step."""

_PHASE_BYTES = 48
_RECORD = struct.Struct(f"<QQQ{_PHASE_BYTES}s")
_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "a debugger has stopped its process",
    "D": "its process waits for a disk or a device",
    "R": "native code holds the GIL, or the machine is overloaded",
    "S": "native code holds the GIL",
    "Z": "its process has ended",
}
_STOPPED = ("T", "t")


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's heartbeats."""
    return folder / f"rank_{rank:05d}"


class Heartbeat:
    """Sender of a rank's heartbeats.

    Args:
        record: mapped file of `_RECORD.size` bytes; None sends nothing.

    Attributes:
        made_s: time of creation, in seconds since 1970.
    """

    def __init__(self, record: mmap.mmap | None = None) -> None:
        self._record = record
        self._beats = self._changes = self._step = 0
        self._phase = b"starting"
        self._ended = threading.Event()
        self.made_s = time.time()
        self._spent, self._timed, self._since_s = defaultdict[str, float](float), "starting", time.perf_counter()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enters a phase.

        Args:
            phase: name of the phase.
            step: number of the step; None: unchanged.
        """
        now_s = time.perf_counter()
        self._spent[self._timed] += now_s - self._since_s
        self._timed, self._since_s = phase.partition(",")[0], now_s
        self._changes += 1
        self._step = self._step if step is None else step
        self._phase = phase.encode()[:_PHASE_BYTES]
        self._write()

    def spent(self) -> dict[str, float]:
        """Returns the seconds spent in each phase, in order of first entry; names are cut at a comma."""
        seconds = dict(self._spent)
        seconds[self._timed] = seconds.get(self._timed, 0.0) + time.perf_counter() - self._since_s
        return seconds

    def beat(self) -> None:
        """Target of the second thread."""
        while not self._ended.wait(INTERVAL_S):
            self._beats += 1
            self._write()

    def end(self) -> None:
        """Sends the last beat, after which the monitor expects none."""
        self._ended.set()
        self._beats = 2**64 - 1
        self._write()

    def _write(self) -> None:
        if self._record is not None:
            self._record[:] = _RECORD.pack(self._beats, self._changes, self._step, self._phase)


@contextmanager
def heartbeat(folder: Path | None, rank: int) -> Iterator[Heartbeat]:
    """Sends heartbeats during the block; after an exception the last record stays for the monitor.

    Args:
        folder: folder of the monitor; None, as in a process started by hand, sends no heartbeats.
        rank: rank of this process.
    """
    record = _record(folder, rank)
    own = Heartbeat(record)
    if folder is not None and record is not None:
        threading.Thread(target=own.beat, name="heartbeat", daemon=True).start()
        dump_flights_on_request(folder, rank)
    yield own
    own.end()


def _record(folder: Path | None, rank: int) -> mmap.mmap | None:
    """Maps the heartbeat file; None, and training without heartbeats, if there is no folder or no file can be made."""
    if folder is None:
        return None
    try:
        with heartbeat_path(folder, rank).open("w+b") as file:
            # Allocated, not sparse: on a full disk a write to a sparse mapped page raises SIGBUS.
            os.posix_fallocate(file.fileno(), 0, _RECORD.size)
            return mmap.mmap(file.fileno(), _RECORD.size)
    except OSError as error:
        logging.getLogger(__name__).warning("no heartbeats are sent: cannot create a file in %s (%s)", folder, error)
        return None


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank in the training loop, from its heartbeats.

    Attributes:
        rank: global rank.
        step: last known step.
        phase: last known phase.
        phase_s: seconds in that phase.
        silent_s: seconds since the last beat.
        state: state of its process in /proc; empty if not read.
        node: node of the rank; empty in a run on one machine.
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
        """Whether it has been silent long enough for a warning."""
        return self.silent_s >= (STOPPED_AFTER_S if self.stopped else LOST_AFTER_S)

    @property
    def stopped(self) -> bool:
        """Whether its process is stopped, according to the kernel."""
        return self.state in _STOPPED

    @property
    def name(self) -> str:
        """For example `rank 3 on node-7`."""
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """Step and phase, for messages."""
        return f"in step {self.step}, {self.phase}" if self.step else self.phase

    def __str__(self) -> str:
        return self.silence if self.lost else f"{self.place} for {self.phase_s:.0f} s"

    @property
    def silence(self) -> str:
        """Message that it sends no heartbeat, with the reason if the process state gives one."""
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
        node: name of this node; empty in a run on one machine.
    """

    def __init__(self, node: str = "") -> None:
        self._node = node
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: BinaryIO | None = None
        with suppress(OSError):  # without space for temporary files the run continues without a monitor
            _remove_left_over()
            self._temporary = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            self._lock = (Path(self._temporary.name) / _ALIVE).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._seen: dict[int, _Seen] = {}
        self._last_look_s: float | None = None
        self.looks = 0
        """Number of times the heartbeats were read."""

    @property
    def folder(self) -> Path | None:
        """Folder of the ranks' heartbeats, accessible by this user only; None if it could not be created."""
        return Path(self._temporary.name) if self._temporary is not None else None

    def close(self) -> None:
        """Removes the folder."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None
        if self._lock is not None:
            self._lock.close()

    def poll(self, pids: Mapping[int, int]) -> list[RankPosition]:
        """Reads all heartbeats every INTERVAL_S; returns the ranks lost or recovered since the last reading.

        Args:
            pids: process ids by rank; ranks that have ended are skipped.
        """
        now = time.monotonic()
        passed_s = 0.0 if self._last_look_s is None else now - self._last_look_s
        if self.folder is None or (self._last_look_s is not None and passed_s < INTERVAL_S):
            return []
        self._last_look_s = now
        self.looks += 1
        # If the monitor itself was delayed, with the machine or its job, the ranks must not be blamed for it.
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
        """Reads the current phase of a rank; empty if unknown."""
        try:
            *_, phase = _RECORD.unpack(heartbeat_path(Path(str(self.folder)), rank).read_bytes())
        except (OSError, struct.error):
            return ""
        return _words(phase)

    def positions(self) -> list[RankPosition]:
        """Returns the positions of all ranks that send heartbeats, as of the last `look`."""
        return [seen.position for _, seen in sorted(self._seen.items()) if seen.position is not None]

    def _read(self, path: Path, rank: int, pid: int, seen: _Seen, passed_s: float) -> RankPosition | None:
        """Reads one heartbeat file; None for a rank that has not sent a beat yet, or has sent its last."""
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


def _remove_left_over() -> None:
    """Removes the folders of this user's monitors that were killed: the lock of a live one is held."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if not is_users_folder(folder):
                continue
            if not (folder / _ALIVE).exists():  # of an earlier version, or just being made
                if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / _ALIVE).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _words(phase: bytes) -> str:
    return phase.rstrip(b"\0").decode(errors="replace")


def process_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat from the state on, see proc(5); empty if the process does not exist."""
    with suppress(OSError):
        # The name before them may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def process_started_s() -> float:
    """Returns when this process started or was forked, in seconds since 1970, with a resolution of 0.01 s.

    Without /proc the start time is unknown, and the current time is returned.
    """
    with suppress(OSError, ValueError, IndexError):
        ticks = int(process_stat(os.getpid())[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()


def render_positions(positions: Iterable[RankPosition]) -> str:
    """Formats positions, grouped by step and phase: `ranks 0, 1: in step 7, engine step for 3 s; rank 2: ...`."""
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
