"""Small models of every family of transformers that megads knows, with random weights in which every key matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.gpt import GPT

VOCABULARY = 67
BOUND = 3e-5
"""Largest difference of fp32 logits with a standard deviation of up to 2."""
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6,
    "max_position_embeddings": 64,
}  # fmt: skip
_NEOX = {**_SIZES, "intermediate_size": 80}
_LLAMA = {**_NEOX, "num_key_value_heads": 2}
_SLIDING = {**_LLAMA, "sliding_window": 5}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
_MPT = {"vocab_size": VOCABULARY, "d_model": 48, "n_heads": 6, "n_layers": 3}
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 3.0, "beta_slow": 0.5,
    "rope_theta": 500.0,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
_LOCAL = {"rope_type": "default", "rope_theta": 100.0}
_EXPERTS = {**_LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_GLM = {**_LLAMA, "head_dim": 8, "moe_intermediate_size": 20}
CASES: dict[str, list[dict[str, Any]]] = {
    "bloom": [{"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 3, "n_head": 6}],
    "cohere": [{**_LLAMA, "logit_scale": 0.3}, {**_LLAMA, "attention_bias": True, "tie_word_embeddings": False}],
    "falcon": [
        {**_SIZES},
        {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
        {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
        {**_SIZES, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ],
    "gemma": [{**_LLAMA, "head_dim": 10}],
    "gemma2": [{**_SLIDING, "head_dim": 10, "query_pre_attn_scalar": 9}],
    "gemma3_text": [
        {**_SLIDING, "head_dim": 10, "num_hidden_layers": 7},
        {
            **_SLIDING, "head_dim": 8, "final_logit_softcapping": 5.0, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
                "sliding_attention": _LOCAL,
            },
        },
    ],
    "glm4_moe": [
        {**_GLM, "n_routed_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": True},
        {
            **_GLM, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "attention_bias": True,
        },
    ],
    "gpt2": [_GPT2, {**_GPT2, "n_inner": 70, "activation_function": "gelu"}],
    "gpt_neox": [
        {**_NEOX, "rotary_pct": 0.25},
        {**_NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"},
        {**_NEOX, "attention_bias": False, "rotary_pct": 0.5, "hidden_act": "relu", "tie_word_embeddings": True},
    ],
    "gptj": [{**_GPT2, "rotary_dim": 4}],
    "granite": [
        {
            **_LLAMA, "embedding_multiplier": 12.0, "logits_scaling": 0.8, "residual_multiplier": 0.22,
            "attention_multiplier": 0.2, "attention_bias": True,
        },
    ],
    "llama": [
        _LLAMA, {**_LLAMA, "attention_bias": True}, {**_LLAMA, "mlp_bias": True, "head_dim": 10},
        {**_LLAMA, "max_position_embeddings": 12, "rope_parameters": _DYNAMIC},
        {
            **_LLAMA, "rope_parameters": {
                **_LONG, "factor": 4.0, "attention_factor": 1.3, "original_max_position_embeddings": 16,
            },
        },
    ],
    "ministral": [{**_SLIDING, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}],
    "mistral": [_SLIDING],
    "mixtral": [
        {**_LLAMA, "num_local_experts": 4, "head_dim": 10},
        {**_SLIDING, "num_local_experts": 5, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.02},
    ],
    "mpt": [{**_MPT, "attn_config": {"clip_qkv": 0.8}}, {**_MPT, "n_heads": 4, "attn_config": {"softmax_scale": 0.5}}],
    "olmo": [_LLAMA, {**_LLAMA, "clip_qkv": 0.8, "num_key_value_heads": 6}],
    "olmo2": [_LLAMA],
    "olmo3": [
        _SLIDING,
        {**_SLIDING, "rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL | {"rope_theta": 500.0}}},
    ],
    "olmoe": [
        {**_LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.0},
        {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    ],
    "opt": [{**_SIZES, "ffn_dim": 80, "word_embed_proj_dim": 48}],
    "phi": [_LLAMA, {**_LLAMA, "partial_rotary_factor": 0.25}],
    "phi3": [
        _LLAMA, {**_SLIDING, "partial_rotary_factor": 0.5},
        {**_LLAMA, "original_max_position_embeddings": 16, "rope_parameters": _LONG},
    ],
    "qwen2": [_LLAMA, {**_SLIDING, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True}],
    "qwen2_moe": [
        {**_EXPERTS, "shared_expert_intermediate_size": 28},
        {
            **_SLIDING, **_EXPERTS, "shared_expert_intermediate_size": 28, "norm_topk_prob": True, "qkv_bias": False,
            "use_sliding_window": True, "max_window_layers": 3, "mlp_only_layers": [0],
        },
    ],
    "qwen3": [
        {**_LLAMA, "head_dim": 10},
        {**_SLIDING, "head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, "attention_bias": True},
    ],
    "qwen3_moe": [
        {**_EXPERTS, "head_dim": 10, "norm_topk_prob": True, "router_aux_loss_coef": 0.0},
        {**_EXPERTS, "head_dim": 8, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "attention_bias": True},
        {**_SLIDING, **_EXPERTS, "head_dim": 8, "use_sliding_window": True, "mlp_only_layers": [0]},
    ],
    "seed_oss": [{**_LLAMA, "head_dim": 8}, {**_LLAMA, "head_dim": 8, "attention_out_bias": True, "mlp_bias": True}],
    "smollm3": [_LLAMA, {**_LLAMA, "no_rope_layers": [1, 0, 0, 1], "attention_bias": True}],
    "stablelm": [_LLAMA, {**_LLAMA, "use_qkv_bias": True, "partial_rotary_factor": 0.5}],
    "starcoder2": [_SLIDING, {**_LLAMA, "use_bias": False, "num_key_value_heads": 6}],
}  # fmt: skip
"""Settings of transformers' configs, by model_type."""


