"""The points of a sweep: points.jsonl, in which each change of one is a line, and what their runs came to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.monitor.recorder import is_step
from megads.runtime.files import Tail
from megads.runtime.metrics import JsonLinesWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

POINTS_FILE = "points.jsonl"


class PointState(StrEnum):
    """How a point stands.

    Only these are started again by the same command: waiting, running (whose sweep was killed), stopped (asked to stop
    after saving), killed (its launcher, or one of its ranks); and failed, when asked.
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
    """One training of a sweep.

    Attributes:
        number: place in the sweep, from 0.
        assignment: value of every swept key.
        overrides: all of the point's command line, its run.id included; empty when infeasible.
        run_id: name of its run.
        run_dir: folder of its run.
        state: how it stands.
        reason: why it is infeasible, was pruned or failed.
        exit_code: of its last start; None while it has none, negative for a signal.
        objective: what it came to; None while not known.
        step: last step that it trained.
        started_at: of its last start, in seconds since 1970; None before.
        trained_s: seconds of all its starts together.
        job: of SLURM; empty elsewhere.
        repeats: number of the point that it repeats with another seed; None for a point of the search itself.
        ranks: processes that it starts.
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
        """The swept values as one would type them."""
        return " ".join(f"{key}={value}" for key, value in self.assignment.items())


class PointBook:
    """All points of a sweep, and the file that keeps them.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path):
        self.points = read_points(folder)
        self._file = JsonLinesWriter(folder / POINTS_FILE)

    def record(self, point: Point) -> None:
        """Keeps a new point, or the change of one."""
        if point.number == len(self.points):
            self.points.append(point)
        self.points[point.number] = point
        self._file.write_line(dataclasses.asdict(point))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_points(folder: Path) -> list[Point]:
    """The points of a sweep in their order; none where there is no such file."""
    known: dict[int, Point] = {}
    for line in read_json_lines(folder / POINTS_FILE):
        point = _point(line)
        known[point.number] = point
    # A line that a kill cut off was its point's first: those after it were never written.
    return [known[number] for number in range(len(known)) if number in known]


def _point(line: dict[str, Any]) -> Point:
    return Point(**(line | {"state": PointState(line["state"])}))


TRAINING_LOSS = "loss"
_LAST_SHARE = 10
"""The mean of a step's key is over this part of the steps, the last tenth."""


def read_objective(run_dir: Path, key: str | None) -> tuple[float | None, int]:
    """What a run came to.

    Args:
        run_dir: the run's folder.
        key: of metrics.jsonl; None is the validation loss, or the training loss where nothing was validated.

    Returns:
        The objective, None where the run has no finite value of it; and the run's last step.
    """
    lines = list(read_json_lines(run_dir / METRICS_FILE))
    step = max((int(line.get("step", 0)) for line in lines), default=0)
    return _objective_of(lines, key), step


def events_since(run_dir: Path, since: float | None) -> list[dict[str, Any]]:
    """The run's events from a time on, in seconds since 1970."""
    events = read_json_lines(run_dir / EVENTS_FILE)
    return [event for event in events if float(event.get("time", 0)) >= (since or 0)]


def launched_at(run_dir: Path, since: float | None) -> float | None:
    """When the run's ranks were last started, from a time on; None while they were not: a job may wait for hours."""
    launches = [float(event["time"]) for event in events_since(run_dir, since) if event.get("event") == "launch"]
    return launches[-1] if launches else None


def _objective_of(lines: Sequence[Mapping[str, Any]], key: str | None) -> float | None:
    """The objective of the lines of a metrics.jsonl, see `read_objective`."""
    key = key or _validation_key(lines) or TRAINING_LOSS
    if any(is_step(line) and key in line for line in lines):
        # A resume may have written a step twice; the last counts.
        steps = {int(line["step"]): float(line[key]) for line in lines if is_step(line) and key in line}
        values = [steps[step] for step in sorted(steps)]
        last = values[-max(1, len(values) // _LAST_SHARE) :]
        value = sum(last) / len(last)
    else:
        found = [float(line[key]) for line in lines if key in line]
        value = found[-1] if found else math.nan
    return value if math.isfinite(value) else None


def _validation_key(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The loss of the first validation set by name; None where nothing was validated."""
    return next((key for line in lines for key in sorted(line) if _is_validation_loss(key)), None)


def _is_validation_loss(key: str) -> bool:
    """Tells valid/<name>/loss from the other keys."""
    return key.startswith("valid/") and key.endswith("/loss")


def validation_of(objective: str | None) -> str | None:
    """The curve by which points are judged early: the objective where it is a validation's, else the first set's."""
    return objective if objective and objective.startswith("valid/") else None


class Curve:
    """The validations of a run that may still go on.

    Args:
        run_dir: the run's folder.
        key: of metrics.jsonl; None is the loss of the first validation set.
    """

    def __init__(self, run_dir: Path, key: str | None):
        self._tail = Tail(run_dir / METRICS_FILE, 0)
        self._key = key
        self.values: dict[int, float] = {}
        self.step = 0

    def read(self) -> dict[int, float]:
        """Returns the validations since the last call, by step."""
        new: dict[int, float] = {}
        while lines := self._tail.read():
            self.step = int(lines[-1].get("step", 0))
            self._key = self._key or _validation_key(lines)
            new |= {
                int(line["step"]): float(line[self._key])
                for line in lines
                if self._key in line and not is_step(line) and math.isfinite(float(line[self._key]))
            }
        self.values |= new
        return new
