"""Settings of validation and generation that are accepted or refused, at the limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megads.errors import ConfigError
from megads.evaluate.config import EvaluationConfig, GenerateConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every_steps": 0, "max_tokens": None}, None),
        ({"every_steps": 1, "max_tokens": 1}, None),
        ({"every_steps": -1}, "evaluation.every_steps = -1: must not be negative"),
        ({"max_tokens": 0}, "evaluation.max_tokens = 0: must be at least 1"),
    ],
)
def test_validation(settings: dict[str, Any], said: str | None) -> None:
    """Catches an interval or a token limit with which validation never runs."""
    if said is None:
        EvaluationConfig(**settings).check()
        return
    with pytest.raises(ConfigError, match=said):
        EvaluationConfig(**settings).check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"max_new_tokens": 1, "batch_size": 1, "temperature": 0.0, "top_k": 0, "seed": 0, "top_p": 1.0}, None),
        ({"prompt": "", "output": "x"}, None),
        ({"prompts": ["a"], "output": "x"}, None),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({"temperature": math.inf}, "temperature = inf: must be a finite number"),
        ({"temperature": -0.1}, "temperature = -0.1: must not be negative"),
        ({"top_k": -1}, "top_k = -1"),
        ({"seed": -1}, "seed = -1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.01}, "top_p = 1.01: must be above 0 and at most 1"),
        ({"prompt": "a", "input": "b"}, "prompt and input are both given"),
        ({"prompts": ["a"], "prompt": ""}, "prompt and prompts are both given"),
        ({"output": "x"}, "output = x: give prompt, prompts or input"),
    ],
)
def test_generation(settings: dict[str, Any], said: str | None) -> None:
    """Catches a number with which nothing is generated, and prompts of which some would be ignored."""
    config = GenerateConfig(run="r", **settings)
    if said is None:
        config.check()
        return
    with pytest.raises(ConfigError, match=said):
        config.check()
