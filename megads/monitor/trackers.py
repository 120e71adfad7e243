"""The trackers of a run: which ones it has, what each must be able to do, and the news of the run that they are fed."""

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
    """What a tracker is told of a run.

    Attributes:
        run_id: its id.
        run_dir: its directory.
        config: the frozen config as plain dicts, lists, strings and numbers.
    """

    run_id: str
    run_dir: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Records one run somewhere else. Any call may raise, hang or be slow: it has a process of its own."""

    rewinds: bool
    """It can take back steps."""
    first_step: int | None
    """The first step that it lacks; None where only this machine knows."""

    def rewind(self, step: int) -> None:
        """Takes back what was recorded beyond a step."""

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Records one line of metrics.jsonl."""

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Records one line of events.jsonl."""

    def flush(self) -> None:
        """Hands on what was recorded."""

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        """Records the final table and all events, and ends."""


def wanted_trackers(config: LoggingConfig) -> dict[str, WandbMode]:
    """Returns the trackers that a run shall have, each with where it records; offline, but for wandb.

    Raises:
        ConfigError: one is asked for whose package is not installed.
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
    """Returns where wandb records, auto decided.

    Raises:
        ConfigError: WANDB_MODE is no mode.
    """
    if config.wandb.mode is not WandbMode.auto:
        return config.wandb.mode
    given = environment.wandb_mode()
    if given in ("disabled", "dryrun") or not _installed("wandb"):
        return WandbMode.disabled if given != "dryrun" else WandbMode.offline
    if given in (None, "offline", "online", "run"):
        return WandbMode.online if given in ("online", "run") else WandbMode.offline
    raise ConfigError(f"WANDB_MODE = {given!r}: want disabled, offline or online, or set logging.wandb.mode")


def state_path(run_dir: Path, name: str) -> Path:
    """Returns the file in which a tracker keeps how far it has come."""
    return run_dir / _STATE_DIRECTORY / f"tracker_{name}.json"


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns what can be drawn of a line of metrics.jsonl, steps under train/, the rest as it is named."""
    prefix = "train/" if "loss" in record else ""
    return {
        key if key.startswith(_MEASURED) else f"{prefix}{key}": float(value)
        for key, value in record.items()
        if isinstance(value, bool | int | float)
        and key not in ("step", "time")
        and (prefix or key.startswith(_MEASURED))
    }


def details(event: Mapping[str, Any]) -> str:
    """Returns the fields of an event beside its time and name, as JSON."""
    rest = {key: value for key, value in event.items() if key not in ("time", "event")}
    return json.dumps(rest, default=str)


def _require(package: str, wish: str, way_out: str) -> None:
    if not _installed(package):
        raise ConfigError(
            f"{wish} needs the package {package}, which is not installed: pip install 'megads[{package}]', or {way_out}"
        )


def _installed(package: str) -> bool:
    """Tells whether a package can be imported; a folder of the same name in the working directory is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@dataclass
class FeedPosition:
    """How far a tracker has come; kept in a file between two starts of a run.

    Attributes:
        metrics_bytes: read of metrics.jsonl.
        events_bytes: read of events.jsonl.
        step: last step passed on.
        validation_step: last validation passed on.
        skip_to_step: steps up to this one were passed on before the file was read again.
        skip_to_validation: the same for validations.
        last_step: last step's line.
        last_validation: last validation's line.
    """

    metrics_bytes: int = 0
    events_bytes: int = 0
    step: int = 0
    validation_step: int = 0
    skip_to_step: int = 0
    skip_to_validation: int = 0
    last_step: dict[str, Any] = field(default_factory=dict)
    last_validation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> FeedPosition:
        """Reads what `save` wrote; the beginning where there is nothing to read."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return cls()

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(path)


@dataclass(frozen=True)
class News:
    """What there is to pass on.

    Attributes:
        rewound_to: the run goes on from this step, and what was passed on beyond it is no longer true; None if not so.
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
        run_dir: the run directory.
        position: where to go on; kept up to date.
        rewinds: the tracker can take back steps. Where it cannot, steps that a resume trains again are left out: they
            are the same bit for bit unless the command changed.
    """

    def __init__(self, run_dir: Path, position: FeedPosition, rewinds: bool):
        self.position = position
        self._rewinds = rewinds
        self._metrics = Tail(run_dir / METRICS_FILE, position.metrics_bytes)
        self._events = Tail(run_dir / EVENTS_FILE, position.events_bytes)

    def go_on_from(self, step: int) -> None:
        """Passes on what is beyond a step: the tracker knows better what it has than this position."""
        if step != self.position.step:
            self.position.step = step
            self.position.validation_step = min(self.position.validation_step, step)
            self._read_again()

    def read(self) -> News:
        """Returns the news since the last call, a few megabytes at most; nothing at the end of the files."""
        # A start cuts metrics.jsonl back, then writes its event, then its steps. So whoever reads events last has seen
        # the start of every step that it read; but what it read may have been cut off in between, and is read again.
        metrics = self._metrics.read()
        events = self._events.read()
        starts = [int(event.get("step", 0)) for event in events if event.get("event") == "start"]
        passed_on = max(self.position.step, self.position.validation_step)
        rewound_to = min(starts, default=passed_on)
        rewound = rewound_to < passed_on
        if rewound:
            if self._rewinds:
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
        return News(rewound_to if rewound and self._rewinds else None, metrics, events)

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
                # Sets and tasks have a line each; a run that went back forgets what came later.
                known = self.position.last_validation if self.position.validation_step <= step else {}
                self.position.validation_step, self.position.last_validation = step, {**known, **record}


def is_step(record: Mapping[str, Any]) -> bool:
    """Tells a step's line of metrics.jsonl from a validation's."""
    return "loss" in record
