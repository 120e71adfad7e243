"""The feed of a run's new metrics and events to one tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megads.api import EVENTS_FILE, METRICS_FILE, Tail, is_step, read_json

_STATE_DIRECTORY = "logs"
_MEASURED = ("valid/", "eval/")


def state_path(run_dir: Path, name: str) -> Path:
    """Returns the path of the file with a tracker's feed position."""
    return run_dir / _STATE_DIRECTORY / f"tracker_{name}.json"


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numeric values of a line of metrics.jsonl; keys of steps get the prefix train/."""
    prefix = "train/" if "loss" in record else ""
    return {
        key if key.startswith(_MEASURED) else f"{prefix}{key}": float(value)
        for key, value in record.items()
        if isinstance(value, bool | int | float)
        and key not in ("step", "time")
        and (prefix or key.startswith(_MEASURED))
    }


def details(event: Mapping[str, Any]) -> str:
    """Returns the fields of an event except its time and name, as JSON."""
    rest = {key: value for key, value in event.items() if key not in ("time", "event")}
    return json.dumps(rest, default=str)


@dataclass
class FeedPosition:
    """Position of a tracker in the run's files; saved to a file between starts of a run.

    Attributes:
        metrics_bytes: bytes of metrics.jsonl that were read.
        events_bytes: bytes of events.jsonl that were read.
        step: last step passed to the tracker.
        validation_step: step of the last validation passed to the tracker.
        skip_to_step: last step passed to the tracker before the file is read from its beginning again.
        skip_to_validation: step of the last validation passed to the tracker before that.
        last_step: metrics line of the last step.
        last_validation: metrics line of the last validation.
        leaves: whether the start whose events are being read repeats steps differently.
        branch: how often a tracker that starts over has done so.
    """

    metrics_bytes: int = 0
    events_bytes: int = 0
    step: int = 0
    validation_step: int = 0
    skip_to_step: int = 0
    skip_to_validation: int = 0
    last_step: dict[str, Any] = field(default_factory=dict)
    last_validation: dict[str, Any] = field(default_factory=dict)
    leaves: bool = False
    branch: int = 0

    @classmethod
    def load(cls, path: Path) -> FeedPosition:
        """Reads a file written by `save`; returns the initial position if that is impossible."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return cls()

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(path)


@dataclass(frozen=True)
class FeedUpdate:
    """New records of a run for a tracker.

    Attributes:
        rewound_to: step from which the run continues; records passed on beyond it are obsolete. None without a rewind.
        metrics: lines of metrics.jsonl, in order.
        events: lines of events.jsonl, in order.
    """

    rewound_to: int | None
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return self.rewound_to is not None or bool(self.metrics) or bool(self.events)


class Feed:
    """Follows the files of one run for one tracker.

    Args:
        run_dir: run directory.
        position: position to continue from; updated in place.
        rewinds: whether the tracker can remove steps. If not, steps that a resume repeats are left out: they are equal
            bit for bit.
        starts_over: whether a tracker that cannot remove steps starts over where they are not equal: after a rollback,
            from a checkpoint that the user chose, and with settings that change the training.
    """

    def __init__(self, run_dir: Path, position: FeedPosition, rewinds: bool, starts_over: bool = False):
        self.position = position
        self._rewinds, self._starts_over = rewinds, starts_over
        self._metrics = Tail(run_dir / METRICS_FILE, position.metrics_bytes)
        self._events = Tail(run_dir / EVENTS_FILE, position.events_bytes)

    def resume_after(self, step: int) -> None:
        """Continues after a step that the tracker reports, which takes precedence over the saved position."""
        if step != self.position.step:
            self.position.step = step
            self.position.validation_step = min(self.position.validation_step, step)
            self._read_again()

    def read(self) -> FeedUpdate:
        """Returns the records added since the last call, a few megabytes at most; empty at the end of the files."""
        # A start truncates metrics.jsonl, then writes its event, then its steps. Since events are read last, the start
        # event of every step read is known; but metrics read before may have been truncated meanwhile, so read again.
        metrics = self._metrics.read()
        events = self._events.read()
        starts, leaves = self._starts(events)
        passed_on = max(self.position.step, self.position.validation_step)
        rewound_to = min(starts, default=passed_on)
        rewound = rewound_to < passed_on
        told = self._rewinds or (leaves and self._starts_over)
        if rewound:
            if told and not self._rewinds:
                rewound_to, self.position.branch = 0, self.position.branch + 1
            if told:
                self.position.step = min(self.position.step, rewound_to)
                self.position.validation_step = min(self.position.validation_step, rewound_to)
            self._read_again()
        elif starts:
            self._metrics.position = self.position.metrics_bytes
        if starts:
            metrics = self._metrics.read()
        metrics = [record for record in metrics if self._is_new(record)]
        self._remember(metrics)
        self.position.metrics_bytes = self._metrics.position
        self.position.events_bytes = self._events.position
        return FeedUpdate(rewound_to if rewound and told else None, metrics, events)

    def _starts(self, events: list[dict[str, Any]]) -> tuple[list[int], bool]:
        """Returns the steps of the starts, and whether one of them may repeat steps differently than they were."""
        steps, leaves = list[int](), False
        for event in events:
            name = event.get("event")
            self.position.leaves |= bool(
                (name == "config_changed" and event.get("level") == "warning")
                or name == "run_changed"
                or (name == "steps_dropped" and event.get("left"))
            )
            if name == "start":
                steps.append(int(event.get("step", 0)))
                leaves |= self.position.leaves
                self.position.leaves = False
        return steps, leaves

    def _read_again(self) -> None:
        self._metrics.position = 0
        self.position.skip_to_step = self.position.step
        self.position.skip_to_validation = self.position.validation_step

    def _is_new(self, record: Mapping[str, Any]) -> bool:
        done = self.position.skip_to_step if is_step(record) else self.position.skip_to_validation
        return int(record.get("step", 0)) > done

    def _remember(self, metrics: list[dict[str, Any]]) -> None:
        for record in metrics:
            step = int(record.get("step", 0))
            if is_step(record):
                self.position.step, self.position.last_step = step, record
            else:
                # Validation sets and tasks have one line each; after a rewind, later values are discarded.
                known = self.position.last_validation if self.position.validation_step <= step else {}
                self.position.validation_step, self.position.last_validation = step, {**known, **record}
