"""How a sweep takes the ends of its points, with a launcher whose points end at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.tools.sweep.config import SweepConfig
from megads.tools.sweep.driver import Driver, PlannedPoint
from megads.tools.sweep.launcher import PointEnd
from megads.tools.sweep.points import Point, PointBook, PointState
from megads.tools.sweep.space import Choice


class EndsAtOnce:
    """Every point it starts ends with the same code."""

    poll_s = 0.0

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        self.started: list[int] = []
        self._over: list[int] = []

    def has_room(self) -> bool:
        return True

    def start(self, point: Point) -> None:
        self.started.append(point.number)
        self._over.append(point.number)

    def find(self, point: Point) -> bool:
        return False

    def ended(self) -> list[PointEnd]:
        over, self._over = self._over, []
        return [PointEnd(number, self.exit_code) for number in over]

    def stop(self, point: Point) -> None:
        raise AssertionError("nobody asked")


@pytest.mark.parametrize(
    ("code", "state", "of_sweep", "goes_on"),
    [
        (10, PointState.killed, 10, True),
        (-9, PointState.killed, 10, True),
        (-11, PointState.killed, 1, True),
        (1, PointState.failed, 1, False),
        (8, PointState.failed, 8, False),
    ],
)
def test_killed_points_go_on(tmp_path: Path, code: int, state: PointState, of_sweep: int, goes_on: bool) -> None:
    """Catches a point whose rank the kernel killed that counts as its own failure, and stays so."""

    def plan(number: int, _: object, __: int) -> PlannedPoint:
        return PlannedPoint((), f"run-{number}", str(tmp_path / f"run-{number}"), 1)

    launcher = EndsAtOnce(code)
    for start in range(2):
        book = PointBook(tmp_path)
        said: list[str] = []
        driver = Driver(SweepConfig(), {"optim.lr": Choice(("1", "2"))}, book, plan, launcher, None, said.append)
        assert driver.run() == of_sweep, said
        assert [point.state for point in book.points] == [state, state]
        assert launcher.started == ([0, 1] if start == 0 or not goes_on else [0, 1, 0, 1])
        book.close()
