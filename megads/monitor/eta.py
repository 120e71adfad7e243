"""Estimated time to the end of a run: its remaining steps, validations and checkpoints, each at its usual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megads.runtime.files import read_end
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

_REMEMBERED = 20
_HISTORY_BYTES = 256 * 1024


@dataclass(frozen=True)
class Intervals:
    """When a run validates and saves.

    Attributes:
        validate_steps: steps between validations; 0: none before the end.
        validates_at_end: whether the run validates after its last step.
        save_steps: steps between checkpoints; 0: none before the end. The last step is always saved.
    """

    validate_steps: int = 0
    validates_at_end: bool = False
    save_steps: int = 0

    def validations(self, step: int, total_steps: int) -> int:
        """Returns the number of validations after a step, up to the end; that of the step itself counts."""
        return _times(self.validate_steps, step, total_steps, at_end=self.validates_at_end)

    def saves(self, step: int, total_steps: int) -> int:
        """Returns the number of checkpoints after a step, up to the end; that of the step itself counts."""
        return _times(self.save_steps, step, total_steps, at_end=True)


def _times(every: int, step: int, last: int, *, at_end: bool) -> int:
    """Counts the multiples of an interval from a step to the last one, and the last one if it counts anyway."""
    if step > last:
        return 0
    multiples = last // every - (max(step, 1) - 1) // every if every else 0
    return multiples + int(at_end and not (every and last % every == 0))


class RemainingTime:
    """Estimates the time to the end of a run from its metrics, from the second step of a start on.

    A step counts as the median of the last 20 of this start, without the first one, which is slow: it compiles,
    allocates and reads data for the first time. A validation and a checkpoint count as the median of those so far; one
    that the run has not had yet counts as what the timing of train.minutes measured, else as nothing.

    Args:
        intervals: when the run validates and saves.
    """

    def __init__(self, intervals: Intervals | None = None) -> None:
        self._intervals = intervals or Intervals()
        self._steps_s = deque[float](maxlen=_REMEMBERED)
        self._validations_s, self._saves_s = deque[float](maxlen=_REMEMBERED), deque[float](maxlen=_REMEMBERED)
        self._predicted_validation_s = 0.0
        self._is_first = True

    @classmethod
    def from_earlier_starts(cls, run_dir: Path, intervals: Intervals | None = None) -> RemainingTime:
        """Returns the estimate with the validations and checkpoints of earlier starts, but not their speed."""
        found = cls(intervals)
        for event in read_json_lines(run_dir / EVENTS_FILE):
            found.add_event(event)
        for record in read_end(run_dir / METRICS_FILE, _HISTORY_BYTES):
            found.add_metrics(record)
        found.begin()
        return found

    @property
    def step_s(self) -> float | None:
        """Usual time of a step in seconds; None before the second step of the start."""
        return median(self._steps_s) if self._steps_s else None

    def begin(self) -> None:
        """Forgets the speed of an earlier start, which may have had another machine."""
        self._steps_s.clear()
        self._is_first = True

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Adds a line of events.jsonl."""
        if event.get("event") == "start":
            self.begin()
        elif event.get("event") == "steps_timed":
            self._predicted_validation_s = float(event.get("validation_time_s", 0.0))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl; only those of steps have times."""
        if "loss" not in record or record.get("step_time_s") is None:
            return
        if not self._is_first:
            self._steps_s.append(float(record["step_time_s"]))
        self._is_first = False
        # The time since the line before, and so of what followed the step before.
        for times, key in ((self._validations_s, "validate_time_s"), (self._saves_s, "save_time_s")):
            if (spent_s := float(record.get(key) or 0.0)) > 0:
                times.append(spent_s)

    def seconds(self, step: int, total_steps: int | None) -> float | None:
        """Returns the seconds from the end of a step to the end of the run; None if unknown.

        Args:
            step: last finished step, whose validation and checkpoint are still to come.
            total_steps: planned number of steps; None if unknown.
        """
        step_s = self.step_s
        if total_steps is None or step_s is None:
            return None
        validation_s = median(self._validations_s) if self._validations_s else self._predicted_validation_s
        save_s = median(self._saves_s) if self._saves_s else 0.0
        validations, saves = self._intervals.validations(step, total_steps), self._intervals.saves(step, total_steps)
        return max(0, total_steps - step) * step_s + validations * validation_s + saves * save_s
