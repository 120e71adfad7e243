from __future__ import annotations

import numpy as np
import pytest

from megads.data.best_fit import best_fit_decreasing


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Free room of each bin after best-fit decreasing as the textbook has it."""
    free: list[int] = []
    for size in sizes:
        tightest = min((bin_ for bin_, room in enumerate(free) if room >= size), key=lambda b: free[b], default=None)
        if tightest is None:
            free.append(capacity - size)
        else:
            free[tightest] -= size
    return free


@pytest.mark.parametrize("seed", range(30))
def test_bins_are_filled_as_one_item_at_a_time_fills_them(seed: int) -> None:
    """Catches overfull bins, items lost or doubled, a bin forgotten when its class is used up, and a worse fit."""
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 40))
    items = random.integers(1, capacity + 1, int(random.integers(0, 200)))
    sizes = np.sort(np.minimum(items, capacity))[::-1].astype(np.int64)
    bins = best_fit_decreasing(sizes, capacity)
    filled = np.bincount(bins, sizes).astype(np.int64)
    assert sorted((capacity - filled).tolist()) == sorted(one_by_one(sizes.tolist(), capacity))


def test_a_million_items_of_a_corpus() -> None:
    """Catches bins that overflow, or room that is wasted, where many items share a size and small ones abound."""
    sizes = np.sort(np.random.default_rng(0).geometric(0.004, 1_000_000).clip(1, 2049))[::-1].astype(np.int64)
    filled = np.bincount(best_fit_decreasing(sizes, 2049), sizes)
    assert filled.max() <= 2049 and filled.sum() == sizes.sum() and filled.mean() > 0.9999 * 2049
