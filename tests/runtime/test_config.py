"""Tests durations as people and SLURM write them."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.runtime.config import RunConfig, parse_duration
from megads.runtime.slurm import parse_squeue_time_left


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("2h30m", 9000), ("1.5d", 129600), ("05:00", 300), ("1-12:00:00", 129600)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    """Catches minutes read as hours, and days that are dropped."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "3 weeks", "-5m", "1:2:3:4"])
def test_invalid_durations_are_refused(text: str) -> None:
    """Catches a mistyped limit that is ignored."""
    with pytest.raises(ConfigError, match=r"run\.exit_after = .* is no duration: want 90s"):
        RunConfig(exit_after=text).check()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("UNLIMITED", None), ("4:05", 245), ("1-00:00:10", 86410), ("-0:07", -7), ("INVALID", None), ("NOT_SET", None)],
)
def test_remaining_time_of_squeue_is_parsed(text: str, seconds: float | None) -> None:
    """Catches a job without a limit that stops at once, and an overdue job that seems to have time left."""
    assert parse_squeue_time_left(text) == seconds
