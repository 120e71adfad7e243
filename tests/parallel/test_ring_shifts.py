"""Tests which keys context-parallel ranks send each other in a ring."""

from __future__ import annotations

from itertools import product

import pytest

from megads.parallel.ring_shifts import Shift, context_chunks, keys_needed, most_window_rows, ring_shifts


def positions(rank: int, size: int, chunk: int) -> set[int]:
    return {place for held in context_chunks(rank, size) for place in range(held * chunk, (held + 1) * chunk)}


@pytest.mark.parametrize(
    ("size", "chunk", "window"),
    [(2, 3, None), (3, 4, None), (8, 2, None), *product((2, 3, 5), (3, 4), (1, 2, 3, 4, 5, 8, 11, 40))],
)
def test_every_rank_gets_the_keys_that_its_queries_see(size: int, chunk: int, window: int | None) -> None:
    """Catches a key that a query sees but that is not sent, is sent twice, or by a rank that does not hold it; and with
    a window one that is sent although no query sees it."""
    reach = 2 * size * chunk if window is None else window
    for rank in range(size):
        held = positions(rank, size, chunk)
        seen = {key for query in held for key in range(max(0, query - reach + 1), query + 1)} - held
        shifts = ring_shifts(rank, size, chunk, window)
        arriving = [(shift.source, key) for shift in shifts for part in shift.arriving for key in part]
        assert sorted(key for _, key in arriving) == sorted(seen)
        assert all(key in positions(source, size, chunk) for source, key in arriving)


@pytest.mark.parametrize(("size", "window"), [(2, None), (5, None), (5, 3), (5, 6), (8, 1)])
def test_what_one_rank_sends_another_receives(size: int, window: int | None) -> None:
    """Catches ranks that omit different shifts, or expect other rows than those that are sent: an all-to-all would hang
    or fail."""
    every = [ring_shifts(rank, size, 4, window) for rank in range(size)]
    assert len({len(shifts) for shifts in every}) == 1
    for shifts in zip(*every, strict=True):
        assert any(shift.arriving for shift in shifts), "nobody needs this shift"
        for rank, shift in enumerate(shifts):
            assert shifts[shift.target].source == rank and shifts[shift.source].target == rank
            assert shift.leaving == shifts[shift.target].arriving
            assert all(set(part) <= positions(rank, size, 4) for part in shift.leaving)


def test_windows_are_exchanged_with_neighbours_alone() -> None:
    """Catches a windowed layer that receives whole chunks, or those of ranks that its window does not reach."""
    assert keys_needed(1, 0, 4, 8, 3) == (range(6, 8),)
    assert keys_needed(1, 2, 4, 8, 3) == (range(46, 48),)
    assert keys_needed(3, 0, 4, 8, 3) == ()
    assert len(ring_shifts(0, 4, 8, None)) == 3 and len(ring_shifts(0, 4, 8, 3)) == 2
    assert ring_shifts(0, 4, 8, 1) == ()
    assert ring_shifts(0, 4, 8, 3)[0] == Shift(3, 1, (), (range(6, 8),))


def test_small_windows_alone_replace_an_all_gather() -> None:
    """Catches an all-gather for rows that few queries see, and an exchange of most rows between pairs of ranks."""
    assert most_window_rows(4, 8, None) is None
    assert most_window_rows(4, 8, 3) == (4, 4) and most_window_rows(2, 8, 3) == (2, 2)
    assert most_window_rows(4, 8, 1) == (0, 0)
    # Of the 16 rows of an all-gather between two ranks.
    assert most_window_rows(2, 8, 9) == (8, 8) and most_window_rows(2, 8, 10) is None
    assert most_window_rows(8, 8, 40) is None
