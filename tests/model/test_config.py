"""Checks of the model config."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megads.errors import ConfigError
from megads.model.config import LayerKind, ModelConfig, MupConfig, NormPlacement, Position
from megads.ops.attention_kinds import AttentionKind


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


ROPE: dict[str, Any] = {"position": Position.rope}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({**ROPE, "rotary_fraction": 0.2}, "model.rotary_fraction takes 3"),
        ({**ROPE, "rotary_fraction": 1.5}, r"model.rotary_fraction = 1.5: must be in \(0, 1\]"),
        ({"rotary_fraction": 0.5}, "model.rotary_fraction = 0.5 sets how many .* model.position = alibi"),
        ({"rotary_interleaved": True}, "model.rotary_interleaved = true sets which"),
        ({"parallel_norms": 2}, "model.parallel_norms = 2: must be 1, or 2 with model.parallel_block=true"),
        ({"parallel_norms": 3, "parallel_block": True}, "model.parallel_norms = 3"),
        ({"norm_placement": NormPlacement.both, "parallel_block": True}, "model.norm_placement = both"),
        ({"head_bias": True}, "model.head_bias = true is not supported with model.tie_embeddings = true"),
        ({"norm_affine": False, "norm_zero_centered": True}, "model.norm_zero_centered = true is about the weights"),
        ({"qkv_clip": 0.0}, "model.qkv_clip = 0.0: must be positive, or null"),
        ({"attention_multiplier": -1.0}, "model.attention_multiplier = -1.0"),
        ({"logit_scale": 0.0}, "model.logit_scale = 0.0: must be positive"),
        ({"residual_multiplier": math.inf}, "model.residual_multiplier = inf"),
        ({"attention_multiplier": 0.1, "mup": MupConfig(32, 1.0, 8)}, "model.mup.base_head_size = 8 both scale"),
        ({"layer_pattern": [LayerKind(layers=2), LayerKind()]}, r"describes 2 \+ 1 layers: .* model.num_layers = 2"),
        ({"layer_pattern": [LayerKind(layers=0)]}, "describes 0 layers"),
        ({"layer_pattern": [LayerKind(), LayerKind(window=-1)]}, r"model.layer_pattern\[1\]: model.window = -1"),
        ({"layer_pattern": [LayerKind(position=Position.learned)]}, "learned positions are added to the embedding"),
        (
            {"layer_pattern": [LayerKind(position=Position.none)], "position": Position.learned},
            "learned positions are added to the embedding",
        ),
        ({**ROPE, "layer_pattern": [LayerKind(rope_theta=-2.0)]}, r"layer_pattern\[0\]: model.rope_theta = -2.0"),
        (
            {"attention": AttentionKind.augmented, "layer_pattern": [LayerKind(), LayerKind(window=9)]},
            r"layer_pattern\[1\]: model.attention = augmented .* model.window = 9",
        ),
        (
            {**ROPE, "layer_pattern": [LayerKind(), LayerKind(attention=AttentionKind.augmented)]},
            r"layer_pattern\[1\]: model.attention = augmented .* does not use ALiBi",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_do_not_fit_are_refused(changes: dict, named: str) -> None:
    """Catches an option that has no effect, contradicts another, or fails later with torch's message."""
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**changes).check()


def test_kinds_of_layers() -> None:
    """Catches a pattern that ends instead of being repeated, unset fields that lose the model's value, a window of 0
    that means the model's, and a kernel that is set for another kind."""
    pattern = [LayerKind(layers=2, window=8, rope_theta=100.0), LayerKind(window=0), LayerKind(position=Position.none)]
    model = ModelConfig(num_layers=7, window=16, layer_pattern=pattern, **ROPE)
    model.check()
    windows = [model.layer(index).window for index in range(7)]
    assert windows == [8, 8, None, 16, 8, 8, None]
    assert [model.layer(index).rope_theta for index in (0, 2, 4)] == [100.0, 10000.0, 100.0]
    assert [model.layer(index).position for index in (0, 3)] == [Position.rope, Position.none]
    assert [count for _, count in model.layer_kinds()] == [4, 2, 1]
    chosen = model.with_attention([AttentionKind.flash, AttentionKind.sdpa, AttentionKind.flex])
    assert [chosen.layer(index).attention.value for index in range(4)] == ["flash", "flash", "sdpa", "flex"]
    equal = ModelConfig().with_attention([AttentionKind.flash])
    assert equal.attention is AttentionKind.flash and equal.layer_kinds() == [(equal, 2)] and equal.layer(1) is equal


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
