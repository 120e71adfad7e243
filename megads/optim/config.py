"""The optimizers' and the learning-rate schedule's settings, and the built-in schedules.

The learning rate is a pure function of the samples consumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.runtime.registry import OPTIMIZERS, SCHEDULES, NoOptions, register_schedule


class ScheduleName(StrEnum):
    """The built-in shapes of the learning rate after the warmup; plugins register others."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class OptimizerName(StrEnum):
    """The built-in optimizers; plugins register others."""

    adamw = "adamw"
    lamb = "lamb"
    lion = "lion"
    muon = "muon"


@dataclass
class LambOptions:
    """What LAMB has beyond AdamW's settings."""

    adapt_all: bool = False
    """Biases and norms get a trust ratio, too."""
    max_ratio: float | None = None
    """Largest trust ratio; null for any."""

    def check(self) -> None:
        """Raises ConfigError on a bound under which no weight moves."""
        if self.max_ratio is not None and not self.max_ratio > 0:
            raise ConfigError(f"optim.options.max_ratio = {self.max_ratio}: must be positive, or null for any ratio")


@dataclass
class LionOptions:
    """Lion's two decay rates (Chen et al. 2023), which are not those of Adam's moments."""

    beta1: float = 0.9
    """Weight of the momentum in the direction of a step."""
    beta2: float = 0.99
    """Decay of the momentum."""

    def check(self) -> None:
        """Raises ConfigError on rates outside of [0, 1)."""
        if not all(0 <= beta < 1 for beta in (self.beta1, self.beta2)):
            raise ConfigError(
                f"optim.options.beta1 = {self.beta1}, optim.options.beta2 = {self.beta2}: want values in [0, 1)"
            )


class MuonPrecision(StrEnum):
    """Dtype of the Newton-Schulz iteration and of the matrices that travel for it."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class QKVSplit(StrEnum):
    """Which matrices are orthogonalised of the one that holds queries, keys and values."""

    projection = "projection"
    head = "head"


@dataclass
class MuonOptions:
    """What Muon does with the matrices of the blocks; optim.betas and eps are AdamW's for all else."""

    momentum: float = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """The direction of a step is the momentum after another one with the same gradient."""
    steps: int = 5
    """Iterations of Newton-Schulz."""
    precision: MuonPrecision = MuonPrecision.auto
    """auto, bf16 or fp32; auto is the dtype of the working weights (train.precision)."""
    qkv: QKVSplit = QKVSplit.projection
    """projection: all queries, all keys and all values are a matrix each; head: every head's are."""

    def check(self) -> None:
        """Raises ConfigError on values that orthogonalise nothing."""
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.options.momentum = {self.momentum}: want a value in [0, 1)")
        if self.steps < 1:
            raise ConfigError(f"optim.options.steps = {self.steps}: must be at least 1, usual is 5")


OPTIMIZERS.reserve(OptimizerName.lamb.value, LambOptions)
OPTIMIZERS.reserve(OptimizerName.lion.value, LionOptions)
OPTIMIZERS.reserve(OptimizerName.muon.value, MuonOptions)


