"""Model presets against the config.json of the published models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megads.model.config import MLPKind, ModelConfig
from megads.tools.convert.architecture import effective
from megads.tools.convert.architectures import architecture_of
from megads.tools.convert.weights import links, shapes_of, tensor_shapes
from tests.test_conf import compose_train

transformers = pytest.importorskip("transformers")

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


PRESETS: dict[str, dict[str, Any]] = {
    "llama3_8b": _sizes(
        32, 4096, 32, 14336, model_type="llama", num_key_value_heads=8, vocab_size=128256, hidden_act="silu",
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, max_position_embeddings=8192, attention_bias=False,
        tie_word_embeddings=False,
    ),
    "qwen3_0_6b": _sizes(
        28, 1024, 16, 3072, model_type="qwen3", num_key_value_heads=8, head_dim=128, vocab_size=151936,
        hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, rope_scaling=None, max_position_embeddings=32768,
        attention_bias=False, max_window_layers=28, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=True,
    ),
    "olmo2_1b": _sizes(
        16, 2048, 16, 8192, model_type="olmo2", num_key_value_heads=16, vocab_size=100352, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=500000, rope_scaling=None, max_position_embeddings=4096, attention_bias=False,
        tie_word_embeddings=False,
    ),
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
    "gptj_6b": {
        "model_type": "gptj", "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
        "n_positions": 2048, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
        "tie_word_embeddings": False, "vocab_size": 50400,
    },
    "falcon_7b": _sizes(
        32, 4544, 71, 18176, model_type="falcon", alibi=False, apply_residual_connection_post_layernorm=False,
        attention_dropout=0.0, bias=False, hidden_dropout=0.0, layer_norm_epsilon=1e-5, multi_query=True,
        new_decoder_architecture=False, num_kv_heads=71, parallel_attn=True, vocab_size=65024,
    ),
    "mpt_7b": {
        "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048,
        "vocab_size": 50432, "emb_pdrop": 0, "resid_pdrop": 0, "embedding_fraction": 1.0, "learned_pos_emb": True,
        "logit_scale": None, "no_bias": True, "norm_type": "low_precision_layernorm", "verbose": 0,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False, "qk_ln": False,
            "softmax_scale": None,
        },
    },
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
OTHERS: dict[str, dict[str, Any]] = {
    "bloom-560m": {
        "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880,
        "seq_length": 2048, "offset_alibi": 100, "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-5, "skip_bias_add": True, "slow_but_exact": False,
    },
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    },
    "opt-125m": _sizes(
        12, 768, 12, 3072, model_type="opt", ffn_dim=3072, _remove_final_layer_norm=False, activation_dropout=0.0,
        activation_function="relu", attention_dropout=0.0, do_layer_norm_before=True, dropout=0.1, init_std=0.02,
        layerdrop=0.0, max_position_embeddings=2048, prefix="</s>", vocab_size=50272, word_embed_proj_dim=768,
    ),
    "falcon-40b": _sizes(
        60, 8192, 128, 32768, model_type="falcon", alibi=False, bias=False, layer_norm_epsilon=1e-5, multi_query=True,
        new_decoder_architecture=True, num_kv_heads=8, parallel_attn=True, vocab_size=65024,
    ),
    "phi-2": _sizes(
        32, 2560, 32, 10240, model_type="phi", num_key_value_heads=32, attention_dropout=0.0, embd_pdrop=0.0,
        resid_pdrop=0.1, hidden_act="gelu_new", layer_norm_eps=1e-5, max_position_embeddings=2048,
        partial_rotary_factor=0.4, qk_layernorm=False, rope_scaling=None, rope_theta=10000.0,
        tie_word_embeddings=False, vocab_size=51200,
    ),
    "phi-3-mini-4k": _sizes(
        32, 3072, 32, 8192, model_type="phi3", num_key_value_heads=32, attention_bias=False, embd_pdrop=0.0,
        resid_pdrop=0.0, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=4096, pad_token_id=32000,
        original_max_position_embeddings=4096, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
        tie_word_embeddings=False, vocab_size=32064,
    ),
    "gemma-2b": _sizes(
        18, 2048, 8, 16384, model_type="gemma", num_key_value_heads=1, head_dim=256, attention_bias=False,
        hidden_act="gelu", max_position_embeddings=8192, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000.0,
        vocab_size=256000,
    ),
    "gemma-2-2b": _sizes(
        26, 2304, 8, 9216, model_type="gemma2", num_key_value_heads=4, head_dim=256, attention_bias=False,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid",
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
    ),
    "llama-3.2-1b": _sizes(
        16, 2048, 32, 8192, model_type="llama", num_key_value_heads=8, head_dim=64, attention_bias=False,
        mlp_bias=False, hidden_act="silu", max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling={
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True, vocab_size=128256,
    ),
    "mistral-7b-v0.1": _sizes(
        32, 4096, 32, 14336, model_type="mistral", num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-5,
        max_position_embeddings=32768, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False,
        vocab_size=32000,
    ),
    "granite-3.0-2b": _sizes(
        40, 2048, 32, 8192, model_type="granite", num_key_value_heads=8, attention_bias=False, attention_dropout=0.1,
        attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
        hidden_act="silu", max_position_embeddings=4096, mlp_bias=False, rms_norm_eps=1e-5, rope_theta=10000,
        tie_word_embeddings=True, vocab_size=49152,
    ),
    "command-r": _sizes(
        40, 8192, 64, 22528, model_type="cohere", num_key_value_heads=64, attention_bias=False, hidden_act="silu",
        layer_norm_eps=1e-5, logit_scale=0.0625, max_position_embeddings=8192, model_max_length=131072,
        rope_theta=8000000.0, vocab_size=256000,
    ),
    "starcoder2-3b": _sizes(
        30, 3072, 24, 12288, model_type="starcoder2", num_key_value_heads=2, attention_dropout=0.1,
        embedding_dropout=0.1, residual_dropout=0.1, hidden_act="gelu_pytorch_tanh", max_position_embeddings=16384,
        mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm", rope_theta=999999.4420358813,
        sliding_window=4096, use_bias=True, vocab_size=49152,
    ),
    "stablelm-2-1.6b": _sizes(
        24, 2048, 32, 5632, model_type="stablelm", num_key_value_heads=32, hidden_act="silu", layer_norm_eps=1e-5,
        max_position_embeddings=4096, partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False,
        use_qkv_bias=True, vocab_size=100352,
    ),
    "seed-oss-36b": _sizes(
        64, 5120, 80, 27648, model_type="seed_oss", num_key_value_heads=8, head_dim=128, attention_bias=True,
        attention_out_bias=False, attention_dropout=0.1, residual_dropout=0.1, mlp_bias=False, hidden_act="silu",
        max_position_embeddings=524288, rms_norm_eps=1e-6, rope_scaling={"rope_type": "default"}, rope_theta=1e7,
        tie_word_embeddings=False, vocab_size=155136,
    ),
}  # fmt: skip
"""config.json of published models without a preset: the keys that describe the model, older names included."""
OF_TRAINING = {"hidden_dropout", "attention_dropout", "attention", "init_std", "max_seq_len"}


@pytest.mark.always
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_model(name: str) -> None:
    """Catches a preset that computes another model with as many parameters: a window, RoPE base, share of rotated
    features, layer pattern or activation that is not the published one."""
    content = PRESETS[name]
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


@pytest.mark.parametrize("name", (PRESETS | OTHERS).keys())
def test_a_published_model_has_the_tensors_of_transformers(name: str) -> None:
    """Catches a published config.json that is refused, and a model with other tensors, or of other shapes, than its
    files have, which a small model of the family does not show."""
    content = (PRESETS | OTHERS)[name]
    config = transformers.AutoConfig.for_model(**content)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.tie_weights()
    wanted = {key: tuple(parameter.shape) for key, parameter in theirs.named_parameters()}
    architecture = architecture_of(content)
    model = architecture.model_of(content)
    if "lm_head.weight" in wanted:  # GPT-NeoX's has another name in its files
        wanted[f"{architecture.names_of(model).head}.weight"] = wanted.pop("lm_head.weight")
    ours: dict[str, tuple[int, ...]] = {}
    shapes = shapes_of(model, architecture.names_of(model))
    for link in links(model, architecture.names_of(model)):
        ours |= tensor_shapes(shapes, link)
    assert ours == wanted
