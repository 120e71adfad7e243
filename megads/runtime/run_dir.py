"""The run directory: its files' names, and its making."""

from __future__ import annotations

import os
from pathlib import Path

from megads.errors import ConfigError
from megads.runtime import environment

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.yaml"


def rank_log_path(run_dir: Path, rank: int) -> Path:
    """Returns the file that holds everything a rank prints."""
    return run_dir / "logs" / f"rank_{rank:05d}.log"


def agent_log_path(run_dir: Path, node: int) -> Path:
    """Returns the file that holds everything that the agent of a node prints."""
    return run_dir / "logs" / f"agent_{node:05d}.log"


def srun_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything that srun prints."""
    return run_dir / "logs" / "srun.log"


def tracker_log_path(run_dir: Path) -> Path:
    """Returns the file that holds everything the tracker process prints."""
    return run_dir / "logs" / "tracker.log"


def failure_path(run_dir: Path, rank: int) -> Path:
    """Returns the file in which a rank says why it failed."""
    return run_dir / "logs" / f"failure_{rank:05d}.json"


def exit_path(run_dir: Path, rank: int) -> Path:
    """Returns the file in which a rank that ended by itself leaves its exit code."""
    return run_dir / "logs" / f"exit_{rank:05d}.json"


def create(run_dir: Path) -> None:
    """Creates a run directory, or finds that it can be written to.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    probe = run_dir / "logs" / f".writable.{environment.node_name()}.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run directory {run_dir} cannot be written to ({error.strerror}): "
            "choose another with run.dir=<path>, or make it writable"
        ) from error
