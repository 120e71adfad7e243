"""Config of `megads why`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.api import ConfigError, import_plugins


class LossChoice(StrEnum):
    """Whether losses are computed."""

    auto = "auto"
    none = "none"


@dataclass
class WhyConfig:
    """`megads why`: documents, offsets and text of a training step, from the run directory alone."""

    run: str = MISSING
    """Run directory, or id of a run in runs/."""
    step: int = MISSING
    """Step number, as in metrics.jsonl."""
    rank: int | None = None
    """Show only the samples that this rank read, by micro-batch; null shows the whole global batch."""
    loss: LossChoice = LossChoice.auto
    """auto: compute the loss of every token with the weights of the nearest checkpoint, if there is one; none: compute
    no losses."""
    first: int = 0
    """Index of the first sample to show, from 0 within the step."""
    count: int | None = None
    """Number of samples to show; null is all with json=true, else 8."""
    tokens: bool = False
    """Show one line per token."""
    max_characters: int = 240
    """Maximum characters of text per document; JSON output is not truncated."""
    tokenizer: str | None = None
    """Tokenizer file for decoding; null is the run's tokenizer, or the one stored with the dataset."""
    device: str = "auto"
    """Device for the losses: auto, cpu, cuda or cuda:<number>."""
    plugins: list[str] = field(default_factory=list)
    """Python modules to import, for models with custom blocks; loading a checkpoint imports none of them."""
    json: bool = False
    """Print JSON."""

    def resolve_plugins(self) -> None:
        """Imports the plugins; see `UsesPlugins`."""
        import_plugins(self.plugins)

    @property
    def shown(self) -> int | None:
        """Number of samples to show; None is all."""
        return self.count if self.count is not None or self.json else 8

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        if self.step < 1:
            raise ConfigError(f"step = {self.step}: steps are counted from 1, as in metrics.jsonl")
        if self.rank is not None and self.rank < 0:
            raise ConfigError(f"rank = {self.rank}: must not be negative; null shows the whole global batch")
        if self.first < 0 or (self.count is not None and self.count < 1) or self.max_characters < 1:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}, max_characters = {self.max_characters}: want a sample "
                "from 0 on, and at least one of the others"
            )
