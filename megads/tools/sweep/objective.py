"""What a point came to, and how it stands, read from the metrics.jsonl and events.jsonl of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megads.monitor.trackers import is_step
from megads.runtime.files import Tail
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

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
    return objective_of(lines, key), step


def events_since(run_dir: Path, since: float | None) -> list[dict[str, Any]]:
    """The run's events from a time on, in seconds since 1970."""
    events = read_json_lines(run_dir / EVENTS_FILE)
    return [event for event in events if float(event.get("time", 0)) >= (since or 0)]


def launched_at(run_dir: Path, since: float | None) -> float | None:
    """When the run's ranks were last started, from a time on; None while they were not: a job may wait for hours."""
    launches = [float(event["time"]) for event in events_since(run_dir, since) if event.get("event") == "launch"]
    return launches[-1] if launches else None


def objective_of(lines: Sequence[Mapping[str, Any]], key: str | None) -> float | None:
    """The objective of the lines of a metrics.jsonl, see `read_objective`."""
    key = key or validation_key(lines) or TRAINING_LOSS
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


def validation_key(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """The loss of the first validation set by name; None where nothing was validated."""
    return next((key for line in lines for key in sorted(line) if is_validation_loss(key)), None)


def is_validation_loss(key: str) -> bool:
    """Tells valid/<name>/loss from the other keys."""
    return key.startswith("valid/") and key.endswith("/loss")


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
            self._key = self._key or validation_key(lines)
            new |= {
                int(line["step"]): float(line[self._key])
                for line in lines
                if self._key in line and not is_step(line) and math.isfinite(float(line[self._key]))
            }
        self.values |= new
        return new
