"""Main loop of a sweep: selects points, starts them as capacity allows, prunes them and records their outcome."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megads.api import EXIT_OK, ConfigError, MegadsError, Preempted, RankKilled, StopRequested
from megads.errors import exit_code_of_signal
from megads.tools.sweep.config import Assignment, PrunerName, SearchName, Space, SweepConfig, draw, grid, size
from megads.tools.sweep.launchers import Launcher
from megads.tools.sweep.points import (
    UNFINISHED,
    Curve,
    Point,
    PointBook,
    PointState,
    launched_at,
    read_objective,
    validation_of,
)
from megads.tools.sweep.results import points_to_repeat

if TYPE_CHECKING:
    from megads.tools.sweep.study import Study

EXIT_KILLED = 130
_STOPPED = (StopRequested.exit_code, Preempted.exit_code, EXIT_KILLED, -signal.SIGINT, -signal.SIGTERM)
_DRAWS = 200
"""Maximum number of draws to find a point that was not drawn before."""


def known_points(config: SweepConfig, space: Space) -> list[Assignment]:
    """The points that are known before training starts; none for search=bayes."""
    if config.search is SearchName.grid:
        return list(grid(space))
    if config.search is SearchName.bayes:
        return []
    wanted = min(config.trials or 0, size(space) or config.trials or 0)
    found: dict[tuple[str, ...], Assignment] = {}
    number = 0
    while len(found) < wanted:
        assignment = draw(space, config.seed, number)
        found.setdefault(tuple(assignment.values()), assignment)
        number += 1
    return list(found.values())


def make_study(config: SweepConfig, space: Space, validation_steps: int) -> Study | None:
    """Creates an Optuna study if the search or the pruning needs one.

    Raises:
        ConfigError: Optuna is not installed.
    """
    if config.search is not SearchName.bayes and config.pruning.name is PrunerName.none:
        return None
    try:
        from megads.tools.sweep.study import Study
    except ModuleNotFoundError as error:
        wish = "search=bayes" if config.search is SearchName.bayes else f"pruning.name={config.pruning.name}"
        raise ConfigError(
            f"sweep.{wish} requires Optuna, and {error.name} is not installed: pip install 'megads[sweep]', or in a "
            "checkout pip install -e '.[sweep]' -c constraints.txt"
        ) from error
    return Study(config, space, validation_steps)


def add_known_points(study: Study, points: Sequence[Point], objective: str | None) -> None:
    """Adds the points that an earlier start of the sweep trained to a new study."""
    for point in points:
        if point.repeats is not None or point.state is PointState.infeasible or point.state in UNFINISHED:
            continue
        study.add_trial(point.number, point.assignment)
        study.report(point.number, Curve(Path(point.run_dir), validation_of(objective)).read())
        study.end(point)


def propose(study: Study, config: SweepConfig, space: Space, points: Sequence[Point]) -> Assignment | None:
    """The next point of search=bayes; None if every point of the space was tried."""
    number = len(points)
    known = {tuple(point.assignment.values()) for point in points}
    total = size(space)
    if total is not None and len(known) >= total:
        return None
    proposed = study.propose(number)
    if tuple(proposed.values()) not in known:
        return proposed
    # In a small discrete space the proposal may have been tried already: take any untried point.
    for attempt in range(_DRAWS):
        drawn = draw(space, config.seed, _DRAWS * (number + 1) + attempt)
        if tuple(drawn.values()) not in known:
            return drawn
    return None


Plan = Callable[[Point, int], None]
"""Sets the overrides, run id, run directory and number of processes of a point, given the index of its seed (0 for the
original seed).

Raises:
    ConfigError: the point cannot be run and is dropped.
    MegadsError: the point would fail.
