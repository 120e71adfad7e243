"""What `megads export` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class ExportFormat(StrEnum):
    """The published architecture that an exported model becomes; auto takes the one that can express it.

    universal is DeepSpeed's universal checkpoint, with the names of that architecture and the optimizer's state.
    """

    auto = "auto"
    bloom = "bloom"
    llama = "llama"
    mistral = "mistral"
    qwen3 = "qwen3"
    olmo2 = "olmo2"
    gpt_neox = "gpt_neox"
    gpt2 = "gpt2"
    universal = "universal"


class ExportPrecision(StrEnum):
    """Dtype of exported weights; auto is what the run computed in."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class ExportConfig:
    """Everything `megads export` can be told."""

    run: str = "???"
    """A run (its newest usable checkpoint), its name in runs/, or a checkpoint's folder."""
    output: str = "???"
    """Folder to make."""
    format: ExportFormat = ExportFormat.auto
    """bloom, llama, mistral, qwen3, olmo2, gpt_neox, gpt2, or auto: the one that can express the model; universal:
    DeepSpeed's universal checkpoint, for a training of that one to go on from (docs/other-trainers.md)."""
    precision: ExportPrecision = ExportPrecision.auto
    """bf16, fp32, or auto: what the run computed in. Checkpoints hold fp32."""
    tokenizer: str | None = None
    """Tokenizer file; null is the run's own."""
    shard_mib: int = 1024
    """Size of a weights file, which is exceeded by a single block that is larger."""
    average: bool = False
    """Export the running average of the weights that the run keeps (optim.ema_decay) in the place of the weights."""
    overwrite: bool = False
    """Replace an earlier export in that folder."""

    def check(self) -> None:
        """Raises ConfigError on sizes below one."""
        if self.shard_mib < 1:
            raise ConfigError(f"shard_mib = {self.shard_mib}: must be at least 1")
