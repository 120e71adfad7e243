"""Detects loss spikes by robust statistics over the losses of the previous steps, a pure function of metrics.jsonl."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megads.resilience.config import SpikeConfig

_NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""
_LEAST_RISE = 0.02
"""Smallest relative rise of the loss that can be a spike, however low the noise of the previous steps is."""
_LEAST_NORM_FACTOR = 2.0
"""Smallest ratio of a gradient norm to its median at which it can be far above the median."""
_IMMEDIATE_RISE = 10.0
"""Multiple of the rise that makes a loss high: together with a high gradient norm, a single such step is a spike."""


@dataclass(frozen=True)
class StepLoss:
    """Metrics of one step.

    Attributes:
        step: step number.
        samples: samples consumed after the step.
        loss: training loss.
        grad_norm: gradient norm before clipping.
    """

    step: int
    samples: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        begin: last step before the suspect ones, at least `patience_steps` before the first high step. Training up to
            it is kept, and the samples after it are skipped.
        begin_samples: samples consumed after step `begin`.
        first_step: first step with a high loss, or with a high gradient norm just before it.
        step: step at which the spike was detected.
        samples: samples consumed after `step`.
        loss: loss of `step`.
        median: median of the previous losses.
        deviation: standard deviation of the noise of the previous losses, from the median absolute deviation.
        norm_ratio: gradient norm of `step` over the median of the previous ones.
    """

    begin: int
    begin_samples: int
    first_step: int
    step: int
    samples: int
    loss: float
    median: float
    deviation: float
    norm_ratio: float

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g} at step {self.step}, high since step {self.first_step}: the median before was "
            f"{self.median:.4g} with a standard deviation of {self.deviation:.2g}"
        )


@dataclass(frozen=True)
class _StepStatistics:
    """A step compared with the previous steps."""

    median: float
    deviation: float
    rise: float
    """Rise of the loss over the rise at which it is high; above 1 the loss is high."""
    norm_ratio: float
    high_norm: bool
    """Whether the gradient norm is far above its median."""


class SpikeDetector:
    """Detects loss spikes step by step.

    Each step is compared with a window of finite steps that ends `patience_steps` before it, so that the first steps of
    a spike are not part of the window. The standard deviation is taken around a line through the medians of both halves
    of the window, so that a falling loss does not increase it; the loss is compared with the median of the later half.
    The result at a step depends only on the last `memory_steps` steps, so a restart that reads these from metrics.jsonl
    reaches the same result.

    Args:
        config: detection settings.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._past: deque[StepLoss] = deque(maxlen=config.window_steps + 3 * config.patience_steps + 2)
        self._high_norm: deque[bool] = deque(maxlen=2 * config.patience_steps + 2)
        self._high: list[StepLoss] = []
        self._first = 0
        self._reported = False

    @property
    def memory_steps(self) -> int:
        """Number of finite steps that the next result depends on."""
        return self._config.window_steps + 3 * self._config.patience_steps + 2

    def replay(self, steps: Iterable[StepLoss]) -> Spike | None:
        """Observes the steps of an earlier start; returns the spike detected at the last one, if any."""
        found = None
        for step in steps:
            found = self.observe(step)
        return found

    def observe(self, step: StepLoss) -> Spike | None:
        """Adds a step; returns a spike if this step completes one, once per spike."""
        if not math.isfinite(step.loss) or not math.isfinite(step.grad_norm):
            return None
        statistics = self._compare(step)
        found = None if statistics is None else self._detect(step, statistics)
        self._past.append(step)
        self._high_norm.append(statistics is not None and statistics.high_norm)
        return found

    def suspects(self, step: StepLoss) -> bool:
        """Whether the next step, not observed yet, has a high loss or a gradient norm far above its median."""
        if not math.isfinite(step.loss) or not math.isfinite(step.grad_norm):
            return False
        statistics = self._compare(step)
        return statistics is not None and (statistics.rise > 1.0 or statistics.high_norm)

    def _compare(self, step: StepLoss) -> _StepStatistics | None:
        """Compares a step with the window; returns None while there are too few steps."""
        config = self._config
        if len(self._past) < config.window_steps + config.patience_steps:
            return None
        before = list(self._past)[-config.window_steps - config.patience_steps : -config.patience_steps]
        median, deviation = _median_and_deviation([item.loss for item in before])
        needed = max(config.threshold * deviation, _LEAST_RISE * abs(median))
        norms = np.log([max(item.grad_norm, 1e-30) for item in before])
        norm_median, norm_deviation = _median_and_deviation(norms.tolist())
        norm_rise = math.log(max(step.grad_norm, 1e-30)) - norm_median
        high_norm = norm_rise > max(config.threshold * norm_deviation, math.log(_LEAST_NORM_FACTOR))
        rise = (step.loss - median) / needed if needed else 0.0
        return _StepStatistics(median, deviation, rise, math.exp(min(norm_rise, 300.0)), high_norm)

    def _detect(self, step: StepLoss, statistics: _StepStatistics) -> Spike | None:
        if statistics.rise <= 1.0:
            self._high, self._reported = [], False
            return None
        if not self._high:
            self._first = step.step
            # The gradient norm may have risen before the loss did.
            recent = list(reversed(self._high_norm))[: self._patience]
            for item, high_norm in zip(reversed(self._past), recent, strict=False):
                if not high_norm:
                    break
                self._first = item.step
        self._high.append(step)
        immediate = statistics.rise > _IMMEDIATE_RISE and statistics.high_norm
        if self._reported or (len(self._high) < self._patience and not immediate):
            return None
        self._reported = True
        begin = self._before(self._first - self._patience)
        return Spike(
            begin.step,
            begin.samples,
            self._first,
            step.step,
            step.samples,
            step.loss,
            statistics.median,
            statistics.deviation,
            statistics.norm_ratio,
        )

    @property
    def _patience(self) -> int:
        return self._config.patience_steps

    def _before(self, step: int) -> StepLoss:
        """Returns the last finite step before a step."""
        return next(item for item in reversed(self._past) if item.step < step)


def _median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median of the later half of a series, and a robust standard deviation of its noise around a line."""
    series, half = np.asarray(values), len(values) // 2
    early, late = float(np.median(series[:half])), float(np.median(series[half:]))
    slope = min((late - early) / (len(values) / 2), 0.0)
    line = late + slope * (np.arange(len(values)) - (half + len(values) - 1) / 2)
    return late, _NORMAL * float(np.median(np.abs(series - line)))
