from __future__ import annotations

import numpy as np
import pytest

from megads.data.batch_size import BatchSizeSchedule
from megads.data.blend_config import SkipConfig
from megads.data.skip import Skips, require_same_past, skips_of
from megads.errors import ConfigError


def test_against_lists() -> None:
    """Catches a range that is off by one, and ranges not counted as the run with the ones before counts."""
    random = np.random.default_rng(0)
    for _ in range(200):
        begins = random.integers(0, 60, random.integers(0, 5))
        ranges = tuple((int(begin), int(begin + random.integers(1, 20))) for begin in begins)
        stream = list(range(300))
        for first, end in ranges:
            del stream[first:end]
        skips = Skips(ranges)
        assert skips.apply(np.arange(100)).tolist() == stream[:100], ranges
        left_out = [number for first, end in skips.left_out() for number in range(first, end)]
        assert left_out == sorted(set(range(300)) - set(stream)), ranges


def test_steps_of_a_ramp() -> None:
    """Catches steps taken for equally many samples each: a skipped step leaves out what that step trained on."""
    schedule = BatchSizeSchedule(8, start=4, increment=4, ramp_samples=8)
    assert [schedule.samples_after(step) for step in (1, 3)] == [4, 16]
    skips = skips_of([SkipConfig(steps=[2, 3]), SkipConfig(samples=[5, 7])], schedule)
    assert skips.ranges == ((4, 16), (5, 7))
    assert skips.apply(np.arange(7)).tolist() == [0, 1, 2, 3, 16, 19, 20]


@pytest.mark.parametrize(
    "item",
    [SkipConfig(), SkipConfig(steps=[1]), SkipConfig(steps=[0, 3]), SkipConfig(steps=[5, 4]),
     SkipConfig(samples=[4, 4]), SkipConfig(samples=[-1, 4]), SkipConfig([1, 2], [3, 4])],
)  # fmt: skip
def test_no_range_is_refused(item: SkipConfig) -> None:
    """Catches a range that silently skips nothing, or everything."""
    with pytest.raises(ConfigError, match=r"data\.skip: "):
        item.check()


@pytest.mark.parametrize(
    ("before", "now", "samples", "allowed"),
    [
        ((), ((20, 30),), 20, True),
        ((), ((19, 30),), 20, False),
        ((), ((0, 5),), 0, True),
        (((4, 9),), ((4, 9), (20, 30)), 20, True),
        (((4, 9),), ((4, 9), (12, 13)), 20, False),
        (((4, 9),), (), 20, False),
        (((4, 9),), (), 4, True),
        (((4, 6), (4, 7)), ((4, 9),), 20, True),
    ],
)
def test_what_is_trained_stays_as_it_was(
    before: tuple[tuple[int, int], ...], now: tuple[tuple[int, int], ...], samples: int, allowed: bool
) -> None:
    """Catches a skip before the checkpoint that shifts all samples to come, and the refusal of one that does not."""
    consumed = [skips.apply(np.arange(samples)).tolist() for skips in (Skips(before), Skips(now))]
    assert (consumed[0] == consumed[1]) is allowed, "the case itself is wrong"
    if allowed:
        require_same_past(Skips(before), Skips(now), samples)
    else:
        with pytest.raises(ConfigError, match=f"data.skip leaves out .* the {samples} that are trained already"):
            require_same_past(Skips(before), Skips(now), samples)
