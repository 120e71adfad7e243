"""The global batch size as a function of the samples consumed: constant, or Megatron's ramp."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from megads.errors import ConfigError


@dataclass(frozen=True)
class _ConstantBatch:
    """Consecutive steps with one batch size; the last span has no end."""

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Increases the batch size from `start` by `increment`; each size lasts an equal share of `ramp_samples`.

    Attributes:
        global_batch_size: samples per step after the ramp.
        start: samples in the first step; 0 disables the ramp.
        increment: samples added at each increase.
        ramp_samples: samples during which the batch size grows.
        changes: (first sample, size) of every training phase, in whole steps; empty if no phase changes the batch size.

    Raises:
        ConfigError: the sizes do not form a ramp.
    """

    global_batch_size: int
    start: int = 0
    increment: int = 1
    ramp_samples: int = 0
    changes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ConfigError(f"train.global_batch_size = {self.global_batch_size}: must be at least 1")
        if self.start == 0:
            return
        if not 0 < self.start <= self.global_batch_size:
            raise ConfigError(
                f"train.batch_ramp.start = {self.start}: must be above 0 and at most train.global_batch_size = "
                f"{self.global_batch_size}; 0 switches the ramp off"
            )
        if self.increment < 1 or (self.global_batch_size - self.start) % self.increment:
            raise ConfigError(
                f"train.batch_ramp.increment = {self.increment}: must divide the {self.global_batch_size - self.start} "
                f"samples between train.batch_ramp.start = {self.start} and train.global_batch_size = "
                f"{self.global_batch_size}"
            )
        if self._num_increments and self.ramp_samples < 1:
            raise ConfigError(f"train.batch_ramp.samples = {self.ramp_samples}: the ramp needs at least 1")

    @property
    def _num_increments(self) -> int:
        return (self.global_batch_size - self.start) // self.increment if self.start else 0

    def at(self, samples_consumed: int) -> int:
        """Returns the size of the step that starts after this many samples."""
        if self.changes:
            return self.changes[bisect_right(self.changes, samples_consumed, key=lambda change: change[0]) - 1][1]
        if self._num_increments == 0 or samples_consumed > self.ramp_samples:
            return self.global_batch_size
        # Floating-point division as in Megatron, since its rounding determines where the size changes.
        per_increment = self.ramp_samples / self._num_increments
        return self.start + int(samples_consumed / per_increment) * self.increment

    def samples_after(self, steps: int) -> int:
        """Returns the number of samples consumed by the first `steps` steps."""
        span = self._spans[bisect_right(self._spans, steps, key=lambda span: span.first_step) - 1]
        return span.first_sample + (steps - span.first_step) * span.size

    def steps_for(self, samples: int) -> int:
        """Returns the number of complete steps in `samples` samples, as Megatron counts iterations."""
        span = self._spans[bisect_right(self._spans, samples, key=lambda span: span.first_sample) - 1]
        return span.first_step + (samples - span.first_sample) // span.size

    def check(self, micro_batch_size: int, dp: int) -> None:
        """Checks that all batch sizes divide into micro-batches.

        Args:
            micro_batch_size: samples in one forward pass of one rank.
            dp: number of data-parallel ranks.

        Raises:
            ConfigError: micro_batch_size * dp does not divide a size; the message names the first one.
        """
        block = micro_batch_size * dp
        for size in range(self.start or self.global_batch_size, self.global_batch_size + 1, self.increment):
            if size % block:
                name = "train.global_batch_size" if size == self.global_batch_size else "a step of train.batch_ramp"
                raise ConfigError(
                    f"{name} = {size} samples is not divisible by train.micro_batch_size * parallel.dp = "
                    f"{micro_batch_size} * {dp} = {block}: every replica takes an equal number of micro-batches; "
                    "change one of the three"
                )

    @cached_property
    def _spans(self) -> list[_ConstantBatch]:
        if self.changes:
            return self._spans_of_changes
        spans, step, sample = [], 0, 0
        while True:
            size = self.at(sample)
            spans.append(_ConstantBatch(step, sample, size))
            if size == self.global_batch_size:
                return spans
            rises = (size - self.start) // self.increment + 1
            # An estimate, corrected by `at`, which rounds.
            steps = max(1, int((rises * self.ramp_samples / self._num_increments - sample) / size) - 1)
            while self.at(sample + steps * size) == size:
                steps += 1
            step, sample = step + steps, sample + steps * size

    @property
    def _spans_of_changes(self) -> list[_ConstantBatch]:
        spans: list[_ConstantBatch] = []
        for sample, size in self.changes:
            before = spans[-1] if spans else _ConstantBatch(0, 0, size)
            spans.append(
                _ConstantBatch(before.first_step + (sample - before.first_sample) // before.size, sample, size)
            )
        return spans
