"""Tests benchmark sides in separate processes; this module imports little, as each of them imports it."""

from __future__ import annotations

import os

import pytest

from scripts.bench.processes import Turn, UnavailableError, in_turns, side_processes


def _counting(first: int) -> Turn:
    counted = iter(range(first, first + 100))
    return lambda: {"count": float(next(counted)), "threads": float(os.environ["OMP_NUM_THREADS"])}


def _missing() -> Turn:
    raise UnavailableError("no such package: install it")


def _failing() -> Turn:
    def turn() -> dict[str, float]:
        raise ZeroDivisionError("in a turn")

    return turn


@pytest.mark.distributed
def test_sides_take_turns_and_a_missing_one_is_left_out() -> None:
    """Catches a benchmark that ends because one peer is missing, a lost setting, and a failure that is not raised."""
    said: list[str] = []
    makes = {"one": (_counting, (1,)), "missing": (_missing, ()), "ten": (_counting, (10,))}
    with side_processes(makes, 1, said.append) as sides:
        taken = in_turns(sides, warm_up=1, rounds=2)
    assert said == ["missing: left out: no such package: install it"]
    assert [turn.found["count"] for turn in taken["one"]] == [1, 2, 3]
    assert [turn.found["count"] for turn in taken["ten"]] == [10, 11, 12]
    assert all(turn.found["threads"] == 1 and turn.peak_bytes > 10**7 for turn in taken["ten"])
    with (
        pytest.raises(RuntimeError, match="ZeroDivisionError: in a turn"),
        side_processes({"failing": (_failing, ())}, 1, said.append) as sides,
    ):
        in_turns(sides, 0, 1)
