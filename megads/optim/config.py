"""The optimizer's and the learning-rate schedule's settings, and the built-in schedules.

The learning rate is a pure function of the samples consumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.runtime.registry import SCHEDULES, NoOptions, register_schedule


class ScheduleName(StrEnum):
    """The built-in shapes of the learning rate after the warmup; plugins register others."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay on matrices only, or a plugin's optimizer."""

    name: str = field(default="adamw", metadata={"choices": ("adamw",)})
    """adamw, or the name of an optimizer that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's optimizer, by their names."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
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
        if not self.is_adamw:
            self._check_plugin()

    @property
    def is_adamw(self) -> bool:
        """Whether the optimizer is the built-in one."""
        return self.name == "adamw"

    def _check_plugin(self) -> None:
        """Raises ConfigError on settings of AdamW that no plugin's optimizer reads."""
        adamw = OptimConfig()
        for key in ("betas", "eps", "impl"):
            if getattr(self, key) != getattr(adamw, key):
                raise ConfigError(
                    f"optim.{key} = {getattr(self, key)} only applies to optim.name=adamw, but optim.name = "
                    f"{self.name}: remove it; optim.options holds the settings of a plugin's optimizer"
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