def odd_case(name: str, tied: bool, vocab_size: int = VOCABULARY) -> dict[str, Any]:
    """The first case of a family with three heads of 24 features, and the head as given."""
    keys = {"num_attention_heads": 3, "n_head": 3, "n_heads": 3, "num_key_value_heads": 3}
    keys |= {"intermediate_size": 90, "ffn_dim": 90}
    keys |= dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 72)
    settings = {key: keys.get(key, value) for key, value in CASES[name][0].items()}
    return settings | {"vocab_size": vocab_size, "tie_word_embeddings": tied}


def their_model(name: str, settings: dict[str, Any]) -> Any:
    """A transformers model in evaluation mode: weights of std 0.2, norms around their usual gain."""
    import transformers

    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(name, **{**tokens, **settings})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    gain = 0.0 if name.startswith("gemma") else 1.0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            norm = key.endswith("weight") and parameter.dim() == 1
            parameter.normal_(gain if norm else 0.0, 0.2)
            if "embed_positions" in key:
                parameter[:2] = 0.0  # not used without padding
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def write_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Saves a model as transformers does, with a tokenizer of as many words."""
    model.save_pretrained(folder, **options)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, "w1")).save(str(folder / "tokenizer.json"))
    return folder


def reloaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' model in a folder, and what it says of missing and unexpected tensors.

    Weights are copied: in a file they may be misaligned, and GEMMs then sum in another order.
    """
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval(), loading


def tokens(seq_len: int = 17) -> Tensor:
    """Token ids, int64 [2, seq_len]."""
    return torch.randint(0, VOCABULARY, (2, seq_len), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def our_logits(model: GPT, ids_bs: Tensor) -> Tensor:
    """Logits of megads' unsharded model, [b, s, v]."""
    return model(ids_bs, BatchInfo(torch.arange(ids_bs.shape[0])))


@torch.no_grad()
def their_logits(model: Any, ids_bs: Tensor) -> Tensor:
    """Logits of transformers' model, [b, s, v]."""
    logits_bsv: Tensor = model(ids_bs).logits
    return logits_bsv


def greedy(model: GPT, ids_bs: Tensor, count: int) -> Tensor:
    """Greedy continuation of each row by full forward passes, [b, s + count]."""
    for _ in range(count):
        ids_bs = torch.cat((ids_bs, our_logits(model, ids_bs)[:, -1:].argmax(-1)), dim=1)
    return ids_bs


def their_greedy(model: Any, ids_bs: Tensor, count: int) -> Tensor:
    """Greedy continuation of each row by transformers, [b, s + count].

    Without its cache for dynamic RoPE scaling: it would keep keys that were rotated by the bases of shorter texts.
    """
    ends: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    scaling = getattr(model.config, "rope_parameters", None) or {}
    cached = scaling.get("rope_type") != "dynamic"
    made: Tensor = model.generate(ids_bs, max_new_tokens=count, do_sample=False, use_cache=cached, **ends)
    return made
