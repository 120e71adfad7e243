"""Learning-rate schedules: pure functions of the consumed samples, independent of batch size and layout."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import Any

from megads.errors import ConfigError
from megads.optim.config import OptimConfig
from megads.runtime.registry import SCHEDULES, NoOptions, register_schedule


class RateScheduleName(StrEnum):
    """The built-in learning-rate schedules; plugins register others."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    inverse_sqrt = "inverse_sqrt"
    wsd = "wsd"


class DecayShape(StrEnum):
    """Shape of the decay of a warmup-stable-decay (wsd) schedule."""

    minus_sqrt = "minus_sqrt"
    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"


_DECAY_SHAPES: dict[DecayShape, Callable[[float], float]] = {
    DecayShape.minus_sqrt: lambda done: 1.0 - math.sqrt(done),
    DecayShape.linear: lambda done: 1.0 - done,
    DecayShape.cosine: lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    DecayShape.exponential: lambda done: 2.0 * 0.5**done - 1.0,
}
_UNITS = ("samples", "tokens", "steps")
_OF_WSD = ("decay_share", "decay_shape", "decay_from", "decay_start_samples")


@dataclass
class ScheduleConfig:
    """Learning-rate schedule, a function of consumed samples, so that it does not depend on the batch size."""

    name: str = field(default=RateScheduleName.cosine.value, metadata={"choices": tuple(map(str, RateScheduleName))})
    """cosine, linear, constant, inverse_sqrt, wsd (warmup, stable, decay), or the name of a schedule that a plugin
    registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's schedule, by name."""
    warmup_samples: int = 0
    """Samples of linear warmup from 0 to optim.lr."""
    warmup_tokens: int | None = None
    """Warmup in tokens, instead of warmup_samples."""
    warmup_steps: int | None = None
    """Warmup in steps, instead of warmup_samples."""
    warmup_share: float | None = None
    """Warmup as a share of the schedule, which ends with the decay, instead of warmup_samples (Megatron's
    lr_warmup_fraction): for runs whose length is not known beforehand, such as those of train.minutes."""
    decay_samples: int | None = None
    """Samples at which the decay ends; null: the end of training."""
    decay_tokens: int | None = None
    """End of the decay in tokens, instead of decay_samples."""
    decay_steps: int | None = None
    """End of the decay in steps, instead of decay_samples."""
    cycles: int = 1
    """Number of equal cycles of cosine and linear decay, each starting at optim.lr again (warm restarts, Loshchilov and
    Hutter 2017)."""
    decay_share: float = 0.2
    """Share of the schedule after warmup in which wsd decays."""
    decay_shape: DecayShape = DecayShape.minus_sqrt
    """Shape of wsd's decay over its share x: minus_sqrt is 1 - sqrt(x) (Haegele et al. 2024), exponential is
    2 * 0.5^x - 1."""
    decay_from: str | None = None
    """Checkpoint (its folder, or a run's) from which the run continues and starts the decay of wsd, so that one run at
    a constant rate can be decayed from several checkpoints."""
    decay_start_samples: int | None = None
    """Samples at which the decay of wsd starts, instead of decay_share; set by decay_from."""

    def check(self) -> None:
        """Raises ConfigError on settings that are invalid, contradictory, or do not apply to the schedule."""
        self._check_units("warmup", least=0)
        self._check_units("decay", least=1)
        self._check_cycles()
        self._check_wsd()

    def _check_units(self, what: str, least: int) -> None:
        names = [f"schedule.{what}_{unit}" for unit in _UNITS]
        values = [getattr(self, f"{what}_{unit}") for unit in _UNITS]
        for name, value in zip(names, values, strict=True):
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")
        # Presets set samples, so tokens and steps override them.
        given = [f"{name} = {value}" for name, value in zip(names[1:], values[1:], strict=True) if value is not None]
        if what == "warmup" and self.warmup_share is not None:
            given.append(f"schedule.warmup_share = {self.warmup_share}")
            if not 0 <= self.warmup_share < 1:
                raise ConfigError(f"{given[-1]}: must be at least 0 and below 1, for example 0.05")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: give one of them")

    def _check_cycles(self) -> None:
        if self.cycles < 1:
            raise ConfigError(f"schedule.cycles = {self.cycles}: must be at least 1")
        if self.cycles > 1 and self.name not in (RateScheduleName.cosine, RateScheduleName.linear):
            raise ConfigError(
                f"schedule.cycles = {self.cycles} only applies to schedule.name=cosine and linear, but schedule.name = "
                f"{self.name}: remove it"
            )

    def _check_wsd(self) -> None:
        default = ScheduleConfig()
        for key in _OF_WSD:
            if self.name != RateScheduleName.wsd and getattr(self, key) != getattr(default, key):
                raise ConfigError(
                    f"schedule.{key} = {getattr(self, key)} only applies to schedule.name=wsd, but schedule.name = "
                    f"{self.name}: remove it, or set schedule.name=wsd"
                )
        if not 0 <= self.decay_share <= 1:
            raise ConfigError(f"schedule.decay_share = {self.decay_share}: must be from 0 (never) to 1")
        if self.decay_start_samples is not None and self.decay_start_samples < 0:
            raise ConfigError(f"schedule.decay_start_samples = {self.decay_start_samples}: must not be negative")


