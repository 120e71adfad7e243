"""The learning rate as a pure function of samples consumed."""

from __future__ import annotations

import math

from megads.optim.config import OptimConfig, ScheduleConfig, ScheduleName


def learning_rate(samples: int, optim: OptimConfig, schedule: ScheduleConfig, decay_samples: int) -> float:
    """Learning rate of one step: linear warmup from 0, then the schedule's shape.

    Cosine and linear fall from optim.lr to optim.min_lr and stay there; constant stays at optim.lr.

    Args:
        samples: samples consumed at the END of the step, so that the first step's rate is not 0 and the step that
            ends the decay has exactly optim.min_lr.
        optim: peak and floor.
        schedule: shape and warmup.
        decay_samples: samples at which the decay ends: schedule.decay_samples, or the end of training where that is
            null.
    """
    warmup = schedule.warmup_samples
    if samples < warmup:
        return optim.lr * samples / warmup
    if samples == warmup or schedule.name is ScheduleName.constant:
        return optim.lr
    if samples >= decay_samples:
        return optim.min_lr
    done = (samples - warmup) / (decay_samples - warmup)
    left = 1.0 - done if schedule.name is ScheduleName.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.min_lr + (optim.lr - optim.min_lr) * left
