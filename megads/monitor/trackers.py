"""Trackers of a run: their selection and their interface. `megads.tools.trackers` runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.optional_tools import find_tool, require_tool

WANDB, TENSORBOARD, MLFLOW = "wandb", "tensorboard", "mlflow"


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
        ConfigError: the package of an enabled tracker, or the tool, is not installed.
    """
    wanted: dict[str, WandbMode] = {}
    mode = wandb_mode(config)
    if mode is not WandbMode.disabled:
        _require("wandb", f"logging.wandb.mode = {mode}", "logging.wandb.mode=disabled")
        wanted[WANDB] = mode
    if config.tensorboard.enabled:
        _require("tensorboard", "logging.tensorboard.enabled = true", "logging.tensorboard.enabled=false")
        wanted[TENSORBOARD] = WandbMode.offline
    if config.mlflow.enabled:
        _require("mlflow", "logging.mlflow.enabled = true", "logging.mlflow.enabled=false")
        wanted[MLFLOW] = WandbMode.offline
    wanted |= dict.fromkeys(config.trackers, WandbMode.offline)
    for name in wanted:
        require_tool("trackers", f"logging.{name if name in (WANDB, TENSORBOARD, MLFLOW) else f'trackers.{name}'}")
    return wanted


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
    return modes[given] if _installed("wandb") and find_tool("trackers") is not None else WandbMode.disabled


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is a training step, not a validation."""
    return "loss" in record


def _require(package: str, wish: str, way_out: str) -> None:
    if not _installed(package):
        raise ConfigError(
            f"{wish} needs the package {package}, which is not installed: pip install 'megads[{package}]', or {way_out}"
        )


def _installed(package: str) -> bool:
    """Whether a package can be imported; a folder of the same name in the working directory does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