"""


class Driver:
    """Runs a sweep, new or resumed.

    Args:
        config: config of the sweep.
        space: search space.
        book: points so far.
        plan: plans a point, or refuses it.
        launcher: starts points.
        study: Optuna study, if search or pruning need one.
        print_line: prints a line for the user.
    """

    def __init__(
        self,
        config: SweepConfig,
        space: Space,
        book: PointBook,
        plan: Plan,
        launcher: Launcher,
        study: Study | None,
        print_line: Callable[[str], None],
    ):
        self._config, self._space, self._book = config, space, book
        self._plan, self._launcher, self._study, self._print_line = plan, launcher, study, print_line
        self._running: dict[int, Curve] = {}
        self._asked: dict[int, str] = {}
        self._signals: list[int] = []
        self._answered = 0

    def run(self) -> int:
        """Trains all remaining points; returns the exit code of the sweep."""
        if self._study is not None:
            add_known_points(self._study, self._book.points, self._config.objective)
        self._list_points()
        with self._signals_caught():
            # Those that were running when the sweep was killed.
            for running in self._book.points:
                if running.state is PointState.running and self._launcher.reattach(running):
                    self._print_line(f"point {running.number} is still known: {running.job or running.run_id}")
                    self._book.record(running)
                    self._follow(running)
            self._note_ends()
            # Points that ended before this command may be restarted by it.
            self._asked.clear()
            while True:
                self._note_ends()
                self._answer_signals()
                self._check_running()
                while not self._signals and self._launcher.has_free_slot() and (point := self._next()) is not None:
                    self._start(point)
                if not self._running:
                    break
                time.sleep(self._launcher.poll_s)
        return self._exit_code()

    def _list_points(self) -> None:
        """Plans the points known in advance, so that those that cannot run are dropped before any starts."""
        for point in self._book.points:
            again = point.state is PointState.failed and self._config.retry_failed
            if point.state is PointState.infeasible or again:
                point.state = PointState.waiting
                if not point.overrides:
                    # Memory or data that was missing may be available now.
                    self._plan_point(point)
        own = [point for point in self._book.points if point.repeats is None]
        for assignment in known_points(self._config, self._space)[len(own) :]:
            self._plan_point(Point(len(self._book.points), dict(assignment)))

    def _plan_point(self, point: Point, seed_place: int = 0) -> Point:
        """Plans a point and records it, whether it can run or not."""
        try:
            self._plan(point, seed_place)
        except ConfigError as error:
            point.state, point.reason = PointState.infeasible, str(error)
            self._print_line(f"point {point.number} is dropped, {point.label}: {error}")
        except MegadsError as error:
            point.state, point.reason, point.exit_code = PointState.failed, str(error), error.exit_code
            self._print_line(f"point {point.number} cannot be trained, {point.label}: {error}")
        else:
            point.reason, point.exit_code = "", None
        self._book.record(point)
        return point

    def _next(self) -> Point | None:
        """The next point to start: an unfinished one, a new one, or one of the best with another seed."""
        for point in self._book.points:
            if point.state in UNFINISHED and point.number not in self._running and point.number not in self._asked:
                return point
        own = [point for point in self._book.points if point.repeats is None]
        if self._study is not None and self._config.search is SearchName.bayes:
            # Infeasible points do not count as trials, but their number is limited.
            trials, dropped = self._config.trials or 0, sum(point.state is PointState.infeasible for point in own)
            while len(own) - dropped < trials and dropped <= 2 * trials:
                assignment = propose(self._study, self._config, self._space, self._book.points)
                if assignment is None:
                    break
                own.append(self._plan_point(Point(len(self._book.points), dict(assignment))))
                if own[-1].state is PointState.waiting:
                    return own[-1]
                dropped += own[-1].state is PointState.infeasible
        if any(point.state in UNFINISHED for point in own):
            return None
        for best in points_to_repeat(self._book.points, self._config.direction, self._config.repeat_best):
            done = sum(point.repeats == best.number for point in self._book.points)
            for place in range(done + 1, self._config.repeats + 1):
                again = Point(len(self._book.points), dict(best.assignment), repeats=best.number)
                self._plan_point(again, seed_place=place)
        return next((point for point in self._book.points if point.state is PointState.waiting), None)

    def _start(self, point: Point) -> None:
        before = point.state
        point.state, point.started_at = PointState.running, time.time()
        point.reason, point.exit_code = "", None
        # Recorded before the start, so that a sweep killed right after it finds the point again.
        self._book.record(point)
        try:
            self._launcher.start(point)
        except ConfigError as error:
            point.state, point.reason, point.exit_code = PointState.failed, str(error), error.exit_code
            self._book.record(point)
            self._print_line(f"point {point.number} failed: {error}")
            return
        verb = "goes on" if before is not PointState.waiting or point.trained_s else "starts"
        job = f"job {point.job}, " if point.job else ""
        self._print_line(f"point {point.number} {verb}, {job}run {point.run_id}: {point.label}")
        self._book.record(point)
        self._follow(point)

    def _follow(self, point: Point) -> None:
        self._running[point.number] = Curve(Path(point.run_dir), validation_of(self._config.objective))
        if self._study is not None and point.repeats is None:
            self._study.add_trial(point.number, point.assignment)

    def _check_running(self) -> None:
        """Reads the validation curves, and stops points that are pruned or exceed the time limit."""
        for number, curve in self._running.items():
            point, news, limit_s = self._book.points[number], curve.read(), self._config.point_limit_s
            bad = self._study is not None and point.repeats is None and self._study.report(number, news)
            if number in self._asked:
                continue
            if bad:
                step, value = max(news.items())
                self._asked[number] = f"validation loss {value:.4f} at step {step:,} is worse than the others'"
            elif limit_s is not None and self._trained_s(point) > limit_s:
                self._asked[number] = f"trained longer than sweep.point_limit_s = {limit_s:g}"
            else:
                continue
            self._print_line(f"point {number} is stopped early: {self._asked[number]}")
            self._launcher.stop(point)

    def _trained_s(self, point: Point) -> float:
        """Training time over all starts, in seconds, without queueing and startup."""
        launched = launched_at(Path(point.run_dir), point.started_at)
        return point.trained_s + (0.0 if launched is None else time.time() - launched)

    def _note_ends(self) -> None:
        """Sets the final state and objective of the points that ended."""
        for end in self._launcher.ended():
            point, asked = self._book.points[end.number], self._asked.pop(end.number, None)
            del self._running[point.number]
            point.trained_s, point.exit_code = round(self._trained_s(point), 1), end.exit_code
            point.objective, point.step = read_objective(Path(point.run_dir), self._config.objective)
            if end.exit_code == EXIT_OK:
                point.state = PointState.finished
            elif asked is not None:
                # The exit code is ignored: a signal during Python's startup can produce any code.
                point.state, point.reason = PointState.pruned, asked
            elif end.exit_code in _STOPPED or self._signals:
                point.state = PointState.stopped
            elif end.exit_code < 0 or end.exit_code == RankKilled.exit_code:
                by = f"killed by signal {-end.exit_code}" if end.exit_code < 0 else "a rank was killed"
                point.state, point.reason = PointState.killed, end.reason or by
            else:
                point.state, point.reason = PointState.failed, end.reason
            if point.state in (PointState.stopped, PointState.killed):
                # This command does not restart a point that was stopped from outside.
                self._asked[point.number] = ""
            self._book.record(point)
            if self._study is not None and point.repeats is None:
                self._study.end(point)
            steps = f" after {point.step:,} steps" if point.step else ""
            value = f": {point.objective:.6g}" if point.objective is not None else ""
            code = f", exit {point.exit_code}" if point.exit_code else ""
            reason = f" ({point.reason})" if point.reason else ""
            self._print_line(f"point {point.number} {point.state}{steps}{value}{code}{reason}")

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _answer_signals(self) -> None:
        """Handles signals: the first one stops every point, the second one kills them."""
        while self._answered < len(self._signals):
            self._answered += 1
            if self._answered == 1 and self._running:
                self._print_line("stopping: every point saves and ends; a second signal kills them")
            for number in self._running:
                self._launcher.stop(self._book.points[number])

    def _exit_code(self) -> int:
        """The first nonzero exit code; points that were dropped or stopped early do not count."""
        points = self._book.points
        if points and all(point.state is PointState.infeasible for point in points):
            return ConfigError.exit_code
        if self._signals:
            return Preempted.exit_code if self._signals[0] == signal.SIGTERM else StopRequested.exit_code
        counted = (PointState.failed, PointState.killed, PointState.stopped)
        codes = [point.exit_code for point in points if point.exit_code and point.state in counted]
        if codes:
            return codes[0] if codes[0] > 0 else exit_code_of_signal(-codes[0])
        return EXIT_OK
