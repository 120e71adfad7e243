"""The learning rate at the points where it is known in closed form."""

from __future__ import annotations

import pytest

from megads.optim.config import OptimConfig, ScheduleConfig, ScheduleName, learning_rate

BLOOM = OptimConfig(lr=6e-5, min_lr=6e-6)


def schedule(name: ScheduleName, warmup: int = 183_105) -> ScheduleConfig:
    return ScheduleConfig(name=name, warmup_samples=warmup)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_warmup_is_linear_and_starts_above_zero(name: ScheduleName) -> None:
    """Catches a first step at rate 0 (a step that trains nothing) and a warmup counted in steps."""
    assert learning_rate(192, BLOOM, schedule(name), 200_000_000) == pytest.approx(6e-5 * 192 / 183_105)
    assert learning_rate(183_105, BLOOM, schedule(name), 200_000_000) == 6e-5


@pytest.mark.parametrize("name", [ScheduleName.cosine, ScheduleName.linear])
def test_middle_and_end(name: ScheduleName) -> None:
    """Catches a decay that starts at 0 instead of the end of the warmup, or rises again after its end."""
    middle = (183_105 + 200_000_001) // 2
    assert learning_rate(middle, BLOOM, schedule(name), 200_000_001) == pytest.approx(3.3e-5)
    for samples in (200_000_000, 220_000_000):
        assert learning_rate(samples, BLOOM, schedule(name), 200_000_000) == 6e-6


def test_shapes_differ() -> None:
    """Catches cosine and linear exchanged: at a quarter of the decay cosine is still above linear."""
    cosine = learning_rate(25, OptimConfig(lr=1.0), schedule(ScheduleName.cosine, 0), 100)
    linear = learning_rate(25, OptimConfig(lr=1.0), schedule(ScheduleName.linear, 0), 100)
    assert cosine == pytest.approx(0.5 * (1 + 0.5**0.5)) and linear == pytest.approx(0.75)


def test_constant_stays() -> None:
    """Catches a constant schedule whose last step trains at min_lr."""
    assert learning_rate(100, BLOOM, schedule(ScheduleName.constant, 0), 100) == 6e-5


def test_training_shorter_than_warmup() -> None:
    """Catches a division by zero or a negative one when the run ends inside the warmup."""
    assert learning_rate(50, BLOOM, schedule(ScheduleName.cosine, 100), 50) == pytest.approx(3e-5)
    assert learning_rate(100, BLOOM, schedule(ScheduleName.cosine, 100), 100) == 6e-5
    assert learning_rate(101, BLOOM, schedule(ScheduleName.cosine, 100), 100) == 6e-6
