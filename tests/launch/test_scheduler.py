"""Time limits at which a run stops."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.launch.scheduler import Deadline, StopOrder
from megads.runtime.metrics import EventWriter, MetricsWriter


def first_order(deadline: Deadline, within_s: float) -> StopOrder | None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if order := deadline.poll():
            return order
        time.sleep(0.02)
    return None


def test_exit_after_ends_a_start_once(tmp_path: Path) -> None:
    """Catches run.exit_after that is never checked, triggers at once, or triggers again at every check."""
    begin = time.monotonic()
    deadline = Deadline(tmp_path, 1.0, lambda: None, None)
    order = first_order(deadline, 60)
    assert order is not None and order.reason == "time limit" and "run.exit_after has passed" in order.message
    assert time.monotonic() - begin >= 1.0
    assert first_order(deadline, 1.2) is None


def test_the_margin_covers_a_step_and_a_save(tmp_path: Path) -> None:
    """Catches a margin without the time of the save, or of the step that must end first."""
    deadline = Deadline(tmp_path, None, lambda: 1000.0, None)
    deadline.poll()
    assert deadline.margin_s == 10 + 2 * 60
    MetricsWriter(tmp_path, enabled=True).write({"step": 1, "step_time_s": 30.0})
    EventWriter(tmp_path).write("checkpoint_saved", save_s=100.0)
    time.sleep(0.6)
    assert deadline.poll() is None
    assert deadline.margin_s == 10 + 2 * (30 + 100)
    assert Deadline(tmp_path, None, lambda: 1000.0, 7.0).margin_s == 7


def test_an_extended_limit_is_honoured(tmp_path: Path) -> None:
    """Catches a run that stops at a time limit which an administrator has extended, and one that never stops."""
    answers = iter([5.0, 900.0])
    deadline = Deadline(tmp_path, None, lambda: next(answers), 60.0)
    assert first_order(deadline, 1.2) is None
    order = first_order(Deadline(tmp_path, None, lambda: 5.0, 60.0), 60)
    assert order is not None
    assert "5s left before the job's time limit, of which saving may take 1m00s" in order.message


def test_a_silent_controller_sets_no_limit(tmp_path: Path) -> None:
    """Catches a run that stops because squeue did not answer."""

    def fail() -> float:
        raise ConfigError("no answer")

    assert first_order(Deadline(tmp_path, None, fail, 60.0), 0.7) is None


@pytest.mark.parametrize("left_s", [None, 3600.0])
def test_a_job_with_time_to_spare_is_not_stopped(tmp_path: Path, left_s: float | None) -> None:
    """Catches a job that stops without a time limit, or long before it."""
    assert first_order(Deadline(tmp_path, None, lambda: left_s, None), 0.7) is None
