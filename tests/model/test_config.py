"""Checks of the model config."""

from __future__ import annotations

import math

import pytest

from megads.errors import ConfigError
from megads.model.config import ModelConfig


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 0}, "model.num_layers = 0"),
        ({"hidden_size": 0}, "model.hidden_size = 0"),
        ({"num_heads": -1}, "model.num_heads = -1"),
        ({"vocab_size": 0}, "model.vocab_size = 0"),
        ({"max_seq_len": 0}, "model.max_seq_len = 0"),
        ({"hidden_size": 65}, "model.hidden_size = 65"),
        ({"num_kv_heads": 0}, "model.num_kv_heads = 0"),
        ({"num_kv_heads": 3}, "model.num_kv_heads = 3 does not divide model.num_heads = 4"),
        ({"num_kv_heads": 8}, "model.num_kv_heads = 8 does not divide model.num_heads = 4"),
        ({"window": 0}, "model.window = 0"),
        ({"ffn_size": 0}, "model.ffn_size = 0"),
        ({"hidden_dropout": 1.0}, "model.hidden_dropout = 1.0"),
        ({"attention_dropout": -0.1}, "model.attention_dropout = -0.1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_impossible_shapes_are_refused(changes: dict, named: str) -> None:
    """Catches a shape that fails later with torch's message instead of the key's name and value."""
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**changes).check()


def test_derived_sizes() -> None:
    """Catches a wrong head dim, MLP width or BLOOM's sqrt(1 / (3 h)): 0.0048 at 14336."""
    config = ModelConfig(hidden_size=14336, num_heads=112)
    config.check()
    assert (config.head_dim, config.ffn_width) == (128, 57344)
    assert round(config.weight_std, 4) == 0.0048
    assert math.isclose(config.weight_std, math.sqrt(1 / (3 * 14336)))
    assert (config.kv_heads, config.queries_per_kv, config.qkv_width) == (112, 1, 3 * 14336)
    grouped = ModelConfig(hidden_size=64, num_heads=8, num_kv_heads=2)
    assert (grouped.kv_heads, grouped.queries_per_kv, grouped.qkv_width) == (2, 4, 64 + 2 * 16)
    explicit = ModelConfig(ffn_size=100, init_std=0.0)
    assert (explicit.ffn_width, explicit.weight_std) == (100, 0.0)
