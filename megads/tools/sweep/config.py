"""Config and search space of a sweep."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from megads.api import LONGEST_WAIT_S, ConfigError, RootConfig


class SearchName(StrEnum):
    """Search strategy."""

    grid = "grid"
    random = "random"
    bayes = "bayes"


class SamplerName(StrEnum):
    """Surrogate model of search=bayes."""

    gp = "gp"
    tpe = "tpe"


class Direction(StrEnum):
    """Optimization direction of the objective."""

    minimize = "minimize"
    maximize = "maximize"


class PrunerName(StrEnum):
    """Pruning rule."""

    none = "none"
    median = "median"
    halving = "halving"


class LauncherName(StrEnum):
    """Launcher of the points."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


@dataclass
class PruningConfig:
    """Early stopping of points whose validation curve is worse than the others'; requires evaluation.every_steps."""

    name: PrunerName = PrunerName.none
    """none; median: stops points worse than the others' median at the same step; halving: keeps the best 1/factor."""
    from_step: int = 0
    """First step at which a point may be stopped."""
    startup_points: int = 4
    """median: number of points that must finish before any is stopped."""
    factor: int = 3
    """halving: one of this many points at a rung continues; also the ratio of steps between successive rungs."""


@dataclass
class SweepConfig:
    """Sweep over keys, only with -m: `optim.lr=1e-4,3e-4` or `optim.lr=tag(log, interval(1e-5, 1e-2))`."""

    search: SearchName = SearchName.grid
    """grid: all combinations; random: random sampling; bayes: Bayesian optimization."""
    trials: int | None = None
    """Number of points for search=random and bayes; must be null for grid."""
    sampler: SamplerName = SamplerName.gp
    """search=bayes: gp, a Gaussian process with noise-aware expected improvement; tpe, a Parzen estimator."""
    startup_trials: int = 8
    """search=bayes: number of random points before the surrogate model is used."""
    seed: int = 0
    """Seed of the search; the seed of the training runs is train.seed."""
    objective: str | None = None
    """Key of metrics.jsonl: the final value of a validation metric, or the mean of a step metric over the last tenth of
    the steps; null is the validation loss, or the training loss without validation."""
    direction: Direction = Direction.minimize
    """Whether the objective is minimized or maximized."""
    repeat_best: int = 0
    """Number of best points to train again with other seeds; the point with the best mean wins."""
    repeats: int = 2
    """Additional seeds for each of these points."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Early stopping of points."""
    launcher: LauncherName = LauncherName.local
    """local: processes on this machine; slurm: one job per point; ray: one single-node Ray job per point."""
    parallel: int | None = None
    """Maximum number of concurrent points; null is 1 for local (concurrent points share the cores or GPUs evenly); for
    slurm and ray it is startup_trials with search=bayes, else no limit."""
    point_limit_s: float | None = None
    """Limit on the training time of a point over all its starts; beyond it, it saves and counts as stopped early."""
    sbatch: str = "scripts/slurm/train.sbatch"
    """launcher=slurm: sbatch script to submit, with the overrides of the point as arguments."""
    sbatch_options: str = ""
    """launcher=slurm: sbatch options in shell syntax, for example '--partition=debug --nodes=2'."""
    ray_address: str | None = None
    """launcher=ray: address of the cluster's dashboard, http://<head node>:8265; null is RAY_ADDRESS, or the cluster on
    this machine."""
    ray_cpus: float = 1.0
    """launcher=ray: number of cores reserved for a point."""
    ray_gpus: float = 0.0
    """launcher=ray: number of GPUs reserved for, and visible to, a point."""
    poll_s: float | None = None
    """Polling interval in seconds; null is 0.5 for local, 5 for slurm and 2 for ray."""
    retry_failed: bool = False
    """Whether a resumed sweep trains its failed points again."""
    name: str | None = None
    """Name of the sweep; null derives it from the settings, so that the same command resumes the same sweep."""
    dir: str | None = None
    """Folder of the sweep; null is runs/sweeps/<name>."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range or settings conflict."""
        least = {"trials": 1, "parallel": 1, "startup_trials": 1, "repeat_best": 0, "repeats": 1}
        least |= {"pruning.from_step": 0, "pruning.startup_points": 1, "pruning.factor": 2}
        for key, minimum in least.items():
            value = attrgetter(key)(self)
            if value is not None and value < minimum:
                raise ConfigError(f"sweep.{key} = {value}: must be at least {minimum}")
        for key in ("ray_cpus", "point_limit_s", "poll_s"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"sweep.{key} = {value}: must be positive")
        if self.ray_gpus < 0:
            raise ConfigError(f"sweep.ray_gpus = {self.ray_gpus:g}: must not be negative")
        if self.poll_s is not None and self.poll_s > LONGEST_WAIT_S:
            raise ConfigError(f"sweep.poll_s = {self.poll_s}: must be at most {LONGEST_WAIT_S:.0f}")
        if self.search is SearchName.grid and self.trials is not None:
            raise ConfigError(
                f"sweep.trials = {self.trials}, but a grid has as many points as there are combinations: choose "
                "hparams_search=random or bayes, or leave sweep.trials out"
            )
        if self.search is not SearchName.grid and self.trials is None:
            raise ConfigError(f"sweep.search = {self.search} needs a number of points: set sweep.trials")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(
                f"sweep.name = {self.name!r}: use only letters, digits, '.', '_' and '-'; set a path with sweep.dir"
            )