@dataclass
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019), another built-in optimizer (docs/optimizers.md), or a plugin's; all with
    decoupled weight decay on matrices only."""

    name: str = field(default=OptimizerName.adamw.value, metadata={"choices": tuple(map(str, OptimizerName))})
    """adamw, lamb, lion, muon, or the name of an optimizer that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of lamb, lion, muon (docs/optimizers.md) or a plugin's optimizer, by their names."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment of AdamW and LAMB."""
    eps: float = 1e-8
    """Added to the root of the second moment of AdamW and LAMB."""
    weight_decay: float = 0.1
    """Decoupled decay; biases and every norm are exempt, by name."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    impl: Implementation = Implementation.auto
    """Whose kernels compute the gradient norm and AdamW; auto: as ops.impl. fused: megads' own. torch: torch's. apex:
    NVIDIA apex', on GPUs. State and checkpoints are the same, so a run may go on with another. DeepSpeed's optimizer,
    under parallel.zero_stage 2 and 3, is around torch's always."""

    def check(self) -> None:
        """Raises ConfigError on values that cannot train."""
        if self.lr <= 0 or not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"optim.lr = {self.lr}, optim.min_lr = {self.min_lr}: want 0 <= min_lr <= lr, lr > 0")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optim.betas = {self.betas}: want two values in [0, 1)")
        if self.clip_grad < 0:
            raise ConfigError(f"optim.clip_grad = {self.clip_grad}: must be 0 (off) or positive")
        self._check_unread()

    @property
    def is_adamw(self) -> bool:
        """Whether AdamW updates every parameter."""
        return self.name == OptimizerName.adamw

    @property
    def is_muon(self) -> bool:
        """Whether the blocks' matrices are orthogonalised, and AdamW updates all else."""
        return self.name == OptimizerName.muon

    @property
    def is_built_in(self) -> bool:
        """Whether megads brings the optimizer; False: a plugin does."""
        return OPTIMIZERS.is_reserved(self.name)

    @property
    def typed_options(self) -> Any:
        """The dataclass of a built-in optimizer's options, filled with `options`; those left out have defaults."""
        return OPTIMIZERS.reserved_options(self.name, self.options)

    def _check_unread(self) -> None:
        """Raises ConfigError on settings that the optimizer does not read."""
        unread: tuple[str, ...] = () if self.is_built_in else ("betas", "eps", "impl")
        readers = "optim.name=adamw, lamb and muon"
        if self.name == OptimizerName.lion:
            unread = ("betas", "eps")
        defaults = OptimConfig()
        for key in unread:
            if getattr(self, key) != getattr(defaults, key):
                of_lion = "lion's decay rates are optim.options.beta1 and beta2, and it divides by nothing"
                other = of_lion if self.is_built_in else "optim.options holds the settings of a plugin's optimizer"
                raise ConfigError(
                    f"optim.{key} = {getattr(self, key)} only applies to {readers}, but optim.name = {self.name}: "
                    f"remove it; {other}"
                )


@dataclass
class ScheduleConfig:
    """Learning rate as a function of samples consumed, so that it does not depend on the batch size."""

    name: str = field(default=ScheduleName.cosine.value, metadata={"choices": tuple(map(str, ScheduleName))})
    """cosine, linear, constant, or the name of a schedule that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's schedule, by their names."""
    warmup_samples: int = 0
    """Samples over which the rate rises linearly from 0 to optim.lr."""
    decay_samples: int | None = None
    """Samples at which the decay ends; null is the end of training."""

    def check(self) -> None:
        """Raises ConfigError when the decay would end inside the warmup."""
        if self.warmup_samples < 0:
            raise ConfigError(f"schedule.warmup_samples = {self.warmup_samples}: must not be negative")
        if self.decay_samples is not None and self.decay_samples <= self.warmup_samples:
            raise ConfigError(
                f"schedule.decay_samples = {self.decay_samples} must exceed "
                f"schedule.warmup_samples = {self.warmup_samples}"
            )


@register_schedule(ScheduleName.cosine.value)
def _cosine(_options: NoOptions, done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


@register_schedule(ScheduleName.linear.value)
def _linear(_options: NoOptions, done: float) -> float:
    return 1.0 - done


@register_schedule(ScheduleName.constant.value)
def _constant(_options: NoOptions, _done: float) -> float:
    return 1.0


def learning_rate(samples: int, optim: OptimConfig, schedule: ScheduleConfig, decay_samples: int) -> float:
    """Learning rate of one step: linear warmup from 0, then the schedule's shape.

    Cosine and linear fall from optim.lr to optim.min_lr and stay there; constant stays at optim.lr. A plugin's shape
    keeps the value that it has at the end of the decay.

    Args:
        samples: samples consumed at the END of the step, so that the first step's rate is not 0 and the step that
            ends the decay has exactly optim.min_lr.
        optim: peak and floor.
        schedule: shape and warmup.
        decay_samples: samples at which the decay ends: schedule.decay_samples, or the end of training where that is
            null.

    Raises:
        ConfigError: a plugin's schedule returns no finite number.
    """
    warmup = schedule.warmup_samples
    if samples < warmup:
        return optim.lr * samples / warmup
    if samples == warmup:
        done = 0.0
    else:
        done = (samples - warmup) / (decay_samples - warmup) if samples < decay_samples else 1.0
    share = float(SCHEDULES.make(schedule.name, schedule.options, done))
    if not math.isfinite(share):
        raise ConfigError(f"schedule.name = {schedule.name}: returns {share} at {done:g} of the decay, want a number")
    # The two ends exactly, whatever the rounding between them.
    if share in (0.0, 1.0):
        return optim.lr if share else optim.min_lr
    return optim.min_lr + (optim.lr - optim.min_lr) * share
