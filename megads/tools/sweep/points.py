"""The points of a sweep and points.jsonl, in which each change of one is a line; the last line of a point counts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.runtime.metrics import JsonLinesWriter, read_json_lines

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
