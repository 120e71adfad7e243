"""Options of `megads export`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.api import ConfigError


class ExportFormat(StrEnum):
    """Published architecture of an exported model; auto chooses one that can express the model.

    universal is DeepSpeed's universal checkpoint, with that architecture's parameter names and the optimizer state.
    """

    auto = "auto"
    bloom = "bloom"
    cohere = "cohere"
    falcon = "falcon"
    gemma = "gemma"
    gemma2 = "gemma2"
    gemma3_text = "gemma3_text"
    glm4_moe = "glm4_moe"
    gpt2 = "gpt2"
    gpt_neox = "gpt_neox"
    gptj = "gptj"
    granite = "granite"
    llama = "llama"
    ministral = "ministral"
    mistral = "mistral"
    mixtral = "mixtral"
    mpt = "mpt"
    olmo = "olmo"
    olmo2 = "olmo2"
    olmo3 = "olmo3"
    olmoe = "olmoe"
    opt = "opt"
    phi = "phi"
    phi3 = "phi3"
    qwen2 = "qwen2"
    qwen2_moe = "qwen2_moe"
    qwen3 = "qwen3"
    qwen3_moe = "qwen3_moe"
    seed_oss = "seed_oss"
    smollm3 = "smollm3"
    stablelm = "stablelm"
    starcoder2 = "starcoder2"
    universal = "universal"


class ExportPrecision(StrEnum):
    """Dtype of exported weights; auto is the run's train.precision."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class ExportConfig:
    """Options of `megads export`."""

    run: str = "???"
    """Folder of a run or its name in runs/ (its newest usable checkpoint is exported), or folder of a checkpoint."""
    output: str = "???"
    """Folder to create."""
    format: ExportFormat = ExportFormat.auto
    """model_type of an architecture of transformers (docs/hugging-face.md), or auto: one that can express the model;
    universal: DeepSpeed's universal checkpoint, from which a DeepSpeed run can resume (docs/convert.md)."""
    precision: ExportPrecision = ExportPrecision.auto
    """Dtype of the weights: bf16, fp32, or auto (the run's train.precision). Checkpoints hold fp32 weights."""
    tokenizer: str | None = None
    """Tokenizer file; null uses the run's own."""
    shard_mib: int = 1024
    """Largest size of a weights file; a single larger block exceeds it."""
    average: bool = False
    """Export the running average of the weights (optim.ema_decay) instead of the weights."""
    overwrite: bool = False
    """Replace an earlier export in the output folder."""

    def check(self) -> None:
        """Raises ConfigError if shard_mib is below 1."""
        if self.shard_mib < 1:
            raise ConfigError(f"shard_mib = {self.shard_mib}: must be at least 1")
