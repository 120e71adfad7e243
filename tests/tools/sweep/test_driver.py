"""Tests which points a sweep has, and how it handles their ends, with a launcher whose points end at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.tools.sweep.config import (
    Choice,
    Interval,
    PruningConfig,
    SamplerName,
    SearchName,
    Space,
    SweepConfig,
    check_space,
    draw,
    grid,
    size,
)
from megads.tools.sweep.driver import Driver, add_known_points, known_points, make_study, propose
from megads.tools.sweep.launchers import Launcher, PointEnd
from megads.tools.sweep.points import Point, PointBook, PointState

SPACE: Space = {"lr": Interval(1e-5, 1e-1, log=True), "heads": Interval(1, 8, integer=True), "norm": Choice(("a", "b"))}
SMALL: Space = {"x": Choice(("1", "2")), "y": Choice(("a", "b"))}


def test_a_grid_is_hydras_product_in_its_order() -> None:
    """Catches missing combinations, and an order that differs from Hydra's job numbers."""
    assert [tuple(point.values()) for point in grid(SMALL)] == [("1", "a"), ("1", "b"), ("2", "a"), ("2", "b")]


def test_draws_stay_inside_and_cover_what_they_should() -> None:
    """Catches rounding that leaves the interval, a uniform draw where log was set, and a bound that is never
    reached."""
    points = [draw(SPACE, 3, number) for number in range(400)]
    rates = sorted(float(point["lr"]) for point in points)
    assert rates[0] >= 1e-5 and rates[-1] <= 1e-1
    assert math.log10(rates[200]) == pytest.approx(-3, abs=0.35)
    assert {point["heads"] for point in points} == {str(number) for number in range(1, 9)}
    assert points[7] == draw(SPACE, 3, 7) != draw(SPACE, 4, 7)


def test_random_points_are_different_and_end_with_the_space() -> None:
    """Catches a point trained twice, and an infinite loop over a small space."""
    config = SweepConfig(search=SearchName.random, trials=20)
    assert len({tuple(point.values()) for point in known_points(config, SMALL)}) == size(SMALL) == 4
    assert len(known_points(config, SPACE)) == 20
    longer = SweepConfig(search=SearchName.random, trials=30)
    assert known_points(longer, SPACE)[:20] == known_points(config, SPACE), "more trials go on with the same ones"


@pytest.mark.parametrize(
    ("config", "space", "expected"),
    [
        (SweepConfig(), SPACE, "lr is an interval, which a grid cannot enumerate"),
        (SweepConfig(search=SearchName.random, trials=2), {}, "no key has several values"),
        (SweepConfig(search=SearchName.random, trials=2), {"x": Interval(0, 1, log=True)}, "not positive"),
        (SweepConfig(search=SearchName.random, trials=2), {"x": Interval(2, 1)}, "is reversed"),
    ],
)
def test_a_space_that_cannot_be_searched(config: SweepConfig, space: Space, expected: str) -> None:
    """Catches a sweep that starts, and then fails midway or never ends."""
    with pytest.raises(ConfigError, match=expected):
        check_space(config, space)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trials": 3}, "a grid has as many points as there are combinations"),
        ({"search": SearchName.bayes}, "set sweep.trials"),
        ({"parallel": 0}, "sweep.parallel = 0"),
        ({"point_limit_s": 0.0}, "sweep.point_limit_s = 0.0"),
        ({"name": "a/b"}, "sweep.name = 'a/b'"),
        ({"pruning": PruningConfig(factor=1)}, "sweep.pruning.factor = 1"),
        ({"pruning": PruningConfig(from_step=-1)}, "sweep.pruning.from_step = -1"),
        ({"pruning": PruningConfig(startup_points=0)}, "sweep.pruning.startup_points = 0"),
        ({"search": SearchName.random, "trials": 0}, "sweep.trials = 0"),
        ({"startup_trials": 0}, "sweep.startup_trials = 0"),
        ({"repeat_best": -1}, "sweep.repeat_best = -1"),
        ({"repeats": 0}, "sweep.repeats = 0"),
        ({"poll_s": 0.0}, "sweep.poll_s = 0.0: must be positive"),
        ({"poll_s": 1e12}, "sweep.poll_s = 1000000000000.0: must be at most"),
        ({"name": ".a"}, "sweep.name = '.a'"),
    ],
)
def test_settings_that_cannot_be_run(change: dict[str, object], expected: str) -> None:
    """Catches an invalid setting that is detected only hours later."""
    with pytest.raises(ConfigError) as caught:
        SweepConfig(**change).check()  # type: ignore[arg-type]
    assert expected in str(caught.value)


def trained(number: int, assignment: dict[str, str], folder: Path) -> Point:
    """Returns a point whose objective has its optimum at lr = 1e-3."""
    value = (math.log10(float(assignment["lr"])) + 3) ** 2 + int(assignment["heads"]) / 10
    return Point(number, assignment, run_dir=str(folder), state=PointState.finished, objective=value)


