"""Which datasets a run blends, in which proportion and order, and what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath

from omegaconf import MISSING

from megads.errors import ConfigError


class Weighting(StrEnum):
    """Where the weights of a blend come from."""

    explicit = "explicit"
    tokens = "tokens"
    documents = "documents"
    temperature = "temperature"


class Order(StrEnum):
    """Who defines the order of the samples."""

    default = "default"
    megatron = "megatron"


@dataclass
class DatasetConfig:
    """One dataset on disk."""

    path: str = MISSING
    """Prefix of <path>.bin and <path>.idx."""
    weight: float | None = None
    """Share of the samples, relative to the other datasets' weights; null unless data.weights=explicit. In Megatron's
    order a weight matters for a lone dataset too: with one its samples are those of --data-path 1.0 <prefix>, with null
    those of --data-path <prefix>."""
    name: str | None = None
    """Name of its validation share in metrics (valid/<name>/loss); null is the last part of the path."""
    max_epochs: float | None = None
    """Passes over the dataset that the run may take; null is one where it is blended with others, and any number where
    it is alone."""

    @property
    def shown_name(self) -> str:
        """The name in metrics."""
        return self.name if self.name is not None else PurePath(self.path).name


@dataclass
class PhaseConfig:
    """Another mix of the same datasets, from a sample on."""

    from_sample: int = MISSING
    """Samples consumed (`samples` in metrics.jsonl) when it begins."""
    weights: list[float] = field(default_factory=list)
    """One a dataset of data.train, in their order; 0 leaves it out."""


@dataclass
class MixConfig:
    """A mix that a run has had from a sample on."""

    from_sample: int = MISSING
    """Number in the training stream of its first sample."""
    weights: dict[str, float] = field(default_factory=dict)
    """By path."""


@dataclass
class SkipConfig:
    """A range of the training stream to leave out: either steps or samples."""

    steps: list[int] | None = None
    """[first, last] step as counted in metrics.jsonl, both left out."""
    samples: list[int] | None = None
    """[from, to]: what is consumed between these two values of `samples` in metrics.jsonl."""

    def check(self) -> None:
        """Raises ConfigError unless it is exactly one range with something in it."""
        ranges = [value for value in (self.steps, self.samples) if value is not None]
        shown = f"data.skip: steps = {self.steps}, samples = {self.samples}"
        if len(ranges) != 1 or len(ranges[0]) != 2:
            raise ConfigError(f"{shown}: want one range of one kind, for example data.skip='[{{steps: [501, 700]}}]'")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"{shown}: want [first, last] with 1 <= first <= last")
        if self.samples is not None and not 0 <= self.samples[0] < self.samples[1]:
            raise ConfigError(f"{shown}: want [from, to] with 0 <= from < to")
