"""Files of profiles in a run directory: one trace a rank, in the trace-event format that timelines have too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TRACES_FOLDER = "traces"
METADATA = "megads"
"""Key of a trace with the rank, its place in the layout and the steps."""
_NAME = re.compile(r"steps_(\d+)_(\d+)\.rank_(\d+)\.stage_(\d+)\.json\.gz")


@dataclass(frozen=True, order=True)
class TraceFile:
    """The trace of one rank.

    Attributes:
        last_step: last profiled step.
        first_step: first profiled step.
        rank: the rank.
        stage: its pipeline rank.
        path: the file.
    """

    last_step: int
    first_step: int
    rank: int
    stage: int
    path: Path


def trace_path(run_dir: Path, first: int, last: int, rank: int, stage: int) -> Path:
    """Returns the path of a rank's trace of a range of steps.

    Args:
        run_dir: the run directory.
        first: first step.
        last: last step.
        rank: the rank.
        stage: its pipeline rank.
    """
    return run_dir / TRACES_FOLDER / f"steps_{first:08d}_{last:08d}.rank_{rank:05d}.stage_{stage:03d}.json.gz"


def newest_traces(run_dir: Path) -> list[TraceFile]:
    """The traces of the range of steps that ends last, by rank; empty if no step was profiled."""
    paths = (run_dir / TRACES_FOLDER).glob("steps_*.json.gz")
    found = [
        TraceFile(int(name[2]), int(name[1]), int(name[3]), int(name[4]), path)
        for path in paths
        if (name := _NAME.fullmatch(path.name))
    ]
    newest = max(found, default=None)
    if newest is None:
        return []
    steps = newest.first_step, newest.last_step
    return sorted(file for file in found if (file.first_step, file.last_step) == steps)