@pytest.mark.parametrize("sampler", list(SamplerName))
def test_bayes_finds_the_good_region_and_goes_on_as_it_would_have(sampler: SamplerName, tmp_path: Path) -> None:
    """Catches a sampler that does not get the results, and a resumed search that draws the same points again."""
    config = SweepConfig(search=SearchName.bayes, trials=16, sampler=sampler, startup_trials=5, seed=1)
    study = make_study(config, SPACE, 1)
    assert study is not None
    points: list[Point] = []
    for number in range(15):
        assignment = propose(study, config, SPACE, points)
        assert assignment is not None
        study.add_trial(number, assignment)
        points.append(trained(number, dict(assignment), tmp_path))
        study.end(points[-1])
    drawn, proposed = points[:5], points[10:]
    assert min(float(p.objective or 0) for p in proposed) < min(float(p.objective or 0) for p in drawn)
    resumed = make_study(config, SPACE, 1)
    assert resumed is not None
    add_known_points(resumed, points, None)
    assert propose(resumed, config, SPACE, points) == propose(study, config, SPACE, points)


def test_bayes_ends_with_a_small_space() -> None:
    """Catches a point proposed twice, whose run would only be resumed, and an infinite search."""
    config = SweepConfig(search=SearchName.bayes, trials=9, startup_trials=2)
    study = make_study(config, SMALL, 1)
    assert study is not None
    points: list[Point] = []
    while (assignment := propose(study, config, SMALL, points)) is not None:
        study.add_trial(len(points), assignment)
        points.append(Point(len(points), dict(assignment), state=PointState.finished, objective=1.0))
        study.end(points[-1])
    assert len({point.label for point in points}) == len(points) == 4


def test_settings_at_their_borders_can_be_run() -> None:
    """Catches a check that refuses the smallest valid values."""
    least = PruningConfig(from_step=0, startup_points=1, factor=2)
    SweepConfig(
        search=SearchName.bayes, trials=1, parallel=1, startup_trials=1, repeat_best=0, repeats=1, point_limit_s=1e-9,
        poll_s=1e-9, name="a.B_c-0", pruning=least,
    ).check()  # fmt: skip


class EndsAtOnce(Launcher):
    """A launcher whose points all end at once with the same exit code."""

    def __init__(self, exit_code: int):
        super().__init__(Path(), None, 0.0)
        self.exit_code = exit_code
        self.started: list[int] = []
        self._over: list[int] = []

    def start(self, point: Point) -> None:
        self.started.append(point.number)
        self._over.append(point.number)

    def reattach(self, point: Point) -> bool:
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
    """Catches a point whose rank the kernel killed and that counts as failed, so that it is never retried."""

    def plan(point: Point, _: int) -> None:
        point.run_id, point.run_dir = f"run-{point.number}", str(tmp_path / f"run-{point.number}")

    launcher = EndsAtOnce(code)
    for start in range(2):
        book = PointBook(tmp_path)
        said: list[str] = []
        driver = Driver(SweepConfig(), {"optim.lr": Choice(("1", "2"))}, book, plan, launcher, None, said.append)
        assert driver.run() == of_sweep, said
        assert [point.state for point in book.points] == [state, state]
        assert launcher.started == ([0, 1] if start == 0 or not goes_on else [0, 1, 0, 1])
        book.close()


@pytest.mark.parametrize(("trials", "points"), [(9, 4), (3, 3)])
def test_bayes_ends_when_nothing_new_is_left(tmp_path: Path, trials: int, points: int) -> None:
    """Catches a driver that hangs on the fifth of four points, starts one twice, or exceeds sweep.trials."""

    def plan(point: Point, _: int) -> None:
        point.run_id, point.run_dir = f"run-{point.number}", str(tmp_path / f"run-{point.number}")

    config = SweepConfig(search=SearchName.bayes, trials=trials, startup_trials=2)
    launcher, book = EndsAtOnce(1), PointBook(tmp_path)
    driver = Driver(config, SMALL, book, plan, launcher, make_study(config, SMALL, 1), lambda _: None)
    assert driver.run() == 1
    assert launcher.started == list(range(points)) and len({point.label for point in book.points}) == points
    book.close()


class EndsLater(EndsAtOnce):
    """A launcher whose points end at every third poll."""

    looks = 0

    def ended(self) -> list[PointEnd]:
        self.looks += 1
        return super().ended() if self.looks % 3 == 0 else []


@pytest.mark.parametrize("limit", [None, 1e6])
def test_points_below_their_limit_are_left_alone(tmp_path: Path, limit: float | None) -> None:
    """Catches a time limit that stops points below it, and one that is required."""

    def plan(point: Point, _: int) -> None:
        point.run_id, point.run_dir = f"run-{point.number}", str(tmp_path / f"run-{point.number}")
        Path(point.run_dir).mkdir()

    config, launcher, book = SweepConfig(point_limit_s=limit), EndsLater(8), PointBook(tmp_path)
    driver = Driver(config, {"optim.lr": Choice(("1", "2"))}, book, plan, launcher, None, lambda _: None)
    assert driver.run() == 8
    assert [point.state for point in book.points] == [PointState.failed] * 2 and launcher.looks >= 3
    book.close()


def test_the_number_of_points() -> None:
    """Catches a search that ends before its space does, or that never ends."""
    whole = Interval(1.5, 4.0, integer=True)
    assert size({"a": whole}) == 3 and size({"a": whole, "b": Choice(("x", "y", "x"))}) == 6
    assert size({"a": whole, "b": Interval(0.0, 1.0)}) is None and size({}) == 1
