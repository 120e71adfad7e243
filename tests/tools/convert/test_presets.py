"""Model presets against the config.json of the published models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megads.model.config import MLPKind, ModelConfig
from megads.tools.convert.architecture import effective
from megads.tools.convert.architectures import architecture_of
from tests.test_conf import compose_train

_NEOX = {
    "model_type": "gpt_neox", "max_position_embeddings": 2048, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
}  # fmt: skip
_OLMO = {
    "model_type": "olmo", "vocab_size": 50304, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "hidden_act": "silu", "clip_qkv": None, "attention_bias": False,
}  # fmt: skip


def _sizes(layers: int, width: int, heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn}
    return sizes | others


PUBLISHED: dict[str, dict[str, Any]] = {
    "pythia_160m": _NEOX | _sizes(12, 768, 12, 3072, vocab_size=50304),
    "pythia_410m": _NEOX | _sizes(24, 1024, 16, 4096, vocab_size=50304),
    "pythia_2_8b": _NEOX | _sizes(32, 2560, 32, 10240, vocab_size=50304),
    "pythia_6_9b": _NEOX | _sizes(32, 4096, 32, 16384, vocab_size=50432),
    "gpt_neox_20b": _NEOX | _sizes(44, 6144, 64, 24576, vocab_size=50432, hidden_act="gelu_fast"),
    "olmo_1b": _OLMO | _sizes(16, 2048, 16, 8192, num_key_value_heads=16, tie_word_embeddings=True),
    "olmo_7b": _OLMO | _sizes(32, 4096, 32, 11008, num_key_value_heads=32, tie_word_embeddings=False),
    "olmo3_7b": _sizes(
        32, 4096, 32, 11008, model_type="olmo3", num_key_value_heads=32, vocab_size=100278, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=500000, attention_bias=False, max_position_embeddings=8192, sliding_window=4096,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
    ),
    "stablelm_3b": _sizes(
        32, 2560, 32, 6912, model_type="stablelm", num_key_value_heads=32, vocab_size=50304, hidden_act="silu",
        layer_norm_eps=1e-5, max_position_embeddings=4096, partial_rotary_factor=0.25, rope_theta=10000,
        tie_word_embeddings=False, use_qkv_bias=False,
    ),
    "smollm3_3b": _sizes(
        36, 2048, 16, 11008, model_type="smollm3", num_key_value_heads=4, vocab_size=128256, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=50000.0, max_position_embeddings=4096, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "gemma3_1b": _sizes(
        26, 1152, 4, 6912, model_type="gemma3_text", num_key_value_heads=1, head_dim=256, vocab_size=262144,
        hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, rope_theta=1000000, rope_local_base_freq=10000,
        rope_scaling=None, query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6,
        attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False, max_position_embeddings=32768,
    ),
    "qwen2_5_0_5b": _sizes(
        24, 896, 14, 4864, model_type="qwen2", num_key_value_heads=2, vocab_size=151936, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=32768, max_window_layers=24,
        sliding_window=32768, use_sliding_window=False, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""config.json of the published models: that of SmolLM3's first three stages and of OLMo 3's pretraining."""
OF_TRAINING = {"hidden_dropout", "attention_dropout", "attention", "init_std", "max_seq_len"}


@pytest.mark.always
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name: str) -> None:
    """Catches a preset that computes another model with as many parameters: a window, RoPE base, share of rotated
    features, layer pattern or activation that is not the published one."""
    content = PUBLISHED[name]
    published, preset = architecture_of(content).model_of(content), compose_train(f"model={name}").model
    if content["model_type"] == "gpt_neox":
        # GPT-NeoX's fused kernel, with which they were trained, is the tanh approximation.
        published = dataclasses.replace(published, mlp=MLPKind.gelu)
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - OF_TRAINING - {"layer_pattern"}
    different = {f: (effective(preset, f), effective(published, f)) for f in fields}
    assert {f: pair for f, pair in different.items() if pair[0] != pair[1]} == {}
    layers = [[model.layer(index) for index in range(model.num_layers)] for model in (preset, published)]
    for ours, theirs in zip(*layers, strict=True):
        for field in ("window", "position", "rope_theta", "rope_scaling"):
            assert getattr(ours, field) == getattr(theirs, field), field
