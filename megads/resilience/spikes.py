"""Finds loss spikes: robust statistics over the losses of the steps before, as a pure function of the ledger."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megads.resilience.config import SpikeConfig

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_RISE = 0.02
"""Of the loss; below it a rise is no spike, however quiet the steps before were."""
_LEAST_NORM_FACTOR = 2.0
"""A gradient norm that grew by less is not far above its median."""
_AT_ONCE = 10.0
"""Times the rise that makes a loss high: with the gradient norm as a witness, one step is enough."""


@dataclass(frozen=True)
class StepLoss:
    """What the ledger says of a finite step.

    Attributes:
        step: the step.
        samples: consumed after it.
        loss: of it.
        grad_norm: of it, before clipping.
    """

    step: int
    samples: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        begin: the step after which training is suspect: the patience before the first step. What was trained up to it
            stays, and the samples after it are left out.
        begin_samples: consumed after that step.
        first_step: at which the loss was high, or the gradient norm just before it.
        step: at which the spike was found.
        samples: consumed after that step.
        loss: of that step.
        median: of the losses before.
        deviation: standard deviation of the noise of these, from the median absolute deviation.
        norm_ratio: gradient norm of that step over the median of those before.
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
class _Judgement:
    """How a step compares with those before it."""

    median: float
    deviation: float
    rise: float
    """Over that at which a loss is high."""
    norm_ratio: float
    wild: bool
    """The gradient norm is far above its median."""


class SpikeDetector:
    """Watches the losses of a run, step after step.

    Each step is compared with a window of the finite steps before it that ends `patience_steps` earlier, so that the
    first steps of a spike are not part of it. A falling loss does not widen the standard deviation: that is taken about
    a line through the medians of both halves of the window, and the loss is compared with the median of the later half.
    The result at a step depends on the last `memory_steps` steps only, so a restart that reads these from the ledger
    finds the same.

    Args:
        config: when a loss is high.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._past: deque[StepLoss] = deque(maxlen=config.window_steps + 3 * config.patience_steps + 2)
        self._wild: deque[bool] = deque(maxlen=2 * config.patience_steps + 2)
        self._high: list[StepLoss] = []
        self._first = 0
        self._reported = False

    @property
    def memory_steps(self) -> int:
        """Finite steps that the next judgement depends on."""
        return self._config.window_steps + 3 * self._config.patience_steps + 2

    def replay(self, steps: Iterable[StepLoss]) -> Spike | None:
        """Observes the steps of an earlier start; returns what was found at the last one."""
        found = None
        for step in steps:
            found = self.observe(step)
        return found

    def observe(self, step: StepLoss) -> Spike | None:
        """Takes note of a step; returns the spike that it completes, once for each."""
        if not math.isfinite(step.loss) or not math.isfinite(step.grad_norm):
            return None
        judged = self._judge(step)
        found = None if judged is None else self._found(step, judged)
        self._past.append(step)
        self._wild.append(judged is not None and judged.wild)
        return found

    def suspects(self, step: StepLoss) -> bool:
        """Whether the next step, not observed yet, has a high loss or a gradient norm far above its median."""
        if not math.isfinite(step.loss) or not math.isfinite(step.grad_norm):
            return False
        judged = self._judge(step)
        return judged is not None and (judged.rise > 1.0 or judged.wild)

    def _judge(self, step: StepLoss) -> _Judgement | None:
        """None while there are too few steps to compare with."""
        config = self._config
        if len(self._past) < config.window_steps + config.patience_steps:
            return None
        before = list(self._past)[-config.window_steps - config.patience_steps : -config.patience_steps]
        median, deviation = _level([item.loss for item in before])
        needed = max(config.threshold * deviation, _LEAST_RISE * abs(median))
        norms = np.log([max(item.grad_norm, 1e-30) for item in before])
        norm_median, norm_deviation = _level(norms.tolist())
        norm_rise = math.log(max(step.grad_norm, 1e-30)) - norm_median
        wild = norm_rise > max(config.threshold * norm_deviation, math.log(_LEAST_NORM_FACTOR))
        rise = (step.loss - median) / needed if needed else 0.0
        return _Judgement(median, deviation, rise, math.exp(min(norm_rise, 300.0)), wild)

    def _found(self, step: StepLoss, judged: _Judgement) -> Spike | None:
        if judged.rise <= 1.0:
            self._high, self._reported = [], False
            return None
        if not self._high:
            self._first = step.step
            # The gradient norm may have risen before the loss did.
            for item, wild in zip(reversed(self._past), list(reversed(self._wild))[: self._patience], strict=False):
                if not wild:
                    break
                self._first = item.step
        self._high.append(step)
        at_once = judged.rise > _AT_ONCE and judged.wild
        if self._reported or (len(self._high) < self._patience and not at_once):
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
            judged.median,
            judged.deviation,
            judged.norm_ratio,
        )

    @property
    def _patience(self) -> int:
        return self._config.patience_steps

    def _before(self, step: int) -> StepLoss:
        """The last finite step before this one."""
        return next(item for item in reversed(self._past) if item.step < step)


def _level(values: Sequence[float]) -> tuple[float, float]:
    """Median of the later half of a series, and the standard deviation of its noise about a line, both robust."""
    series, half = np.asarray(values), len(values) // 2
    early, late = float(np.median(series[:half])), float(np.median(series[half:]))
    slope = min((late - early) / (len(values) / 2), 0.0)
    line = late + slope * (np.arange(len(values)) - (half + len(values) - 1) / 2)
    return late, _NORMAL * float(np.median(np.abs(series - line)))