Assignment = Mapping[str, str]
"""Values of all swept keys at one point, in the syntax of an override's value."""


@dataclass
class TrainCommandConfig(RootConfig):
    """Config of a run, and of a sweep over runs (-m)."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Sweep settings; only used with -m."""


@dataclass(frozen=True)
class Choice:
    """A finite list of values.

    Attributes:
        values: the values as strings.
    """

    values: tuple[str, ...]

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values as numbers; None unless all are finite, distinct numbers."""
        try:
            numbers = tuple(float(value) for value in self.values)
        except ValueError:
            return None
        return numbers if len(set(numbers)) == len(numbers) and all(map(math.isfinite, numbers)) else None

    def draw(self, source: random.Random) -> str:
        """A random value."""
        return source.choice(self.values)

    @property
    def size(self) -> int:
        """Number of different values."""
        return len(set(self.values))

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True)
class Interval:
    """A range of numbers.

    Attributes:
        low: minimum, inclusive.
        high: maximum, inclusive.
        log: whether to sample uniformly in the logarithm.
        integer: whether the values are integers.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def draw(self, source: random.Random) -> str:
        """A random value, with six significant digits."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + source.random() * (high - low)
        return self.text(math.exp(value) if self.log else value)

    @property
    def size(self) -> int | None:
        """Number of values; None if it is infinite."""
        return math.floor(self.high) - math.ceil(self.low) + 1 if self.integer else None

    def text(self, value: float) -> str:
        """Formats a value for the command line; rounding never leaves the interval."""
        if self.integer:
            return str(int(min(max(round(value), math.ceil(self.low)), math.floor(self.high))))
        return f"{min(max(float(f'{value:.6g}'), self.low), self.high):g}"

    def __str__(self) -> str:
        kind = ("whole numbers " if self.integer else "") + ("evenly in the logarithm " if self.log else "")
        return f"{kind}from {self.low:g} to {self.high:g}"


Space = Mapping[str, Choice | Interval]


def grid(space: Space) -> Iterator[Assignment]:
    """All combinations; the last key changes fastest, as in Hydra's basic sweeper."""
    choices = [parameter.values for parameter in space.values() if isinstance(parameter, Choice)]
    assert len(choices) == len(space), "intervals are refused before"
    for values in itertools.product(*choices):
        yield dict(zip(space, values, strict=True))


def draw(space: Space, seed: int, number: int) -> Assignment:
    """A random point that depends only on `seed` and `number`, not on earlier draws."""
    source = random.Random(f"{seed} {number}")
    return {key: parameter.draw(source) for key, parameter in space.items()}


def size(space: Space) -> int | None:
    """Number of points of the space; None if it is infinite."""
    count = 1
    for parameter in space.values():
        if parameter.size is None:
            return None
        count *= parameter.size
    return count


def check_space(config: SweepConfig, space: Space) -> None:
    """Raises ConfigError if the search cannot handle the space."""
    for key, parameter in space.items():
        if not isinstance(parameter, Interval):
            continue
        if config.search is SearchName.grid:
            raise ConfigError(
                f"{key} is an interval, which a grid cannot enumerate: give values ({key}=a,b or "
                f"{key}=range(a,b,step)), or choose hparams_search=random or bayes"
            )
        if parameter.low > parameter.high or (parameter.log and parameter.low <= 0):
            raise ConfigError(
                f"{key}: the interval from {parameter.low:g} to {parameter.high:g} is "
                f"{'not positive, as log requires' if parameter.low <= parameter.high else 'reversed'}"
            )
    if not space and config.search is not SearchName.grid:
        raise ConfigError(
            f"sweep.search = {config.search}, but no key has several values: give one an interval or values, for "
            "example 'optim.lr=tag(log, interval(1e-5, 1e-2))'"
        )
