"""State of a run, from its events, its lease and its last steps: whether it trains, how it ended, or that it is gone.

Reading it changes nothing in the run directory.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_OK, ConfigError, Preempted, StopRequested
from megads.runtime.files import open_regular
from megads.runtime.lease import BEAT_S, current_holder, machine_id, process_birth
from megads.runtime.progress import render_duration
from megads.runtime.run_dir import METRICS_FILE

_TAIL_BYTES = 64 << 10
_SILENT_BEATS = 6.0
"""Beats of the lease after which a launcher on another machine counts as gone; clocks may differ by some seconds."""
_LONG_S, _LONG_STEPS = 600.0, 20.0


class RunState(StrEnum):
    """State of a run after its last start."""

    never_started = "never_started"
    training = "training"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    killed = "killed"
    vanished = "vanished"


@dataclass(frozen=True)
class RunStatus:
    """State of a run with what shows it.

    Attributes:
        state: the state.
        exit_code: exit code of the last start; None if it recorded none.
        step: last step in metrics.jsonl; None if there is none.
        step_age_s: seconds since the end of that step; None if there is none.
        step_time_s: median duration of the last steps; None if there is none.
    """

    state: RunState
    exit_code: int | None = None
    step: int | None = None
    step_age_s: float | None = None
    step_time_s: float | None = None

    @property
    def silent(self) -> bool:
        """Whether it trains, but its last step is far longer ago than a step takes."""
        if self.state is not RunState.training or self.step_age_s is None:
            return False
        return self.step_age_s > max(_LONG_S, _LONG_STEPS * (self.step_time_s or 0.0))

    @property
    def sentence(self) -> str:
        """The state in words, without a full stop."""
        at = "" if self.step is None else f" at step {self.step:,}"
        if self.state is RunState.training:
            since = "before its first step" if self.step is None else f"last step {self.step:,}{_ago(self.step_age_s)}"
            return f"in progress: {since}"
        if self.state is RunState.vanished:
            gone = "the launcher itself was killed, or its node was lost"
            return f"ended{at} without a record of how: {gone}" if self.step is not None else f"ended early: {gone}"
        if self.state is RunState.never_started:
            return "not started"
        meaning = EXIT_CODES.get(self.exit_code or 0, "failed")
        return f"{meaning}{at}" if not self.exit_code else f"{meaning}{at} (exit code {self.exit_code})"


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f", {render_duration(seconds)} ago"


def run_status(run_dir: Path, events: Sequence[Mapping[str, Any]], now_s: float | None = None) -> RunStatus:
    """Returns the state of a run.

    Args:
        run_dir: run directory.
        events: events of its last start or of all starts, in order.
        now_s: time in seconds since 1970; None is the current one.
    """
    now_s = time.time() if now_s is None else now_s
    last = max((place for place, event in enumerate(events) if event.get("event") == "launch"), default=None)
    steps = _last_steps(run_dir / METRICS_FILE)
    step, ended_s = (steps[-1][0], steps[-1][1]) if steps else (None, None)
    age_s = None if ended_s is None else max(0.0, now_s - ended_s)
    durations = [duration for _, _, duration in steps if duration is not None]
    known = (step, age_s, statistics.median(durations) if durations else None)
    alive = is_alive(run_dir, now_s)
    if last is None:
        return RunStatus(RunState.training if alive else RunState.never_started, None, *known)
    ends = [event for event in events[last:] if event.get("event") in ("exit", "killed")]
    code = ends[-1].get("exit_code") if ends else None
    if not isinstance(code, int):
        return RunStatus(RunState.training if alive else RunState.vanished, None, *known)
    return RunStatus(_ended(code), code, *known)


def _ended(code: int) -> RunState:
    if code == EXIT_OK:
        return RunState.finished
    if code in (StopRequested.exit_code, Preempted.exit_code):
        return RunState.stopped
    return RunState.killed if code == EXIT_INTERRUPTED else RunState.failed


def is_alive(run_dir: Path, now_s: float) -> bool:
    """Whether the launcher of a run lives: by its process on this machine, else by how recently it touched its lease.

    Args:
        run_dir: run directory.
        now_s: time in seconds since 1970.
    """
    try:
        holder = current_holder(run_dir)
        if holder is None or holder.released:
            return False
        if holder.readable and holder.machine == machine_id():
            return process_birth(holder.pid) == holder.born
        touched_s = (run_dir / "lease" / f"{holder.number:08d}.json").stat().st_mtime
    except (OSError, ConfigError):
        return False
    return now_s - touched_s < _SILENT_BEATS * BEAT_S


def _last_steps(path: Path) -> list[tuple[int, float | None, float | None]]:
    """Returns step, time of its end and duration of the last steps in metrics.jsonl, from its last 64 KiB."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")[1 if size > _TAIL_BYTES else 0 :]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
            if "loss" in record:
                found.append((int(record["step"]), _number(record.get("time")), _number(record.get("step_time_s"))))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
