"""Trackers of a run: their selection, their interface, and the feed of new metrics and events to them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.files import Tail, read_json
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

WANDB, TENSORBOARD = "wandb", "tensorboard"
_STATE_DIRECTORY = "logs"
_MEASURED = ("valid/", "eval/")


@dataclass(frozen=True)
class RunDescription:
    """Description of a run for trackers.

    Attributes:
        run_id: id of the run.
        run_dir: run directory.
        config: frozen config as plain dicts, lists, strings and numbers.
    """

    run_id: str
    run_dir: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Interface of a tracker backend. A call may raise, hang or be slow: each tracker has a process of its own."""

    rewinds: bool
    """Whether the tracker can remove recorded steps."""
    starts_over: bool = False
    """Whether a tracker that cannot remove steps begins a new record when `rewind` is called with step 0, because the
    run has left its own history. All steps that the run now consists of are passed to it again."""
    first_step: int | None
    """First step that the tracker lacks; None if only the local feed position knows it."""

    def rewind(self, step: int) -> None:
        """Removes everything recorded beyond a step."""

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Records one line of metrics.jsonl."""

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Records one line of events.jsonl."""

    def flush(self) -> None:
        """Writes buffered records."""

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        """Records the final table and all events, and closes the tracker."""


def enabled_trackers(config: LoggingConfig) -> dict[str, WandbMode]:
    """Returns the enabled trackers, each with its mode; the mode of all but wandb is offline.

    Raises:
        ConfigError: The package of an enabled tracker is not installed.
    """
    wanted: dict[str, WandbMode] = {}
    mode = wandb_mode(config)
    if mode is not WandbMode.disabled:
        _require("wandb", f"logging.wandb.mode = {mode}", "logging.wandb.mode=disabled")
        wanted[WANDB] = mode
    if config.tensorboard.enabled:
        _require("tensorboard", "logging.tensorboard.enabled = true", "logging.tensorboard.enabled=false")
        wanted[TENSORBOARD] = WandbMode.offline
    return wanted | dict.fromkeys(config.trackers, WandbMode.offline)


def wandb_mode(config: LoggingConfig) -> WandbMode:
    """Returns the wandb mode. auto is WANDB_MODE if it is set; else offline for a user who has logged in to wandb.

    Raises:
        ConfigError: WANDB_MODE has an unknown value.
    """
    if config.wandb.mode is not WandbMode.auto:
        return config.wandb.mode
    given = environment.wandb_mode()
    modes = {"disabled": WandbMode.disabled, "dryrun": WandbMode.offline, "offline": WandbMode.offline}
    modes |= {"online": WandbMode.online, "run": WandbMode.online}
    if given is not None and given not in modes:
        raise ConfigError(f"WANDB_MODE = {given!r}: want disabled, offline or online, or set logging.wandb.mode")
    if given is None:
        given = "offline" if environment.wandb_login() else "disabled"
    return modes[given] if _installed("wandb") else WandbMode.disabled


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


def _require(package: str, wish: str, way_out: str) -> None:
    if not _installed(package):
        raise ConfigError(
            f"{wish} needs the package {package}, which is not installed: pip install 'megads[{package}]', or {way_out}"
        )


def _installed(package: str) -> bool:
    """Whether a package can be imported; a folder of the same name in the working directory does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


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


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is a training step, not a validation."""
    return "loss" in record
