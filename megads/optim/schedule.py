"""The learning rate as a pure function of samples consumed."""

from __future__ import annotations

import math

from megads.errors import ConfigError
from megads.optim.config import OptimConfig, ScheduleConfig, ScheduleName
from megads.runtime.registry import SCHEDULES, NoOptions, register_schedule


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
