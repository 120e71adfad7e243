"""What a sweep is asked: its settings, and for every swept key the values to search."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError
from megads.runtime.config import LONGEST_WAIT_S


class SearchName(StrEnum):
    """How points are chosen."""

    grid = "grid"
    random = "random"
    bayes = "bayes"


class SamplerName(StrEnum):
    """The model behind search=bayes."""

    gp = "gp"
    tpe = "tpe"


class Direction(StrEnum):
    """What is best."""

    minimize = "minimize"
    maximize = "maximize"


class PrunerName(StrEnum):
    """By which rule a point is stopped early."""

    none = "none"
    median = "median"
    halving = "halving"


class LauncherName(StrEnum):
    """Where points run."""

    local = "local"
    slurm = "slurm"
    ray = "ray"


@dataclass
class PruningConfig:
    """Stops points whose validation curve is bad compared with the others'; needs evaluation.every_steps."""

    name: PrunerName = PrunerName.none
    """none; median: worse than the median of the others at the same step; halving: only the best 1/factor go on."""
    from_step: int = 0
    """No point is stopped before this step."""
    startup_points: int = 4
    """median: points that must have finished before any is stopped."""
    factor: int = 3
    """halving: of so many points that reach a rung one goes on; the next rung is so many times as far."""

    def check(self) -> None:
        """Raises ConfigError on counts that stop nothing or everything."""
        if self.from_step < 0:
            raise ConfigError(f"sweep.pruning.from_step = {self.from_step}: must not be negative")
        if self.startup_points < 1:
            raise ConfigError(f"sweep.pruning.startup_points = {self.startup_points}: must be at least 1")
        if self.factor < 2:
            raise ConfigError(f"sweep.pruning.factor = {self.factor}: must be at least 2")


