"""When a run's processes ran and how they ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.tools.report.history import read_history
from megads.tools.report.timeline import find_starts
from tests.tools.report.written_runs import (
    BEGIN,
    STEP_TIME_S,
    write_eventful_run,
    write_events,
    write_start,
    write_steps,
)


def test_starts_of_an_eventful_run(tmp_path: Path) -> None:
    """Catches a killed start that ends where the next one begins, and a lost exit code."""
    write_eventful_run(tmp_path)
    killed, failed, stopped = find_starts(read_history(tmp_path))
    assert (killed.begin, killed.end, killed.exit_code) == (BEGIN, BEGIN + 55, None)
    assert failed.exit_code == 1
    assert (stopped.begin, stopped.end, stopped.exit_code) == (BEGIN + 180, BEGIN + 234, 5)


def test_what_is_said_before_a_launch_is_of_that_start(tmp_path: Path) -> None:
    """Catches a killed start that seems to last until somebody starts the run again with another config."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 2)
    write_events(tmp_path, ("config_changed", {"time": BEGIN + 90, "message": "optim.lr 1 -> 2"}))
    write_start(tmp_path, 0, BEGIN + 91)
    killed, _ = find_starts(read_history(tmp_path))
    assert killed.end == BEGIN + 1


def test_a_run_in_progress_lasts_as_long_as_its_steps(tmp_path: Path) -> None:
    """Catches a run of hours that seems to have ended with its first event."""
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 40, step_time_s=lambda step: STEP_TIME_S)
    [start] = find_starts(read_history(tmp_path))
    assert start.exit_code is None
    assert start.end == pytest.approx(BEGIN + 1 + 40 * STEP_TIME_S)


def test_no_launch_no_starts(tmp_path: Path) -> None:
    """Catches events of another writer that are taken for starts."""
    write_steps(tmp_path, 1, 2)
    write_events(tmp_path, ("checkpoint_saved", {"step": 2}), ("launch", {"time": "yesterday"}))
    assert find_starts(read_history(tmp_path)) == []
