"""Best-fit decreasing bin packing of millions of items, a class of equal sizes at a time."""

from __future__ import annotations

import itertools

import numpy as np

from megads.data.indexed import IntArray


def best_fit_decreasing(sizes: IntArray, capacity: int) -> IntArray:
    """Puts items into bins, the largest first, each into the fullest bin that still takes it.

    The items of one size go into the bins of one free capacity together, as many as fit into each, so the work grows
    with the number of different sizes, not of items. Every such step but the last of a size uses a free capacity up and
    leaves at most two others: all in all there are at most three steps a size. (Best-fit decreasing: Johnson 1973; for
    sequences: Ding et al. 2024, "Fewer truncations improve language modeling".)

    Args:
        sizes: int64 [n], in descending order, from 1 to capacity.
        capacity: of a bin.

    Returns:
        int64 [n], the bin of each item; bins are numbered from 0 in the order in which they are opened.
    """
    assert not sizes.size or (sizes[-1] >= 1 and sizes[0] <= capacity and np.all(np.diff(sizes) <= 0))
    bin_of = np.empty(sizes.size, np.int64)
    free = _FreeBins(capacity)
    firsts = np.flatnonzero(np.diff(sizes, prepend=capacity + 1))
    for start, end in itertools.pairwise([*firsts.tolist(), sizes.size]):
        size, first = int(sizes[start]), start
        for room in [*free.rooms(size), capacity]:
            each = room // size
            bins = free.take(room, -(-(end - first) // each))
            placed = min(end - first, bins.size * each)
            bin_of[first : first + placed] = np.repeat(bins, each)[:placed]
            filled = placed // each
            free.put(room - each * size, bins[:filled])
            free.put(room - placed % each * size, bins[filled:])
            first += placed
            if first == end:
                break
    return bin_of


class _FreeBins:
    """Bins by what still fits into them. Room for `capacity` has every bin that was never opened."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: list[list[IntArray]] = [[] for _ in range(capacity)]
        self._counts = np.zeros(capacity, np.int64)
        self._opened = 0

    def rooms(self, size: int) -> list[int]:
        """Rooms of opened bins that take an item of that size, the tightest first."""
        found: list[int] = (size + np.flatnonzero(self._counts[size:])).tolist()
        return found

    def take(self, room: int, wanted: int) -> IntArray:
        """Removes and returns up to `wanted` bins of that room."""
        if room == self._capacity:
            self._opened += wanted
            return np.arange(self._opened - wanted, self._opened)
        bins = np.concatenate(self._by_room[room])
        self._by_room[room] = [bins[wanted:]]
        self._counts[room] = max(bins.size - wanted, 0)
        return bins[:wanted]

    def put(self, room: int, bins: IntArray) -> None:
        """Returns bins with that room left."""
        if room and bins.size:
            self._by_room[room].append(bins)
            self._counts[room] += bins.size
