"""The section `train` of a run's config: how long and on what batches it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError

LENGTHS = ("steps", "samples", "tokens", "epochs")
AUTO = "auto"


class Precision(StrEnum):
    """Dtype of weights and activations; gradients accumulate and reduce in fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        reason = (
            "fp16 is not supported: its gradients underflow without loss scaling, which megads does not have; use bf16"
        )
        return dict.fromkeys(("fp16", "float16", "half"), reason)


@dataclass
class BatchRampConfig:
    """Grows the global batch from `start` by `increment` in equal shares of `samples` up to train.global_batch_size."""

    start: int = 0
    """Global batch size at the first step; 0 switches the ramp off."""
    increment: int = 1
    """Samples added at each rise."""
    samples: int = 0
    """Samples over which the batch grows."""


@dataclass
class TrainConfig:
    """How long and on what batches a run trains. Exactly one of steps, samples, tokens and epochs is set."""

    global_batch_size: int = 8
    """Samples a step, over all ranks."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel rank."""
    seq_len: int = 128
    """Tokens a sample."""
    steps: int | str | None = field(default=None, metadata={"choices": (AUTO,)})
    """Length of training in steps. auto goes by the amount of text: four passes, at most 20 tokens for each parameter
    of the blocks, at least 200 steps."""
    samples: int | None = None
    """Length of training in samples."""
    tokens: int | None = None
    """Length of training in tokens, padding included."""
    epochs: float | None = None
    """Length of training in passes over the training data, 0.5 for half of it."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the global batch size."""
    stages: list[Any] = field(default_factory=list)
    """Training stages that follow each other, for example
    [{until_steps: 1000, train: {global_batch_size: 512}}, {train: {global_batch_size: 1024}}]: each says where in the
    run it ends (until_steps, until_samples or until_tokens; the last one ends with the run) and what it changes
    (docs/stages.md)."""
    precision: Precision = Precision.bf16
    """bf16 or fp32."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    deterministic: bool = True
    """On a GPU: take torch's deterministic algorithms, so that a resumed run goes on bit for bit. false lets it choose,
    for attention's backward pass above all. A CPU computes the same bits either way."""
    z_loss: float = 0.0
    """Weight of log(Z)^2, Z the sum of exp(logit), in every token's loss, which keeps logits from drifting (PaLM:
    1e-4); 0 switches it off. Losses in metrics are the cross entropy alone."""
    max_nonfinite_steps: int = 5
    """Non-finite steps in a row that a run survives, skipping each; one more ends it (exit 7)."""

    def check(self) -> None:
        """Raises ConfigError on a length given twice or never, and on sizes below one."""
        given = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        if len(given) != 1:
            found = ", ".join(f"train.{name} = {value}" for name, value in given.items()) or "none of them is set"
            raise ConfigError(
                f"train needs exactly one of steps, samples, tokens and epochs, but {found}: "
                "set one (for example train.steps=100, or train.steps=auto) and the others to null"
            )
        if isinstance(self.steps, str) and self.steps != AUTO:
            raise ConfigError(f"train.steps = {self.steps}: must be an integer or auto")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs = {self.epochs}: must be above 0")
        counts = [name for name in given if name != "epochs" and given[name] != AUTO]
        self.check_sizes("max_nonfinite_steps", *counts)
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"train.z_loss = {self.z_loss}: must be 0 (off) or positive, for example 1e-4")
        if self.seed < 0:
            raise ConfigError(f"train.seed = {self.seed}: must not be negative")

    @property
    def length_is_known(self) -> bool:
        """Whether the length is a number of steps, samples or tokens, and does not wait for the data."""
        return self.steps != AUTO and self.epochs is None

    def check_sizes(self, *others: str) -> None:
        """Raises ConfigError on batch and sequence sizes, and other fields, below one."""
        for name in ("global_batch_size", "micro_batch_size", "seq_len", *others):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} = {getattr(self, name)}: must be at least 1")
