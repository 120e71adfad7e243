"""The optimizer's settings: what can train and what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from megads.errors import ConfigError
from megads.optim.config import OptimConfig


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
    ],
)
def test_settings_that_train(settings: dict[str, Any], said: str | None) -> None:
    """Catches a check that refuses what stands at its border, or takes what cannot train."""
    if said is None:
        OptimConfig(**settings).check()
        return
    with pytest.raises(ConfigError, match=said):
        OptimConfig(**settings).check()