@register_schedule(RateScheduleName.cosine.value)
def _cosine(_options: NoOptions, done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


@register_schedule(RateScheduleName.linear.value)
def _linear(_options: NoOptions, done: float) -> float:
    return 1.0 - done


@register_schedule(RateScheduleName.constant.value)
def _constant(_options: NoOptions, _done: float) -> float:
    return 1.0


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each step: linear warmup from 0, then decay to optim.min_lr.

    Cosine and linear decay from optim.lr to optim.min_lr and stay there; constant stays at optim.lr; inverse_sqrt is
    optim.lr * sqrt(warmup / samples) (Vaswani et al. 2017), at least optim.min_lr; wsd stays at optim.lr until its
    decay starts. A plugin's schedule keeps the value that it has at the end of the decay.

    Attributes:
        optim: optimizer settings, with peak and minimum learning rate.
        schedule: schedule settings.
        warmup: samples at which the warmup ends.
        end: samples at which the decay ends.
        decay_start: samples at which the decay of wsd starts; None: by schedule.decay_share.
        begin: samples of the run at which this schedule begins; all other attributes count from there.
        later: schedules that replace this one from their `begin` on, in order.
        clock: (first sample of the run, tokens before it, tokens per sample) of each training phase, with which warmup
            and decay advance with tokens instead of samples; empty for samples.
    """

    optim: OptimConfig
    schedule: ScheduleConfig
    warmup: int
    end: int
    decay_start: int | None = None
    begin: int = 0
    later: tuple[LearningRate, ...] = ()
    clock: tuple[tuple[int, int, int], ...] = ()

    def __call__(self, samples: int) -> float:
        """The rate of one step.

        Args:
            samples: samples consumed at the END of the step, so that the first step's rate is not 0 and the last step
                of the decay has exactly optim.min_lr.

        Raises:
            ConfigError: a plugin's schedule returns a non-finite number.
        """
        for piece in reversed(self.later):
            if samples > piece.begin:
                return piece(samples)
        samples -= self.begin
        optim = self.optim
        if samples < self.warmup:
            return optim.lr * self._time(samples) / self._time(self.warmup)
        if self.schedule.name == RateScheduleName.inverse_sqrt:
            return max(optim.min_lr, optim.lr * math.sqrt(self._time(self.warmup) / self._time(samples)))
        share = self._share(samples)
        # Returns both endpoints exactly, without rounding.
        if share in (0.0, 1.0):
            return optim.lr if share else optim.min_lr
        return optim.min_lr + (optim.lr - optim.min_lr) * share

    def with_warmup_share(self) -> LearningRate:
        """The same with the warmup of schedule.warmup_share, if it is set: whole samples, at least 1 unless it is 0."""
        share = self.schedule.warmup_share
        if share is None:
            return self
        return replace(self, warmup=max(1, self._samples_at(int(share * self._time(self.end)))) if share else 0)

    @property
    def stable_until(self) -> int:
        """Samples at which the decay of wsd starts."""
        start = self.decay_start
        if start is None:
            warmup, end = self._time(self.warmup), self._time(self.end)
            start = self._samples_at(end - round(self.schedule.decay_share * (end - warmup)))
        return min(max(start, self.warmup), self.end)

    def _time(self, samples: int) -> int:
        """Tokens of a number of samples since `begin`; the samples without a clock."""
        if not self.clock:
            return samples
        return _tokens_at(self.clock, self.begin + samples) - _tokens_at(self.clock, self.begin)

    def _samples_at(self, time: int) -> int:
        """Inverse of `_time`, rounded up to whole samples."""
        if not self.clock:
            return time
        tokens = time + _tokens_at(self.clock, self.begin)
        first, before, length = self.clock[bisect_right(self.clock, tokens, key=itemgetter(1)) - 1]
        return first - (before - tokens) // length - self.begin

    def _share(self, samples: int) -> float:
        """Learning rate after warmup, as a fraction between optim.min_lr (0) and optim.lr (1)."""
        if self.schedule.name == RateScheduleName.wsd:
            begin = self.stable_until
            done = _progress(*map(self._time, (samples, begin, self.end))) if begin < self.end else 0.0
            return _DECAY_SHAPES[self.schedule.decay_shape](done)
        begin, end = self._time(self.warmup), self._time(self.end)
        done = _progress(self._time(samples), begin, end, self.schedule.cycles)
        share = float(SCHEDULES.make(self.schedule.name, self.schedule.options, done))
        if not math.isfinite(share):
            raise ConfigError(
                f"schedule.name = {self.schedule.name}: returns {share} at {done:g} of the decay, want a number"
            )
        return share


def _tokens_at(clock: tuple[tuple[int, int, int], ...], sample: int) -> int:
    first, before, length = clock[bisect_right(clock, sample, key=itemgetter(0)) - 1]
    return before + (sample - first) * length


def _progress(samples: int, begin: int, end: int, cycles: int = 1) -> float:
    """Progress of the current cycle between `begin` and `end`, from 0 to 1 at the cycle's last sample."""
    if samples <= begin:
        return 0.0
    if samples >= end:
        return 1.0
    done = (samples - begin) * cycles / (end - begin)
    return done - (math.ceil(done) - 1)
