"""The learning rate at the points where it is known in closed form."""

from __future__ import annotations

from typing import Any

import pytest

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.optim.config import OptimConfig, ScheduleConfig, ScheduleName, learning_rate
from megads.runtime.registry import OPTIMIZERS, register_optimizer

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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 1e-9, "min_lr": 1e-9, "betas": [0.0, 0.999], "clip_grad": 0.0}, None),
        ({"lr": 0.0}, "lr > 0"),
        ({"lr": 1.0, "min_lr": 1.1}, "min_lr <= lr"),
        ({"lr": 1.0, "min_lr": -0.1}, "0 <= min_lr"),
        ({"betas": [0.9]}, "want two values"),
        ({"betas": [0.9, 0.9, 0.9]}, "want two values"),
        ({"betas": [0.9, 1.0]}, r"in \[0, 1\)"),
        ({"betas": [-0.1, 0.9]}, r"in \[0, 1\)"),
        ({"clip_grad": -0.5}, "optim.clip_grad = -0.5"),
        ({"name": "mine"}, None),
        ({"name": "mine", "betas": [0.9, 0.9]}, "optim.betas = .* only applies to optim.name=adamw"),
        ({"name": "mine", "eps": 1e-6}, "optim.eps = 1e-06 only applies"),
        ({"name": "lamb", "betas": [0.9, 0.999], "eps": 1e-6, "impl": Implementation.torch}, None),
        ({"name": "lion", "impl": Implementation.torch}, None),
        ({"name": "lion", "betas": [0.9, 0.99]}, "optim.betas = .* lion's decay rates are optim.options.beta1"),
        ({"name": "lion", "eps": 1e-6}, "optim.eps = 1e-06 only applies to optim.name=adamw, lamb and muon"),
    ],
)
def test_settings_that_train(settings: dict[str, Any], said: str | None) -> None:
    """Catches a check that refuses what stands at its border, or takes what cannot train."""
    if said is None:
        OptimConfig(**settings).check()
        return
    with pytest.raises(ConfigError, match=said):
        OptimConfig(**settings).check()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lamb", {"max_ratio": 10}, None),
        ("lamb", {"max_ratio": 0}, "optim.options.max_ratio = 0.0: must be positive"),
        ("lamb", {"maxratio": 10}, "unknown key optim.options.maxratio: did you mean max_ratio"),
        ("lion", {"beta2": 1.0}, r"optim.options.beta2 = 1.0: want values in \[0, 1\)"),
        ("lion", {"beta1": "much"}, "optim.options.beta1"),
        ("adamw", {"beta1": 0.9}, "adamw has no options"),
        ("lions", {}, "no optimizer 'lions': did you mean lion"),
    ],
)
def test_options_of_built_in_optimizers(name: str, options: dict[str, Any], said: str | None) -> None:
    """Catches a setting that is misspelt or impossible and passes in silence."""
    arguments = (name, options, "optim.name", "optim.options")
    if said is None:
        complete = OPTIMIZERS.complete(*arguments)
        assert options.items() <= complete.items()
        typed = [OptimConfig(name=name, options=given).typed_options for given in (options, complete)]
        assert typed[0] == typed[1]
        return
    with pytest.raises(ConfigError, match=said):
        OPTIMIZERS.complete(*arguments)


def test_a_plugin_cannot_take_a_built_in_name() -> None:
    """Catches a plugin's optimizer that is registered and never used."""
    with pytest.raises(ConfigError, match="megads has one of this name"):
        register_optimizer("lion")(lambda options, update: None)


def test_a_decay_follows_the_warmup() -> None:
    """Catches a decay that ends where the warmup does, or before."""
    for warmup, decay in ((0, None), (0, 1), (1000, 1001)):
        ScheduleConfig(warmup_samples=warmup, decay_samples=decay).check()
    for warmup, decay, said in ((-1, None, "must not be negative"), (1000, 1000, "must exceed"), (1000, 9, "exceed")):
        with pytest.raises(ConfigError, match=said):
            ScheduleConfig(warmup_samples=warmup, decay_samples=decay).check()
