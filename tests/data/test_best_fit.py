from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megads.data.best_fit import best_fit_decreasing


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Bin of each item by best-fit decreasing as the textbook has it; of equal bins, the one that waited longest."""
    waiting: list[deque[int]] = [deque() for _ in range(capacity + 1)]
    bins, opened = [], 0
    for size in sizes:
        room = next((room for room in range(size, capacity) if waiting[room]), capacity)
        if room == capacity:
            waiting[room].append(opened)
            opened += 1
        chosen = waiting[room].popleft()
        bins.append(chosen)
        waiting[room - size].append(chosen)
    return bins


@given(st.integers(1, 40).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(1, top), max_size=150))))
def test_bins_are_filled_as_one_item_at_a_time_fills_them(packed: tuple[int, list[int]]) -> None:
    """Catches overfull bins, items lost or doubled, a bin forgotten when its class is used up, a worse fit, and an edit
    that puts any item into another bin: it would change the samples of running runs."""
    capacity, items = packed
    sizes = sorted(items, reverse=True)
    assert best_fit_decreasing(np.array(sizes, np.int64), capacity).tolist() == one_by_one(sizes, capacity)


def test_a_million_items_of_a_corpus() -> None:
    """Catches bins that overflow, or room that is wasted, where many items share a size and small ones abound."""
    sizes = np.sort(np.random.default_rng(0).geometric(0.004, 1_000_000).clip(1, 2049))[::-1].astype(np.int64)
    filled = np.bincount(best_fit_decreasing(sizes, 2049), sizes)
    assert filled.max() <= 2049 and filled.sum() == sizes.sum() and filled.mean() > 0.9999 * 2049
