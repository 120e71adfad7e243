"""Runs that must not start: stopped by somebody, or finished."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest

from megads.cli.run_state import is_finished, refuse_while_stopped
from megads.config import RootConfig, TrainConfig
from megads.errors import ConfigError, StopRequested
from megads.frozen_config import freeze
from megads.runtime.config import RunConfig
from megads.runtime.metrics import EventWriter
from megads.runtime.stop import PREEMPTED, request_stop, stop_path


def config(run_dir: Path, kill_switch: Path | None = None, steps: int = 5) -> RootConfig:
    run = RunConfig(id="x", dir=str(run_dir), kill_switch=str(kill_switch) if kill_switch else None)
    return RootConfig(train=TrainConfig(steps=steps), run=run)


def test_a_stopped_run_does_not_start(tmp_path: Path) -> None:
    """Catches a kill switch that the next start ignores, and a launcher's own old request that is taken for one."""
    refuse_while_stopped(config(tmp_path))
    request_stop(tmp_path, PREEMPTED)
    refuse_while_stopped(config(tmp_path))
    stop_path(tmp_path).unlink()
    stop_path(tmp_path).touch()
    with pytest.raises(StopRequested, match=r"stopped by .*/stop, nothing was started: remove the file"):
        refuse_while_stopped(config(tmp_path))


def test_any_member_of_the_group_can_reach_the_kill_switch(tmp_path: Path) -> None:
    """Catches a switch in a folder that only the run's owner can write to, and one that cannot exist."""
    switch = tmp_path / "group" / "switches" / "stop"
    refuse_while_stopped(config(tmp_path / "run", switch))
    assert stat.S_IMODE(switch.parent.stat().st_mode) == 0o2775
    switch.touch()
    with pytest.raises(StopRequested, match="switches/stop"):
        refuse_while_stopped(config(tmp_path / "run", switch))
    with pytest.raises(ConfigError, match=r"run.kill_switch: the folder .* cannot be made"):
        refuse_while_stopped(config(tmp_path / "run", switch / "below" / "a file"))


def test_only_a_run_with_its_planned_end_is_finished(tmp_path: Path) -> None:
    """Catches a chain that stops early after a preemption, and one that trains a finished run again."""
    now, events = config(tmp_path), EventWriter(tmp_path)
    assert not is_finished(now)
    freeze(now, tmp_path / "config.yaml")
    events.write("launch")
    events.write("end", step=3, stopped="preempted")
    events.write("exit", exit_code=6)
    assert not is_finished(now)
    events.write("launch")
    events.write("end", step=5, stopped="")
    events.write("exit", exit_code=0)
    assert is_finished(now)
    assert is_finished(dataclasses.replace(now, run=dataclasses.replace(now.run, exit_after="1h")))
    assert not is_finished(config(tmp_path, steps=6))
    other = dataclasses.replace(now, checkpoint=dataclasses.replace(now.checkpoint, load="none"))
    assert not is_finished(other)
    events.write("launch")
    assert not is_finished(now)
