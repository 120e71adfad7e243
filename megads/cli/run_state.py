"""Whether a run may start at all: somebody stopped it, or it is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megads.config import RootConfig, planned_steps
from megads.errors import EXIT_OK, ConfigError, StopRequested
from megads.frozen_config import config_dict, load_frozen
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE
from megads.runtime.stop import REQUESTED, read_stop, stop_path

# What changes nothing of what a finished run has computed.
_ELSEWHERE = ("run", "logging", "cluster")
_GROUP_WRITABLE = 0o2775


def refuse_while_stopped(config: RootConfig) -> None:
    """Refuses a run that somebody stopped and has not allowed to go on; makes the kill switch's folder.

    Raises:
        StopRequested: a file that stops it is there.
        ConfigError: the folder of run.kill_switch cannot be made.
    """
    run_dir = Path(str(config.run.dir))
    switches = [stop_path(run_dir)] if read_stop(run_dir) == REQUESTED else []
    if config.run.kill_switch is not None:
        switch = Path(config.run.kill_switch)
        _make_reachable(switch.parent)
        switches += [switch] if switch.exists() else []
    if switches:
        raise StopRequested(f"the run is stopped by {switches[0]}, nothing was started: remove the file to go on")


def is_finished(config: RootConfig) -> bool:
    """Tells whether the last start of the same run, with the same config, came to its planned end.

    Args:
        config: with everything that the data tells filled in.
    """
    run_dir = Path(str(config.run.dir))
    last: dict[str, dict[str, Any]] = {str(e.get("event")): e for e in read_json_lines(run_dir / EVENTS_FILE)}
    end, left = last.get("end", {}), last.get("exit", {})
    if left.get("exit_code") != EXIT_OK or end.get("stopped") or end.get("step", -1) < planned_steps(config):
        return False
    if left["time"] < last.get("launch", left)["time"] or config.checkpoint.load != "auto":
        return False
    try:
        return _computed(load_frozen(run_dir / CONFIG_FILE)) == _computed(config)
    except ConfigError:
        return False


def _computed(config: RootConfig) -> dict[str, Any]:
    return {room: content for room, content in config_dict(config).items() if room not in _ELSEWHERE}


def _make_reachable(folder: Path) -> None:
    """Makes the folder so that every member of the group can put the file there."""
    if folder.is_dir():
        return
    try:
        folder.mkdir(parents=True)
        folder.chmod(_GROUP_WRITABLE)
    except OSError as error:
        raise ConfigError(
            f"run.kill_switch: the folder {folder} cannot be made ({error.strerror}): make it, or name a file elsewhere"
        ) from error
