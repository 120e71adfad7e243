"""metrics.jsonl and events.jsonl: one JSON object a line, floats with every digit, each line flushed at once.

Non-finite floats are written as Python's json writes them: NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE


class JsonLinesWriter:
    """Appends to one file of JSON lines; one write a line, so that two processes may append to the same file."""

    def __init__(self, path: Path, enabled: bool = True):
        """Opens nothing and writes nothing unless `enabled`: every rank calls it, one writes."""
        self._path = path
        self._file: BinaryIO | None = None
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._end_partial_line(self._file)

    def _end_partial_line(self, file: BinaryIO) -> None:
        """A process killed while writing leaves half a line: keep it from swallowing the next one."""
        if file.tell() == 0:
            return
        with self._path.open("rb") as existing:
            existing.seek(-1, os.SEEK_END)
            if existing.read(1) != b"\n":
                file.write(b"\n")

    def write_line(self, record: Mapping[str, Any]) -> None:
        """Appends one object."""
        if self._file is not None:
            self._file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        """Closes the file; writing afterwards does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MetricsWriter(JsonLinesWriter):
    """The truth of the run: one line a step, and one a validation."""

    def __init__(self, run_dir: Path, enabled: bool):
        super().__init__(run_dir / METRICS_FILE, enabled)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one step or one validation; `record` holds its `step`."""
        self.write_line(record)

    def lacks(self, step: int, key: str) -> bool:
        """True where this process writes the file and it has no line of that step with that key."""
        if self._file is None:
            return False
        return not any(line.get("step") == step and key in line for line in read_json_lines(self._path))

    def drop_after(self, step: int) -> None:
        """Cuts off what an earlier start wrote beyond the checkpoint that the run now continues from.

        Lines are in the order of steps, so this is one truncation: a crash leaves the file as it was or as it will be.

        Args:
            step: last step to keep.
        """
        if self._file is None:
            return
        kept_bytes = 0
        with self._path.open("rb") as lines:
            for line in lines:
                record = _parse(line)
                if record is None or record.get("step", 0) > step:
                    break
                kept_bytes += len(line)
        self._file.truncate(kept_bytes)
        os.fsync(self._file.fileno())


class EventWriter(JsonLinesWriter):
    """Starts, stops, checkpoints, skips and faults, each with its cause."""

    def __init__(self, run_dir: Path, enabled: bool = True):
        super().__init__(run_dir / EVENTS_FILE, enabled)

    def write(self, event: str, **fields: Any) -> None:
        """Appends {time, event, ...}; `time` is seconds since 1970."""
        self.write_line({"time": time.time(), "event": event, **fields})


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines, passing over lines cut short by a kill; no file, no objects."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            record = _parse(line)
            if record is not None:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a complete line, else None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
