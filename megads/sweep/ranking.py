"""Which point is best, and which are worth training again with other seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megads.sweep.config import Direction
from megads.sweep.points import Point, PointState


@dataclass(frozen=True)
class Ranked:
    """A point of the search with what its seeds came to.

    Attributes:
        point: the point itself.
        objectives: its own and those of its repetitions.
    """

    point: Point
    objectives: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.objectives)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds, with Bessel's correction; None for a single one."""
        return statistics.stdev(self.objectives) if len(self.objectives) > 1 else None


def ranking(points: Sequence[Point], direction: Direction) -> list[Ranked]:
    """The finished points of the search, the best first.

    Points trained with several seeds stand before those trained with one: the best of many single trainings is partly
    lucky, so that a mean is not compared with them.
    """
    found = []
    for point in points:
        if point.repeats is None and _counts(point):
            again = [other for other in points if other.repeats == point.number and _counts(other)]
            found.append(Ranked(point, tuple(_objective(other) for other in (point, *again))))
    sign = 1 if direction is Direction.minimize else -1
    return sorted(found, key=lambda ranked: (len(ranked.objectives) == 1, sign * ranked.mean, ranked.point.number))


def to_repeat(points: Sequence[Point], direction: Direction, count: int) -> list[Point]:
    """The best points of the search by their own objective."""
    alone = [point for point in points if point.repeats is None]
    return [ranked.point for ranked in ranking(alone, direction)[:count]]


def _counts(point: Point) -> bool:
    return point.state is PointState.finished and point.objective is not None and math.isfinite(point.objective)


def _objective(point: Point) -> float:
    assert point.objective is not None
    return point.objective
