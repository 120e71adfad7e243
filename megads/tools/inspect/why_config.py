"""What `megads why` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.runtime.registry import import_plugins


class LossChoice(StrEnum):
    """Whether losses are computed."""

    auto = "auto"
    none = "none"


@dataclass
class WhyConfig:
    """`megads why`: the documents, offsets and text that a step trained on, from the run directory alone."""

    run: str = MISSING
    """Run directory, or the id of a run in runs/."""
    step: int = MISSING
    """The step, as metrics.jsonl counts."""
    rank: int | None = None
    """Show what this rank of the run read, by micro-batch; null shows the whole global batch."""
    loss: LossChoice = LossChoice.auto
    """auto: the loss of every token with the weights of the nearest checkpoint, where there is one; none computes
    nothing."""
    first: int = 0
    """First sample to show, counted from the step's first."""
    count: int | None = None
    """Samples to show; null is all with json=true, else 8."""
    tokens: bool = False
    """Show every token on a line of its own."""
    max_characters: int = 240
    """Text shown of each document; JSON has all of it."""
    tokenizer: str | None = None
    """Tokenizer file to decode with; null is the run's own, or the one beside the dataset."""
    device: str = "auto"
    """Where losses are computed: auto, cpu, cuda or cuda:<number>."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, for a model with a block of yours; a checkpoint imports nothing."""
    json: bool = False
    """Print JSON."""

    def settle_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    @property
    def shown(self) -> int | None:
        """Samples to show; None is all."""
        return self.count if self.count is not None or self.json else 8

    def check(self) -> None:
        """Raises ConfigError on numbers that name no step, rank or sample."""
        if self.step < 1:
            raise ConfigError(f"step = {self.step}: steps are counted from 1, as in metrics.jsonl")
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"rank = {self.rank}: must not be negative; null shows the whole global batch")
        if self.first < 0 or (self.count is not None and self.count < 1) or self.max_characters < 1:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}, max_characters = {self.max_characters}: want a sample "
                "from 0 on, and at least one of the others"
            )
