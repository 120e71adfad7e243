"""Points of a sweep, their log points.jsonl (one line per change), and the objectives of their runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.api import EVENTS_FILE, METRICS_FILE, JsonLinesWriter, Tail, is_step, read_json_lines

POINTS_FILE = "points.jsonl"


class PointState(StrEnum):
    """State of a point.

    The same command starts only these again: waiting, running (the sweep was killed), stopped (asked to save and stop),
    killed (its launcher or one of its ranks), and, if retry_failed is set, failed.
    """

    infeasible = "infeasible"
    waiting = "waiting"
    running = "running"
    finished = "finished"
    pruned = "pruned"
    failed = "failed"
    stopped = "stopped"
    killed = "killed"


UNFINISHED = (PointState.waiting, PointState.running, PointState.stopped, PointState.killed)


@dataclass
class Point:
    """One training run of a sweep.

    Attributes:
        number: index in the sweep, from 0.
        assignment: value of every swept key.
        overrides: all overrides of the command line, including run.id; empty if infeasible.
        run_id: id of the run.
        run_dir: run directory.
        state: state of the point.
        reason: why the point is infeasible, was pruned, was killed or failed.
        exit_code: exit code of the last start; negative for a signal; None if there is none yet.
        objective: value of the objective; None if not known.
        step: last trained step.
        started_at: time of the last start, in seconds since 1970; None before the first.
        trained_s: training time over all starts, in seconds.
        job: id of the SLURM or Ray job; empty for local processes.
        repeats: number of the point that this one repeats with another seed; None for a point of the search itself.
        ranks: number of processes.
    """

    number: int
    assignment: dict[str, str]
    overrides: list[str] = field(default_factory=list)
    run_id: str = ""
    run_dir: str = ""
    state: PointState = PointState.waiting
    reason: str = ""
    exit_code: int | None = None
    objective: float | None = None
    step: int = 0
    started_at: float | None = None
    trained_s: float = 0.0
    job: str = ""
    repeats: int | None = None
    ranks: int = 1

    @property
    def label(self) -> str:
        """The swept values in command-line syntax."""
        return " ".join(f"{key}={value}" for key, value in self.assignment.items())


class PointBook:
    """All points of a sweep, and their log file.

    Args:
        folder: folder of the sweep.
    """

    def __init__(self, folder: Path):
        self.points = read_points(folder)
        self._file = JsonLinesWriter(folder / POINTS_FILE)

    def record(self, point: Point) -> None:
        """Records a new point or a change of a point."""
        if point.number == len(self.points):
            self.points.append(point)
        self.points[point.number] = point
        self._file.write_line(dataclasses.asdict(point))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_points(folder: Path) -> list[Point]:
    """Reads the points of a sweep in order; empty if there is no log."""
    known: dict[int, Point] = {}
    for line in read_json_lines(folder / POINTS_FILE):
        known[line["number"]] = Point(**(line | {"state": PointState(line["state"])}))
    # A line truncated by a kill was the first of its point, so no later points exist.
    return [known[number] for number in range(len(known)) if number in known]


TRAINING_LOSS = "loss"
_LAST_SHARE = 10
"""A step metric is averaged over the last 1 / _LAST_SHARE of the steps."""


def read_objective(run_dir: Path, key: str | None) -> tuple[float | None, int]:
    """Reads the objective of a run.

    Args:
        run_dir: run directory.
        key: key in metrics.jsonl; None is the validation loss, or the training loss without validation.

    Returns:
        The objective, None if the run has no finite value of it, and the last step of the run.
    """
    lines = list(read_json_lines(run_dir / METRICS_FILE))
    step = max((int(line.get("step", 0)) for line in lines), default=0)
    key = key or _validation_key(lines) or TRAINING_LOSS
    if any(is_step(line) and key in line for line in lines):
        # A resumed run may write a step twice; the last line is used.
        steps = {int(line["step"]): float(line[key]) for line in lines if is_step(line) and key in line}
        values = [steps[step] for step in sorted(steps)]
        last = values[-max(1, len(values) // _LAST_SHARE) :]
        value = sum(last) / len(last)
    else:
        found = [float(line[key]) for line in lines if key in line]
        value = found[-1] if found else math.nan
    return value if math.isfinite(value) else None, step


def events_since(run_dir: Path, since: float | None) -> list[dict[str, Any]]:
    """Events of a run since a time, in seconds since 1970."""
    events = read_json_lines(run_dir / EVENTS_FILE)
    return [event for event in events if float(event.get("time", 0)) >= (since or 0)]


def launched_at(run_dir: Path, since: float | None) -> float | None:
    """Time of the last launch of the ranks since `since`; None if there was none, as while a job is queued."""
    launches = [float(event["time"]) for event in events_since(run_dir, since) if event.get("event") == "launch"]
    return launches[-1] if launches else None


def _validation_key(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Key of the loss of the alphabetically first validation set; None without validation."""
    keys = (key for line in lines for key in sorted(line))
    return next((key for key in keys if key.startswith("valid/") and key.endswith("/loss")), None)


def validation_of(objective: str | None) -> str | None:
    """Key of the curve used for pruning: the objective if it is a validation metric; None for the first set's loss."""
    return objective if objective and objective.startswith("valid/") else None


class Curve:
    """Validation curve of a run, which may still be in progress.

    Args:
        run_dir: run directory.
        key: key in metrics.jsonl; None is the loss of the first validation set.
    """

    def __init__(self, run_dir: Path, key: str | None):
        self._tail = Tail(run_dir / METRICS_FILE, 0)
        self._key = key
        self.values: dict[int, float] = {}

    def read(self) -> dict[int, float]:
        """Returns the validation values since the last call, by step."""
        new: dict[int, float] = {}
        while lines := self._tail.read():
            self._key = self._key or _validation_key(lines)
            new |= {
                int(line["step"]): float(line[self._key])
                for line in lines
                if self._key in line and not is_step(line) and math.isfinite(float(line[self._key]))
            }
        self.values |= new
        return new
