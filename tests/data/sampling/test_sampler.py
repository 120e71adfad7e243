from __future__ import annotations

import numpy as np
import pytest

from megads.data.config import SkipConfig
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.sampler import Skips, balanced_ids, batch_hash, micro_batch_ids, require_same_skips, skips_of
from megads.errors import ConfigError

LAYOUTS = [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2)]


@pytest.mark.parametrize("dp,micro", LAYOUTS)
def test_every_layout_gets_the_same_samples_in_the_same_order(dp: int, micro: int) -> None:
    """Catches samples that depend on the layout: ordered by micro-batch, then rank, their indices are consecutive."""
    by_rank = [micro_batch_ids(100, 12, micro, rank, dp) for rank in range(dp)]
    assert all(ids.shape == (12 // (micro * dp), micro) and ids.dtype == np.int64 for ids in by_rank)
    assert np.stack(by_rank, axis=1).ravel().tolist() == list(range(100, 112))


def test_a_sample_id_is_step_then_micro_batch_then_rank() -> None:
    """Catches rank and micro-batch swapped, which the union over ranks does not show."""
    assert micro_batch_ids(100, 12, 2, 1, 3).tolist() == [[102, 103], [108, 109]]


def test_a_batch_size_that_does_not_divide_is_refused() -> None:
    """Catches samples that are silently dropped."""
    with pytest.raises(ConfigError, match=r"12 samples is not a multiple .* 2 \* 4 = 8"):
        micro_batch_ids(0, 12, 2, 0, 4)


@pytest.mark.parametrize("dp,micro", LAYOUTS)
def test_balanced_ranks_share_the_same_samples_with_similar_costs(dp: int, micro: int) -> None:
    """Catches a sample that is lost or trained twice, and a rank or micro-batch whose cost exceeds the others' by more
    than the most expensive sample."""
    random = np.random.default_rng(0)
    for _ in range(100):
        costs = (random.pareto(1.2, 12) * 1000).astype(np.int64) + 1
        ids = balanced_ids(100, costs, micro, dp)
        assert ids.shape == (dp, 12 // (micro * dp), micro) and ids.dtype == np.int64
        assert sorted(ids.ravel().tolist()) == list(range(100, 112))
        of_micro_batches = costs[ids - 100].sum(2)
        assert np.ptp(of_micro_batches.sum(1)) <= costs.max()
        assert (np.ptp(of_micro_batches, axis=1) <= costs.max()).all()
        assert (np.diff(of_micro_batches, axis=1) <= 0).all()


def test_balanced_ranks_of_a_small_example() -> None:
    """Catches an order that depends on anything but the costs: ranks compute it independently of each other."""
    costs = np.array([9, 1, 8, 2, 7, 3, 6, 4])
    assert balanced_ids(10, costs, 2, 2).tolist() == [[[10, 11], [16, 17]], [[12, 13], [14, 15]]]


def test_batch_hash_is_stable_and_sees_order_and_epoch() -> None:
    """Catches a hash that changes with type, platform or version, or that misses a change of the data."""
    pairs = [(0, 5), (0, 2), (1, 7)]
    assert batch_hash(pairs) == batch_hash(np.array(pairs, np.int32)) == "a7c332fa0ec2d076"
    assert len({batch_hash(pairs), batch_hash(pairs[::-1]), batch_hash([(1, 5), (0, 2), (1, 7)])}) == 3


def test_skipped_ranges_equal_deletions_from_a_list() -> None:
    """Catches a range that is off by one, and ranges not counted in the stream that the ranges before leave."""
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


def test_a_skip_during_a_ramp_skips_what_its_steps_trained_on() -> None:
    """Catches a skip that assumes the same number of samples in every step: it must skip what that step trained on."""
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
def test_an_empty_or_reversed_range_is_refused(item: SkipConfig) -> None:
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
def test_a_skip_leaves_samples_before_the_checkpoint_unchanged(
    before: tuple[tuple[int, int], ...], now: tuple[tuple[int, int], ...], samples: int, allowed: bool
) -> None:
    """Catches a skip before the checkpoint that shifts all later samples, and the refusal of one that does not."""
    consumed = [skips.apply(np.arange(samples)).tolist() for skips in (Skips(before), Skips(now))]
    assert (consumed[0] == consumed[1]) is allowed, "the case itself is wrong"
    if allowed:
        require_same_skips(Skips(before), Skips(now), samples)
    else:
        with pytest.raises(ConfigError, match=f"data.skip leaves out .* the {samples} that are trained already"):
            require_same_skips(Skips(before), Skips(now), samples)
