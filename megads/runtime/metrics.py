"""metrics.jsonl and events.jsonl: one JSON object per line, with floats at full precision, flushed line by line.

Non-finite floats are written as by Python's json: NaN, Infinity, -Infinity.
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
    """Appends to a JSON lines file with one write per line, so that processes and threads may share the file.

    If the disk is full, lines are buffered in memory and written before the next one. How long the run then continues
    depends on its checkpoints, which cannot be saved either (`checkpoint.max_failed_saves`).
    """

    def __init__(self, path: Path, enabled: bool = True):
        """Opens the file only if `enabled`: all ranks create a writer, and one of them writes."""
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
        """Path of the file."""
        return self._path

    def _end_partial_line(self, file: FileIO) -> None:
        """Ends a partial line that a process killed while writing has left."""
        if file.tell() == 0:
            return
        with self._path.open("rb") as existing:
            existing.seek(-1, os.SEEK_END)
            if existing.read(1) != b"\n":
                self._waiting.append(b"\n")
                self._write_waiting(file)

    def write_line(self, record: Mapping[str, Any]) -> None:
        """Appends one object, after any buffered lines."""
        if self._file is not None:
            self._waiting.append(json.dumps(record).encode() + b"\n")
            self._write_waiting(self._file)

    def _write_waiting(self, file: FileIO) -> bool:
        """Writes buffered lines; returns False if the disk is full, and raises any other OSError."""
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
    """Size and checksum of metrics.jsonl when a checkpoint was saved; later the file must begin with these bytes.

    Attributes:
        bytes: size of the file.
        checksum: xxh3_128 of its bytes, in hex.
    """

    bytes: int
    checksum: str


class MetricsWriter(JsonLinesWriter):
    """Writes metrics.jsonl, the complete record of the run: one line per step and per validation."""

    def __init__(self, run_dir: Path, enabled: bool):
        super().__init__(run_dir / METRICS_FILE, enabled)
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a step or a validation; `record` contains its `step`."""
        self.write_line(record)

    def record(self, *, wait: bool = True) -> LedgerRecord | None:
        """Returns size and checksum of the file; None if another process writes it.

        Args:
            wait: wait until the file is on disk.

        Raises:
            OSError: the disk is full or faulty.
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
        """Whether this process writes the file and it has no line of that step with that key."""
        if self._file is None:
            return False
        return not any(line.get("step") == step and key in line for line in read_json_lines(self._path))

    def steps_after(self, step: int) -> list[dict[str, Any]]:
        """Returns lines of later steps in the last megabyte of the file; empty if another process writes it."""
        lines = read_end(self._path, _BLOCK_BYTES) if self._file is not None else []
        return [line for line in lines if "loss" in line and isinstance(line.get("step"), int) and line["step"] > step]

    def drop_after(self, step: int, known: LedgerRecord | None = None, keep_copy: bool = False) -> str:
        """Removes lines that an earlier start wrote after the checkpoint from which the run now continues.

        Lines are in the order of steps, so this is one truncation, which is atomic in a crash. A damaged file is backed
        up, and all its readable lines up to the step are kept.

        Args:
            step: last step to keep.
            known: size and checksum when that checkpoint was saved; None if unknown.
            keep_copy: back the file up if lines are removed, because the run will not write the same lines again.

        Returns:
            A message about damage or a backup; empty if there was none.
        """
        if self._file is None:
            return ""
        found = _survey(self._path, step, known)
        if not found.damage:
            note = ""
            if keep_copy and found.kept_bytes < self._path.stat().st_size:
                aside = _free_name(self._path)
                shutil.copyfile(self._path, aside)
                note = f"the previous {METRICS_FILE} is kept as {aside.name}"
            self._file.truncate(found.kept_bytes)
        else:
            aside = _free_name(self._path)
            shutil.copyfile(self._path, aside)
            with self._path.open("rb") as lines, atomic_writer(self._path) as good:
                good.writelines(line for line in lines if (at := _step_of(line)) is not None and at <= step)
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            note = f"{METRICS_FILE} is damaged: {found.damage}; readable lines are kept, the old file is {aside.name}"
        os.fsync(self._file.fileno())
        self._digest, self._hashed_bytes = xxhash.xxh3_128(), 0
        return note


@dataclass(frozen=True)
class _Survey:
    """Content of metrics.jsonl up to a step.

    Attributes:
        kept_bytes: size of the lines up to that step, if nothing is damaged.
        damage: description of the damage; empty if there is none.
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
    # Apart from damage, only a partial line at the end can occur, from a killed process.
    if not lost if known is None else begins_as(path, known):
        return _Survey(kept_bytes, "")
    missing = [f"{a + 1} to {b - 1}" if b - a > 2 else f"{a + 1}" for a, b in pairwise(steps) if b - a > 1]
    last = steps[-1] if steps else 0
    wrong = [
        *([f"{unreadable} of its lines cannot be read"] if unreadable else []),
        *([f"steps missing: {', '.join(missing)}"] if missing else []),
        *([f"it ends at step {last} of {step}"] if last < step else []),
    ]
    return _Survey(kept_bytes, ", ".join(wrong) or "it has changed since the checkpoint")


def begins_as(path: Path, known: LedgerRecord) -> bool:
    """Whether a file begins with the recorded bytes."""
    digest, left = xxhash.xxh3_128(), known.bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return not left and digest.hexdigest() == known.checksum


def _free_name(path: Path) -> Path:
    """Returns an unused name in the same folder: metrics.1.jsonl, metrics.2.jsonl, ..."""
    return next(name for n in count(1) if not (name := path.with_stem(f"{path.stem}.{n}")).exists())


class MetricHistory:
    """Finite values of one metric by step; reads metrics.jsonl incrementally.

    Args:
        run_dir: run directory.
        key: key of the metric.
    """

    def __init__(self, run_dir: Path, key: str) -> None:
        self._path, self._key = run_dir / METRICS_FILE, key
        self._read_bytes, self._values = 0, dict[int, float]()

    def values(self) -> dict[int, float]:
        """Returns the values by step; empty without a file.

        Raises:
            OSError: the file cannot be read.
        """
        if not is_readable(self._path):
            return {}
        with self._path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_size < self._read_bytes:  # truncated to a checkpoint
                self._read_bytes, self._values = 0, {}
            lines.seek(self._read_bytes)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                # Most lines do not contain the key; this is faster than parsing them.
                if self._key.encode() in line:
                    self._add(_parse(line) or {})
        return dict(self._values)

    def _add(self, record: Mapping[str, Any]) -> None:
        step, value = record.get("step"), record.get(self._key)
        if type(step) is int and isinstance(value, int | float) and math.isfinite(value):
            self._values[step] = value


class EventWriter(JsonLinesWriter):
    """Writes events.jsonl: starts, stops, checkpoints, skipped steps and faults, each with its cause."""

    def __init__(self, run_dir: Path, enabled: bool = True):
        super().__init__(run_dir / EVENTS_FILE, enabled)

    def write(self, event: str, **fields: Any) -> None:
        """Appends {time, event, ...}; `time` is seconds since 1970."""
        self.write_line({"time": time.time(), "event": event, **fields})


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON lines file; skips partial lines, and yields nothing without a file."""
    if not is_readable(path):
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _parse(line)
            if record is not None:
                yield record


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line of metrics.jsonl; None if the line cannot be parsed."""
    step = (_parse(line) or {}).get("step")
    return step if type(step) is int else None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a complete line; None if there is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
