"""What is searched: for every swept key its choices or its interval; values are texts, as on a command line."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megads.errors import ConfigError
from megads.tools.sweep.config import SearchName, SweepConfig

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
