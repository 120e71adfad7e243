"""Tests the learning rate at points where it is known in closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megads.config.root import RootConfig, check_config, learning_rate
from megads.errors import ConfigError
from megads.optim.config import OptimConfig
from megads.optim.schedule import DecayShape, LearningRate, RateScheduleName, ScheduleConfig

BLOOM = OptimConfig(lr=6e-5, min_lr=6e-6)
UNIT = OptimConfig(lr=1.0, min_lr=0.0)


def rate(name: str, warmup: int, end: int, optim: OptimConfig = UNIT, **settings: Any) -> LearningRate:
    schedule = ScheduleConfig(name=name, **settings)
    return LearningRate(optim, schedule, warmup, end, schedule.decay_start_samples)


@pytest.mark.parametrize("name", list(RateScheduleName))
def test_warmup_is_linear_and_starts_above_zero(name: RateScheduleName) -> None:
    """Catches a first step at learning rate 0, which trains nothing, and a warmup counted in steps."""
    found = rate(name, 183_105, 200_000_000, BLOOM)
    assert found(192) == pytest.approx(6e-5 * 192 / 183_105)
    assert found(183_105) == 6e-5


@pytest.mark.parametrize("name", [RateScheduleName.cosine, RateScheduleName.linear])
def test_decays_start_after_warmup_and_end_at_min_lr(name: RateScheduleName) -> None:
    """Catches a decay that starts at 0 instead of the end of the warmup, or rises again after its end."""
    middle = (183_105 + 200_000_001) // 2
    assert rate(name, 183_105, 200_000_001, BLOOM)(middle) == pytest.approx(3.3e-5)
    for samples in (200_000_000, 220_000_000):
        assert rate(name, 183_105, 200_000_000, BLOOM)(samples) == 6e-6


def test_cosine_is_above_linear_early_in_the_decay() -> None:
    """Catches cosine and linear swapped: at a quarter of the decay, cosine is still above linear."""
    assert rate("cosine", 0, 100)(25) == pytest.approx(0.5 * (1 + 0.5**0.5))
    assert rate("linear", 0, 100)(25) == pytest.approx(0.75)


def test_constant_keeps_its_rate_to_the_end() -> None:
    """Catches a constant schedule whose last step trains at min_lr."""
    assert rate("constant", 0, 100, BLOOM)(100) == 6e-5


def test_a_run_may_end_during_warmup() -> None:
    """Catches a division by zero or by a negative number when the run ends during warmup."""
    assert rate("cosine", 100, 50, BLOOM)(50) == pytest.approx(3e-5)
    assert rate("cosine", 100, 50, BLOOM)(100) == 6e-5
    assert rate("cosine", 100, 50, BLOOM)(101) == 6e-6


def test_inverse_square_root_counts_from_the_start() -> None:
    """Catches a rate that counts steps from the end of the warmup, and one below min_lr.

    Vaswani et al. 2017, section 5.3: d^-0.5 * min(step^-0.5, step * warmup^-1.5) is the peak at the warmup's end.
    """
    warmup, peak = 4000, 512**-0.5 * 4000**-0.5
    found = rate("inverse_sqrt", warmup, 100_000, OptimConfig(lr=peak, min_lr=peak / 4))
    for step in (1, 1000, 4000, 16_000, 63_999):
        assert found(step) == pytest.approx(512**-0.5 * min(step**-0.5, step * warmup**-1.5))
    assert found(64_000) == found(10**9) == pytest.approx(peak / 4)


@pytest.mark.parametrize(
    ("shape", "half"),
    [("minus_sqrt", 1 - math.sqrt(0.5)), ("linear", 0.5), ("cosine", 0.5), ("exponential", math.sqrt(2) - 1)],
)
def test_wsd_decays_in_its_last_share(shape: str, half: float) -> None:
    """Catches a decay that begins at the end of the warmup, swapped shapes, and a final rate other than min_lr."""
    optim = OptimConfig(lr=2.0, min_lr=1.0)
    found = rate("wsd", 100, 1100, optim, decay_share=0.2, decay_shape=DecayShape(shape))
    assert [found(samples) for samples in (50, 100, 500, 900)] == [1.0, 2.0, 2.0, 2.0]
    assert found(1000) == pytest.approx(1 + half) and found(1100) == found(5000) == 1.0
    assert all(found(at) > found(at + 1) for at in range(900, 1100))


def test_wsd_decays_from_the_given_start() -> None:
    """Catches a branch of a stable run that decays from decay_share of the run instead of from its checkpoint."""
    found = rate("wsd", 100, 1100, decay_start_samples=1000, decay_shape=DecayShape.linear)
    assert [found(samples) for samples in (900, 1000, 1050, 1100)] == [1.0, 1.0, 0.5, 0.0]
    never = rate("wsd", 100, 1100, decay_share=0.0)
    assert never(1100) == never(9999) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_warm_restarts_decay_and_restart_at_the_peak(name: str) -> None:
    """Catches cycles that do not decay to min_lr, or do not restart at the peak."""
    found, one = rate(name, 10, 310, cycles=3), rate(name, 10, 110)
    for cycle in range(3):
        for samples in range(11, 111):
            assert found(samples + 100 * cycle) == pytest.approx(one(samples))
    assert found(10) == 1.0 and [found(end) for end in (110, 210, 310, 400)] == [0.0, 0.0, 0.0, 0.0]
    assert found(111) > 0.99 * one(11)


def config_with(**settings: Any) -> RootConfig:
    config = RootConfig()
    config.train = replace(config.train, steps=1000, global_batch_size=8, seq_len=128)
    config.model.vocab_size, config.data.raw = 512, "notes"
    config.schedule = ScheduleConfig(**settings)
    return config


def test_steps_samples_and_tokens_mean_the_same_warmup() -> None:
    """Catches a warmup or decay in steps or tokens that is converted to a wrong number of samples."""
    wanted = learning_rate(config_with(warmup_samples=80, decay_samples=4000))
    for settings in ({"warmup_steps": 10, "decay_steps": 500}, {"warmup_tokens": 10_240, "decay_tokens": 512_000}):
        found = learning_rate(config_with(**settings))
        assert (found.warmup, found.end) == (wanted.warmup, wanted.end) == (80, 4000)
    ramped = config_with(warmup_steps=10)
    ramped.train.batch_ramp.start, ramped.train.batch_ramp.increment, ramped.train.batch_ramp.samples = 4, 4, 20
    assert learning_rate(ramped).warmup == 5 * 4 + 5 * 8


def test_a_share_warms_up_for_that_part_of_the_schedule() -> None:
    """Catches a share of the run instead of the schedule, or of samples where tokens are the clock, one that is rounded
    to no warmup, and one that samples override."""
    assert learning_rate(config_with(warmup_samples=80, warmup_share=0.05)).warmup == 400
    assert learning_rate(config_with(warmup_share=0.05, decay_steps=500)).warmup == 200
    assert learning_rate(config_with(warmup_share=1e-9)).warmup == 1
    assert learning_rate(config_with(warmup_samples=80, warmup_share=0.0)).warmup == 0
    longer = config_with(warmup_share=0.5)
    longer.train.keep_batch_tokens = True
    longer.train.phases = [{"until_steps": 500}, {"train": {"seq_len": 256}}]
    assert learning_rate(longer).warmup == 4000, "half of the tokens: 8 samples of 128 tokens a step, then 4 of 256"
    own = config_with()
    own.train.phases = [{"until_steps": 500}, {"schedule": {"name": "constant", "warmup_share": 0.25}}]
    [piece] = learning_rate(own).later
    assert (piece.begin, piece.warmup) == (4000, 1000)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_samples": 7999}, None),
        ({"warmup_samples": 1000, "decay_samples": 1001}, None),
        ({"name": "wsd", "decay_start_samples": 7999}, None),
        ({"name": "linear", "cycles": 4}, None),
        ({"name": "inverse_sqrt", "warmup_steps": 1}, None),
        ({"warmup_samples": -1}, "schedule.warmup_samples = -1: must be at least 0"),
        ({"decay_steps": 0}, "schedule.decay_steps = 0: must be at least 1"),
        ({"warmup_samples": 1000, "decay_samples": 1000}, "schedule.decay_samples = 1000: the decay must end after"),
        ({"warmup_steps": 10, "decay_tokens": 1000}, "schedule.decay_tokens = 1000: .* schedule.warmup_steps = 10"),
        ({"warmup_samples": 9000, "warmup_steps": 10, "decay_samples": 1, "decay_tokens": 1_000_000}, None),
        ({"warmup_steps": 10, "warmup_tokens": 1000}, "warmup_tokens = 1000 and schedule.warmup_steps = 10: give one"),
        ({"name": "inverse_sqrt", "warmup_share": 0.5}, None),
        ({"warmup_share": 0.999, "decay_samples": 1}, None),
        ({"warmup_share": 1.0}, "schedule.warmup_share = 1.0: must be at least 0 and below 1"),
        ({"warmup_share": -0.1}, "schedule.warmup_share = -0.1: must be"),
        ({"warmup_share": 0.1, "warmup_steps": 10}, "warmup_steps = 10 and schedule.warmup_share = 0.1: give one"),
        ({"name": "inverse_sqrt", "warmup_samples": 320, "warmup_share": 0.0}, "inverse_sqrt without a warmup"),
        ({"name": "wsd", "warmup_share": 0.5, "decay_start_samples": 3999}, "decay_start_samples = 3,999: the decay"),
        ({"cycles": 0}, "schedule.cycles = 0"),
        ({"name": "wsd", "cycles": 2}, "cycles = 2 only applies to schedule.name=cosine and linear"),
        ({"decay_share": 0.5}, "decay_share = 0.5 only applies to schedule.name=wsd"),
        ({"decay_from": "a"}, "decay_from = a only applies"),
        ({"name": "wsd", "decay_share": 1.5}, "schedule.decay_share = 1.5"),
        ({"name": "wsd", "decay_start_samples": -1}, "decay_start_samples = -1"),
        ({"name": "wsd", "decay_start_samples": 8000}, "decay_start_samples = 8,000: the decay must start between"),
        ({"name": "wsd", "warmup_samples": 9, "decay_start_samples": 8}, "decay_start_samples = 8: the decay must"),
        ({"name": "inverse_sqrt"}, "inverse_sqrt without a warmup"),
        ({"name": "inverse_sqrt", "warmup_samples": 320, "warmup_steps": 0}, "inverse_sqrt without a warmup"),
    ],
)
def test_valid_schedules_pass_and_others_are_refused(settings: dict[str, Any], said: str | None) -> None:
    """Catches a check that refuses boundary values, or accepts settings that define no schedule."""
    if said is None:
        check_config(config_with(**settings))
        return
    with pytest.raises(ConfigError, match=said):
        check_config(config_with(**settings))