@dataclass
class SweepConfig:
    """Only with -m: the points to train, `optim.lr=1e-4,3e-4` or `optim.lr=tag(log, interval(1e-5, 1e-2))`."""

    search: SearchName = SearchName.grid
    """grid: every combination; random: drawn; bayes: proposed by a model of what the points before have shown."""
    trials: int | None = None
    """Points of search=random and bayes; a grid has as many as it has."""
    sampler: SamplerName = SamplerName.gp
    """search=bayes: gp, a Gaussian process with noise-aware expected improvement; tpe, Parzen estimators."""
    startup_trials: int = 8
    """search=bayes: points drawn at random before the model is asked."""
    seed: int = 0
    """Seed of what is drawn and proposed; the points' own seed is train.seed."""
    objective: str | None = None
    """Key of metrics.jsonl: a validation's at the end, or the mean of a step's over the last tenth of the steps; null
    is the validation loss, or the training loss where nothing is validated."""
    direction: Direction = Direction.minimize
    """Whether a small or a large objective is good."""
    repeat_best: int = 0
    """So many of the best points are trained again with other seeds; the winner is the one with the best mean."""
    repeats: int = 2
    """Further seeds for each of them."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Which points are stopped early."""
    launcher: LauncherName = LauncherName.local
    """local: processes of this machine; slurm: a job a point; ray: a job a point on one node of a Ray cluster."""
    parallel: int | None = None
    """Most points at once; null is 1 on this machine, whose cores or GPUs they share evenly, and on SLURM and Ray
    startup_trials for search=bayes, else no limit."""
    point_limit_s: float | None = None
    """A point whose ranks run longer, over all its starts, is asked to save and stop, and counts as stopped early."""
    sbatch: str = "scripts/slurm/train.sbatch"
    """launcher=slurm: the script that is submitted, with the point's overrides as arguments."""
    sbatch_options: str = ""
    """launcher=slurm: options of sbatch before the script, as in a shell: '--partition=debug --nodes=2'."""
    ray_address: str | None = None
    """launcher=ray: address of the cluster's dashboard, http://<head node>:8265; null is RAY_ADDRESS, or the cluster of
    this machine."""
    ray_cpus: float = 1.0
    """launcher=ray: cores that a point reserves."""
    ray_gpus: float = 0.0
    """launcher=ray: GPUs that a point reserves, and sees."""
    poll_s: float | None = None
    """Seconds between looks at the points; null is 0.5 on this machine, 5 on SLURM and 2 on Ray."""
    retry_failed: bool = False
    """A sweep that goes on trains its failed points again too."""
    name: str | None = None
    """Name of the sweep; null derives one from what is asked, so that the same command goes on with the same sweep."""
    dir: str | None = None
    """Folder of the sweep; null is runs/sweeps/<name>."""

    def check(self) -> None:
        """Raises ConfigError on counts and limits that make no sweep."""
        self.pruning.check()
        for key, least in (("trials", 1), ("parallel", 1), ("startup_trials", 1), ("repeat_best", 0), ("repeats", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(f"sweep.{key} = {value}: must be at least {least}")
        if self.ray_cpus <= 0 or self.ray_gpus < 0:
            raise ConfigError(
                f"sweep.ray_cpus = {self.ray_cpus:g}, sweep.ray_gpus = {self.ray_gpus:g}: want a positive number of "
                "cores, and no negative one of GPUs"
            )
        for key in ("point_limit_s", "poll_s"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ConfigError(f"sweep.{key} = {value}: must be positive")
        if self.poll_s is not None and self.poll_s > LONGEST_WAIT_S:
            raise ConfigError(f"sweep.poll_s = {self.poll_s}: must be at most {LONGEST_WAIT_S:.0f}")
        if self.search is SearchName.grid and self.trials is not None:
            raise ConfigError(
                f"sweep.trials = {self.trials}, but a grid has as many points as there are combinations: choose "
                "hparams_search=random or bayes, or leave sweep.trials out"
            )
        if self.search is not SearchName.grid and self.trials is None:
            raise ConfigError(f"sweep.search = {self.search} draws points without end: set sweep.trials")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(
                f"sweep.name = {self.name!r}: want letters, digits, '.', '_' and '-' only; a path goes into sweep.dir"
            )

    @property
    def needs_optuna(self) -> bool:
        """Grid and random without pruning need no library."""
        return self.search is SearchName.bayes or self.pruning.name is not PrunerName.none


Assignment = Mapping[str, str]
"""One point of a space: the value of every swept key, as it stands behind the = of an override."""


@dataclass(frozen=True)
class Choice:
    """A few values.

    Attributes:
        values: as texts.
    """

    values: tuple[str, ...]

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values as numbers where all of them are different ones."""
        try:
            numbers = tuple(float(value) for value in self.values)
        except ValueError:
            return None
        return numbers if len(set(numbers)) == len(numbers) and all(map(math.isfinite, numbers)) else None


@dataclass(frozen=True)
class Interval:
    """Every number of a range.

    Attributes:
        low: least value.
        high: greatest value.
        log: drawn evenly in the logarithm.
        integer: whole numbers only.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def at(self, share: float) -> str:
        """The value at a share of the way, 0 to 1, as a text of six digits."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return self.text(value)

    def text(self, value: float) -> str:
        """A value as it stands on the command line, inside the interval whatever was rounded off."""
        if self.integer:
            return str(int(min(max(round(value), math.ceil(self.low)), math.floor(self.high))))
        return f"{min(max(float(f'{value:.6g}'), self.low), self.high):g}"


Space = Mapping[str, Choice | Interval]


def grid(space: Space) -> Iterator[Assignment]:
    """Every combination, the last key changing fastest, as Hydra's own sweeper orders them."""
    choices = [parameter.values for parameter in space.values() if isinstance(parameter, Choice)]
    assert len(choices) == len(space), "intervals are refused before"
    for values in itertools.product(*choices):
        yield dict(zip(space, values, strict=True))


def draw(space: Space, seed: int, number: int) -> Assignment:
    """A point drawn at random, the same for the same seed and number whatever was drawn before."""
    source = random.Random(f"{seed} {number}")
    return {
        key: source.choice(parameter.values) if isinstance(parameter, Choice) else parameter.at(source.random())
        for key, parameter in space.items()
    }


def size(space: Space) -> int | None:
    """How many points there are, None for without end."""
    count = 1
    for parameter in space.values():
        if isinstance(parameter, Interval) and not parameter.integer:
            return None
        if isinstance(parameter, Choice):
            count *= len(set(parameter.values))
        else:
            count *= math.floor(parameter.high) - math.ceil(parameter.low) + 1
    return count


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
