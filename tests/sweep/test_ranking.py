"""Which point wins."""

from __future__ import annotations

import pytest

from megads.sweep.config import Direction
from megads.sweep.points import Point, PointState
from megads.sweep.ranking import ranking, to_repeat


def point(number: int, objective: float | None, repeats: int | None = None, state: str = "finished") -> Point:
    return Point(number, {"x": str(number)}, state=PointState(state), objective=objective, repeats=repeats)


def test_only_what_finished_can_win() -> None:
    """Catches a winner that was stopped early, failed or diverged."""
    points = [
        point(0, 3.0),
        point(1, 1.0, state="pruned"),
        point(2, 1.0, state="failed"),
        point(3, None),
        point(4, 2.0),
    ]
    assert [ranked.point.number for ranked in ranking(points, Direction.minimize)] == [4, 0]
    assert [ranked.point.number for ranked in ranking(points, Direction.maximize)] == [0, 4]


def test_a_mean_over_seeds_beats_a_lucky_single_training() -> None:
    """Catches a winner that was only lucky, and a spread that is wrong."""
    points = [point(0, 1.0), point(1, 1.1), point(2, 1.2), point(3, 1.6, 0), point(4, 1.12, 1), point(5, 1.14, 1)]
    best, other, single = ranking(points, Direction.minimize)
    assert (best.point.number, other.point.number, single.point.number) == (1, 0, 2)
    assert best.mean == pytest.approx(1.12) and best.spread == pytest.approx(0.02)
    assert single.spread is None


def test_the_best_are_repeated_by_their_own_objective() -> None:
    """Catches repetitions that are repeated themselves."""
    points = [point(0, 2.0), point(1, 1.0), point(2, 3.0), point(3, 0.1, 0)]
    assert [p.number for p in to_repeat(points, Direction.minimize, 2)] == [1, 0]
