"""Which points a sweep has: all of a grid, some at random, or one after the other as a model proposes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megads.errors import ConfigError
from megads.tools.sweep.config import SearchName, SweepConfig
from megads.tools.sweep.objective import Curve
from megads.tools.sweep.points import UNFINISHED, Point, PointState
from megads.tools.sweep.space import Assignment, Choice, Interval, Space, draw, grid, size

if TYPE_CHECKING:
    from megads.tools.sweep.study import Study

_DRAWS = 200
"""Draws after which a point that was not drawn before is given up."""


def check_space(config: SweepConfig, space: Space) -> None:
    """Raises ConfigError on a space that the search cannot search."""
    for key, parameter in space.items():
        if not isinstance(parameter, Interval):
            continue
        if config.search is SearchName.grid:
            raise ConfigError(
                f"{key} is an interval, of which a grid has no end: give values ({key}=a,b or {key}=range(a,b,step)), "
                "or choose hparams_search=random or bayes"
            )
        if parameter.low > parameter.high or (parameter.log and parameter.low <= 0):
            raise ConfigError(
                f"{key}: the interval from {parameter.low:g} to {parameter.high:g} is "
                f"{'not positive, and log wants that' if parameter.low <= parameter.high else 'upside down'}"
            )
    if not space and config.search is not SearchName.grid:
        raise ConfigError(
            f"sweep.search = {config.search}, but no key has several values: give one an interval or values, for "
            "example 'optim.lr=tag(log, interval(1e-5, 1e-2))'"
        )


def listed_points(config: SweepConfig, space: Space) -> list[Assignment]:
    """The points that are known before any is trained; none for search=bayes."""
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
    """Optuna's study where the search or the pruning needs one.

    Raises:
        ConfigError: Optuna is not installed.
    """
    if not config.needs_optuna:
        return None
    try:
        from megads.tools.sweep.study import Study
    except ModuleNotFoundError as error:
        wish = "search=bayes" if config.search is SearchName.bayes else f"pruning.name={config.pruning.name}"
        raise ConfigError(
            f"sweep.{wish} is done by Optuna, and {error.name} is not installed: pip install 'megads[sweep]', or in a "
            "checkout pip install -e '.[sweep]' -c constraints.txt"
        ) from error
    return Study(config, space, validation_steps)


def recall(study: Study, points: Sequence[Point], objective: str | None) -> None:
    """Tells a new study of the points that an earlier start of the sweep trained."""
    for point in points:
        if point.repeats is not None or point.state is PointState.infeasible or point.state in UNFINISHED:
            continue
        study.adopt(point.number, point.assignment)
        study.report(point.number, Curve(Path(point.run_dir), validation_of(objective)).read())
        study.end(point)


def propose(study: Study, config: SweepConfig, space: Space, points: Sequence[Point]) -> Assignment | None:
    """The next point of search=bayes; None when every point of the space was tried."""
    number = len(points)
    known = {tuple(point.assignment.values()) for point in points}
    proposed = study.propose(number)
    if tuple(proposed.values()) not in known:
        return proposed
    # A space of few values: what the model likes best was tried, so any other will do.
    total = size(space)
    if total is not None and len(known) >= total:
        return None
    for attempt in range(_DRAWS):
        drawn = draw(space, config.seed, _DRAWS * (number + 1) + attempt)
        if tuple(drawn.values()) not in known:
            return drawn
    return None


def validation_of(objective: str | None) -> str | None:
    """The curve by which points are judged early: the objective where it is a validation's, else the first set's."""
    return objective if objective and objective.startswith("valid/") else None


def describe(space: Space) -> dict[str, str]:
    """The space as texts, for people and for sweep.yaml."""
    found = {}
    for key, parameter in space.items():
        if isinstance(parameter, Choice):
            found[key] = ", ".join(parameter.values)
        else:
            whole = "whole numbers " if parameter.integer else ""
            even = "evenly in the logarithm " if parameter.log else ""
            found[key] = f"{whole}{even}from {parameter.low:g} to {parameter.high:g}"
    return found
