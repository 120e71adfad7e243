"""metrics.jsonl and events.jsonl: one JSON object a line, floats with every digit, each line flushed at once.

Non-finite floats are written as Python's json writes them: NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import xxhash

from megads.errors import DISK_FULL
from megads.runtime.files import atomic_writer, is_readable, parse_json, read_end
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

_BLOCK_BYTES = 1 << 20


class JsonLinesWriter:
    """Appends to one file of JSON lines; one write a line, so that processes and threads may append to the same file.

    On a full disk lines wait in memory, and are written before the next one: the run's checkpoints, which cannot be
    saved then either, decide how long it goes on (`checkpoint.max_failed_saves`).
    """

    def __init__(self, path: Path, enabled: bool = True):
        """Opens nothing and writes nothing unless `enabled`: every rank calls it, one writes."""
        self._path = path
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._writing = threading.Lock()
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_readable(path)
            self._file = path.open("ab", buffering=0)
            self._end_partial_line(self._file)

    @property
    def enabled(self) -> bool:
        """Whether this process writes the file."""
        return self._file is not None

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._path

    def _end_partial_line(self, file: FileIO) -> None:
        """A process killed while writing leaves half a line: keep it from swallowing the next one."""
        if file.tell() == 0:
            return
        with self._path.open("rb") as existing:
            existing.seek(-1, os.SEEK_END)
            if existing.read(1) != b"\n":
                self._waiting.append(b"\n")
                self._write_waiting(file)

    def write_line(self, record: Mapping[str, Any]) -> None:
        """Appends one object, and before it what had to wait."""
        if self._file is not None:
            self._waiting.append(json.dumps(record).encode() + b"\n")
            self._write_waiting(self._file)

    def _write_waiting(self, file: FileIO) -> bool:
        """Whether all is written; raises OSError where a disk is not full, but broken."""
        with self._writing:
            while self._waiting:
                line = self._waiting[0]
                try:
                    written = file.write(line) or 0
                except OSError as error:
                    if error.errno not in DISK_FULL:
                        raise
                    written = 0
                if written < len(line):
                    self._waiting[0] = line[written:]
                    return False
                self._waiting.popleft()
        return True

    def close(self) -> None:
        """Closes the file; writing afterwards does nothing."""
        if self._file is not None:
            self._write_waiting(self._file)
            self._file.close()
            self._file = None


@dataclass(frozen=True)
class LedgerRecord:
    """What metrics.jsonl held when a checkpoint was saved: its beginning at any later time.

    Attributes:
        bytes: its size.
        checksum: xxh3_128 of them, hex.
    """

    bytes: int
    checksum: str


class MetricsWriter(JsonLinesWriter):
    """The truth of the run: one line a step, and one a validation."""

    def __init__(self, run_dir: Path, enabled: bool):
        super().__init__(run_dir / METRICS_FILE, enabled)
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one step or one validation; `record` holds its `step`."""
        self.write_line(record)

    def record(self, *, wait: bool = True) -> LedgerRecord | None:
        """What the file holds; None where another process writes it.

        Args:
            wait: until that is on disk.

        Raises:
            OSError: the disk is full, or broken.
        """
        if self._file is None:
            return None
        if not self._write_waiting(self._file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        if wait:
            os.fsync(self._file.fileno())
        with self._path.open("rb") as file:
            file.seek(self._hashed_bytes)
            while block := file.read(_BLOCK_BYTES):
                self._digest.update(block)
                self._hashed_bytes += len(block)
        return LedgerRecord(self._hashed_bytes, self._digest.hexdigest())

    def lacks(self, step: int, key: str) -> bool:
        """True where this process writes the file and it has no line of that step with that key."""
        if self._file is None:
            return False
        return not any(line.get("step") == step and key in line for line in read_json_lines(self._path))

    def steps_after(self, step: int) -> list[dict[str, Any]]:
        """Lines of steps beyond a step, of the last megabyte; empty where another process writes the file."""
        lines = read_end(self._path, _BLOCK_BYTES) if self._file is not None else []
        return [line for line in lines if "loss" in line and isinstance(line.get("step"), int) and line["step"] > step]

    def drop_after(self, step: int, known: LedgerRecord | None = None, keep_copy: bool = False) -> str:
        """Cuts off what an earlier start wrote beyond the checkpoint that the run now continues from.

        Lines are in the order of steps, so this is one truncation: a crash leaves the file as it was or as it will be.
        A damaged file is put aside, and every line of it that can be read goes on.

        Args:
            step: last step to keep.
            known: what the file held when that checkpoint was saved; None: nobody knows.
            keep_copy: put a copy aside if anything is cut off: the run will not write the same again.

        Returns:
            What was damaged or put aside, for people; empty where there was nothing.
        """
        if self._file is None:
            return ""
        found = _survey(self._path, step, known)
        if not found.damage:
            note = ""
            if keep_copy and found.kept_bytes < self._path.stat().st_size:
                aside = _free_name(self._path)
                shutil.copyfile(self._path, aside)
                note = f"{METRICS_FILE} as it was is kept as {aside.name}"
            self._file.truncate(found.kept_bytes)
        else:
            aside = _free_name(self._path)
            shutil.copyfile(self._path, aside)
            with self._path.open("rb") as lines, atomic_writer(self._path) as good:
                good.writelines(line for line in lines if (at := _step_of(line)) is not None and at <= step)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            note = f"{METRICS_FILE} is damaged: {found.damage}; what can be read goes on, as it was it is {aside.name}"
        os.fsync(self._file.fileno())
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0
        return note


@dataclass(frozen=True)
class _Survey:
    """What is in the ledger up to a step.

    Attributes:
        kept_bytes: of the lines up to that step, if nothing is damaged.
        damage: what is wrong; empty for nothing.
    """

    kept_bytes: int
    damage: str


def _survey(path: Path, step: int, known: LedgerRecord | None) -> _Survey:
    steps, unreadable, kept_bytes, cut, lost = list[int](), 0, 0, False, False
    with path.open("rb") as lines:
        for line in lines:
            at = _step_of(line)
            if at is None or at > step:
                unreadable, cut = unreadable + (at is None), True
            else:
                steps.append(at)
                lost |= cut
                kept_bytes += 0 if cut else len(line)
    # Half a line at the end is all that a killed process leaves.
    if not lost if known is None else begins_as(path, known):
        return _Survey(kept_bytes, "")
    missing = [f"{a + 1} to {b - 1}" if b - a > 2 else f"{a + 1}" for a, b in pairwise(steps) if b - a > 1]
    last = steps[-1] if steps else 0
    wrong = [
        *([f"{unreadable} of its lines cannot be read"] if unreadable else []),
        *([f"steps missing: {', '.join(missing)}"] if missing else []),
        *([f"it ends at step {last} of {step}"] if last < step else []),
    ]
    return _Survey(kept_bytes, ", ".join(wrong) or "it is not what it was when the checkpoint was saved")


def begins_as(path: Path, known: LedgerRecord) -> bool:
    """Whether a ledger begins with what is known of it."""
    digest, left = xxhash.xxh3_128(), known.bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return not left and digest.hexdigest() == known.checksum


def _free_name(path: Path) -> Path:
    """A name beside the file that nothing has: metrics.1.jsonl, metrics.2.jsonl, ..."""
    return next(name for n in count(1) if not (name := path.with_stem(f"{path.stem}.{n}")).exists())


class MetricHistory:
    """The finite values of one metric by step; each look reads what metrics.jsonl has got since the last one.

    Args:
        run_dir: the run's folder.
        key: of the metric.
    """

    def __init__(self, run_dir: Path, key: str) -> None:
        self._path, self._key = run_dir / METRICS_FILE, key
        self._read_bytes, self._values = 0, dict[int, float]()

    def values(self) -> dict[int, float]:
        """Returns them; no file, no values.

        Raises:
            OSError: the file cannot be read.
        """
        if not is_readable(self._path):
            return {}
        with self._path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_size < self._read_bytes:  # it was cut back to a checkpoint
                self._read_bytes, self._values = 0, {}
            lines.seek(self._read_bytes)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                # Most lines are of steps without it; parsing takes longer than this.
                if self._key.encode() in line:
                    self._add(_parse(line) or {})
        return dict(self._values)

    def _add(self, record: Mapping[str, Any]) -> None:
        step, value = record.get("step"), record.get(self._key)
        if type(step) is int and isinstance(value, int | float) and math.isfinite(value):
            self._values[step] = value


class EventWriter(JsonLinesWriter):
    """Starts, stops, checkpoints, skips and faults, each with its cause."""

    def __init__(self, run_dir: Path, enabled: bool = True):
        super().__init__(run_dir / EVENTS_FILE, enabled)

    def write(self, event: str, **fields: Any) -> None:
        """Appends {time, event, ...}; `time` is seconds since 1970."""
        self.write_line({"time": time.time(), "event": event, **fields})


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines, passing over lines cut short by a kill; no file, no objects."""
    if not is_readable(path):
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _parse(line)
            if record is not None:
                yield record


def _step_of(line: bytes) -> int | None:
    """Of a line of the ledger; None where it cannot be read."""
    step = (_parse(line) or {}).get("step")
    return step if type(step) is int else None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a complete line, else None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
