"""Writes what a rank did in a step, and when."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megads.engine.interface import TrainEngine
from megads.parallel.grid import ParallelGrid
from megads.runtime.files import atomic_writer
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.spans import Span, clock_offset_s


def timeline_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where a rank's spans of a step are."""
    return run_dir / "timeline" / f"step_{step:08d}.rank_{rank:05d}.json"


class TimelineHook:
    """Has the engine time every n-th step and writes the spans of each rank into a file of its own.

    Args:
        engine: that trains.
        run_dir: the run's folder.
        every_steps: n.
        grid: the ranks.
    """

    def __init__(self, engine: TrainEngine, run_dir: Path, every_steps: int, grid: ParallelGrid) -> None:
        self._engine, self._run_dir, self._every_steps, self._grid = engine, run_dir, every_steps, grid
        self._offset_s = 0.0

    def on_start(self, state: TrainState) -> None:
        self._offset_s = clock_offset_s(self._grid.control)
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if step % self._every_steps == 0:
            self._engine.watch_spans(lambda spans: self._write(step, spans))

    def _write(self, step: int, spans: Sequence[Span]) -> None:
        grid = self._grid
        record = {
            "step": step,
            "rank": grid.rank,
            **{axis: getattr(grid, axis).rank for axis in ("pp", "tp", "cp", "dp")},
            "clock_offset_s": self._offset_s,
            "spans": [asdict(span) for span in spans],
        }
        path = timeline_path(self._run_dir, step, grid.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(path) as file:
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            # A full disk, or something else in the file's place: no reason to end a run.
            logging.getLogger(__name__).warning("the timeline of step %d is not written: %s", step, error)
