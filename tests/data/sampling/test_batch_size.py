from __future__ import annotations

import pytest

from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.errors import ConfigError

BLOOM = BatchSizeSchedule(2048, start=192, increment=16, ramp_samples=9_765_625)


def test_blooms_batch_ramp_has_its_published_length() -> None:
    """Catches a ramp that differs in length or samples from the one with which BLOOM-176B was trained."""
    assert BLOOM.steps_for(220_000_000) == 115_311
    assert BLOOM.samples_after(12_658) == 9_765_808
    assert BLOOM.samples_after(12_695) == 9_841_584
    assert BLOOM.at(0) == 192
    assert BLOOM.at(9_765_625) == BLOOM.at(9_765_808) == 2048
    assert BLOOM.at(BLOOM.samples_after(12_657)) < 2048


@pytest.mark.parametrize(
    "schedule", [BLOOM, BatchSizeSchedule(8), BatchSizeSchedule(64, 2, 2, 100), BatchSizeSchedule(64, 16, 1, 7)]
)
def test_closed_form_counts_equal_stepping_through_the_ramp(schedule: BatchSizeSchedule) -> None:
    """Catches phases that begin a step early or late, also where the ramp skips sizes."""
    consumed = 0
    for step in range(13_000):
        assert schedule.samples_after(step) == consumed
        assert schedule.steps_for(consumed) == step
        consumed += schedule.at(consumed)
        assert schedule.steps_for(consumed - 1) == step


def test_the_ramp_stops_at_the_global_batch_size() -> None:
    """Catches a batch size that keeps growing after the ramp."""
    schedule = BatchSizeSchedule(64, start=2, increment=2, ramp_samples=100)
    assert [schedule.at(consumed) for consumed in (0, 3, 4, 99, 100, 101, 1000)] == [2, 2, 4, 62, 64, 64, 64]


def test_a_ramp_may_start_at_the_full_batch_size() -> None:
    """Catches a division by zero if start is already the full size."""
    assert BatchSizeSchedule(8, start=8, ramp_samples=0).at(0) == 8


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0,), "global_batch_size = 0"),
        ((8, 10, 1, 10), "start = 10"),
        ((8, -1, 1, 10), "start = -1"),
        ((8, 2, 4, 10), "increment = 4: must divide the 6"),
        ((8, 2, 0, 10), "increment = 0"),
        ((8, 2, 2, 0), "samples = 0"),
    ],
)
def test_a_ramp_that_never_reaches_the_batch_size_is_refused(arguments: tuple[int, ...], message: str) -> None:
    """Catches a ramp that never reaches the global batch size."""
    with pytest.raises(ConfigError, match=message):
        BatchSizeSchedule(*arguments)


def test_check_names_the_first_bad_size() -> None:
    """Catches a run that starts well and fails when the ramp reaches a size that is not divisible."""
    BLOOM.check(2, 8)
    with pytest.raises(ConfigError, match=r"a step of train.batch_ramp = 208 samples.*2 \* 16 = 32"):
        BLOOM.check(2, 16)
    with pytest.raises(ConfigError, match=r"train.global_batch_size = 10 samples.*4 \* 1 = 4"):
        BatchSizeSchedule(10).check(4, 1)
