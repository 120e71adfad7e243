"""Tests which settings of the optimizer are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.optim.config import GroupConfig, OptimConfig
from megads.runtime.registry import OPTIMIZERS, register_optimizer


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
        ({"ema_decay": 0.9999}, None),
        ({"ema_decay": 1.0}, "optim.ema_decay = 1.0: want a value between 0 and 1"),
        ({"ema_decay": 0.0}, "optim.ema_decay = 0.0"),
        ({"groups": [GroupConfig("*.bias", lr_scale=0.0)]}, None),
        ({"groups": [GroupConfig("*.bias", lr_scale=2), GroupConfig("a")]}, r"optim.groups\[1\], 'a', changes nothing"),
        ({"groups": [GroupConfig(lr_scale=2.0)]}, r"optim.groups\[0\] has no pattern"),
        ({"groups": [GroupConfig("a", lr_scale=-1.0)]}, r"optim.groups\[0\].lr_scale = -1.0: want a finite number"),
        ({"groups": [GroupConfig("a", weight_decay=float("nan"))]}, r"optim.groups\[0\].weight_decay = nan"),
        ({"name": "mine"}, None),
        ({"name": "mine", "betas": [0.9, 0.9]}, "optim.betas = .* only applies to optim.name=adamw"),
        ({"name": "mine", "eps": 1e-6}, "optim.eps = 1e-06 only applies"),
        ({"name": "lamb", "betas": [0.9, 0.999], "eps": 1e-6, "impl": Implementation.torch}, None),
        ({"name": "lion", "impl": Implementation.torch}, None),
        ({"name": "lion", "betas": [0.9, 0.99]}, "optim.betas = .* lion's decay rates are optim.options.beta1"),
        ({"name": "lion", "eps": 1e-6}, "optim.eps = 1e-06 only applies to optim.name=adamw, lamb and muon"),
    ],
)
def test_settings_that_can_train_pass_and_others_are_refused(settings: dict[str, Any], said: str | None) -> None:
    """Catches a check that refuses a value at its bound, or accepts one that cannot train."""
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
def test_wrong_options_of_built_in_optimizers_are_refused(name: str, options: dict[str, Any], said: str | None) -> None:
    """Catches a misspelt or impossible setting that is accepted without a message."""
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
    """Catches a plugin's optimizer that is registered under a built-in name and never used."""
    with pytest.raises(ConfigError, match="megads has one of this name"):
        register_optimizer("lion")(lambda options, update: None)
