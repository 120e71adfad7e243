"""Arithmetic of the estimated time to the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.monitor.eta import Intervals, RemainingTime


def remaining(*step_times_s: float, intervals: Intervals | None = None) -> RemainingTime:
    """Estimate after a start's first steps, none of which was validated or saved."""
    found = RemainingTime(intervals)
    found.add_event({"event": "start"})
    for step, step_time_s in enumerate(step_times_s, 1):
        found.add_metrics({"step": step, "loss": 1.0, "step_time_s": step_time_s})
    return found


def test_the_eta_ignores_the_first_step() -> None:
    """Catches an estimate that the slow first step spoils: a hundred steps of 2 s after one of 60 s."""
    assert remaining().seconds(0, 100) is None
    assert remaining(60.0).seconds(1, 100) is None
    assert remaining(60.0, 2.0).seconds(2, 100) == 98 * 2.0
    assert remaining(60.0, 2.0, 2.0).seconds(3, 100) == 97 * 2.0
    assert remaining(60.0, 2.0, 2.0).seconds(3, None) is None


def test_the_eta_ignores_one_slow_step() -> None:
    """Catches a mean, which one step beside a busy process shifts, and a speed that no longer applies."""
    assert remaining(60.0, 2.0, 2.0, 40.0, 2.0).seconds(5, 10) == 5 * 2.0
    assert remaining(60.0, *[2.0] * 30, *[6.0] * 20).seconds(51, 61) == 10 * 6.0


def test_the_eta_ignores_the_first_step_of_a_resume(tmp_path: Path) -> None:
    """Catches the speed of an earlier start, perhaps on another machine, and validations that a resume forgets."""
    lines = [{"step": step, "loss": 1.0, "step_time_s": 1.0, "validate_time_s": 7.0 * (step == 4)} for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = RemainingTime.from_earlier_starts(tmp_path, Intervals(validates_at_end=True))
    found.add_event({"event": "start"})
    assert found.seconds(8, 12) is None
    found.add_metrics({"step": 9, "loss": 1.0, "step_time_s": 50.0})
    assert found.seconds(9, 12) is None
    found.add_metrics({"step": 10, "loss": 1.0, "step_time_s": 3.0})
    assert found.seconds(10, 12) == 2 * 3.0 + 7.0


def test_the_eta_includes_validations_and_checkpoints() -> None:
    """Catches an estimate that ends before the validations and saves that are still to come."""
    found = remaining(60.0, 2.0, intervals=Intervals(10, validates_at_end=True, save_steps=25))
    assert found.seconds(2, 100) == 98 * 2.0
    found.add_metrics({"step": 11, "loss": 1.0, "step_time_s": 2.0, "validate_time_s": 5.0, "save_time_s": 0.0})
    assert found.seconds(11, 100) == 89 * 2.0 + 9 * 5.0
    found.add_metrics({"step": 26, "loss": 1.0, "step_time_s": 2.0, "validate_time_s": 0.0, "save_time_s": 3.0})
    assert found.seconds(26, 100) == 74 * 2.0 + 8 * 5.0 + 3 * 3.0


def test_the_eta_includes_the_validation_of_a_timing_start() -> None:
    """Catches a run of train.minutes that only learns at its end how long its one validation takes."""
    found = RemainingTime(Intervals(validates_at_end=True))
    found.add_event({"event": "steps_timed", "validation_time_s": 9.0})
    found.add_event({"event": "start"})
    for step, step_time_s in ((1, 60.0), (2, 2.0), (3, 2.0)):
        found.add_metrics({"step": step, "loss": 1.0, "step_time_s": step_time_s})
    assert found.seconds(3, 53) == 50 * 2.0 + 9.0


@pytest.mark.parametrize(
    ("every", "at_end", "step", "last", "times"),
    [
        (0, False, 0, 9, 0),
        (0, True, 0, 9, 1),
        (0, True, 9, 9, 1),
        (0, True, 10, 9, 0),
        (5, True, 0, 20, 4),
        (5, False, 4, 19, 3),
        (5, True, 4, 19, 4),
        (5, True, 5, 19, 4),
        (5, True, 6, 20, 3),
    ],
)
def test_remaining_validations_are_counted(every: int, at_end: bool, step: int, last: int, times: int) -> None:
    """Catches a last validation that is forgotten, or counted twice when the interval ends there."""
    # A step line is written before the validation of its step.
    expected = sum((bool(every) and n % every == 0) or (at_end and n == last) for n in range(max(step, 1), last + 1))
    assert Intervals(every, at_end).validations(step, last) == times == expected
