"""The trackers: what each must be able to do, and which ones a run has."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode

WANDB, TENSORBOARD = "wandb", "tensorboard"
_STATE_DIRECTORY = "logs"


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
    """Returns what can be drawn of a line of metrics.jsonl, steps under train/, validations as they are named."""
    prefix = "train/" if "loss" in record else ""
    return {
        key if key.startswith("valid/") else f"{prefix}{key}": float(value)
        for key, value in record.items()
        if isinstance(value, bool | int | float) and key != "step" and (prefix or key.startswith("valid/"))
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
