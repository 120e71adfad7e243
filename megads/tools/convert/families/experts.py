"""Mixtures of experts with Llama's other modules: Mixtral, OLMoE, Qwen's, GLM-4.5.

The hub stores every expert's projections as tensors of their own; `separate_experts` reads the stacked tensors that
transformers 5 has in memory and can save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megads.api import QKNormWidth, RouterScore
from megads.tools.convert.architecture import Architecture, Content, Flag, Number, share_of_hidden
from megads.tools.convert.families.llama import (
    ATTENTION_BIAS,
    HEAD_NORMS,
    NAMES,
    SILU,
    QwenLayers,
    numbers,
)
from megads.tools.convert.layer_maps import BiasedExperts, QwenExpertLayers, WindowIfUsed
from megads.tools.convert.weights import STATE_OF_BIAS

_EXPERTS = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down": ("mlp.experts.{}.down_proj",),
}
_SHARED = {
    "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}
_MIXTRAL_EXPERTS = {
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
}
_NORMALIZED = Flag("norm_topk_prob", ("moe.normalize_weights",))


def _expert_numbers(keys: tuple[str, ...], count: int, top_k: int, width: Number, loss: float) -> tuple[Number, ...]:
    """Number of experts, of those of a token, their width, and the coefficient of the balance loss.

    The coefficient is passed on as it is. No coefficient makes the losses equal: transformers multiplies the choices
    and scores of all layers together (docs/hugging-face.md).
    """
    return (
        Number("moe.num_experts", keys, default=count),
        Number("moe.top_k", ("num_experts_per_tok",), default=top_k),
        width,
        Number("moe.global_loss", ("router_aux_loss_coef",), float, loss),
    )


_WIDTH = Number("moe.expert_ffn_size", ("intermediate_size",))
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", replace(NAMES, block={**NAMES.block, **_MIXTRAL_EXPERTS}), {},
    numbers(
        Number("window", ("sliding_window",), default=None),
        *_expert_numbers(("num_local_experts", "num_experts"), 8, 2, _WIDTH, 0.001),
        without=("ffn_size",), num_kv_heads=8, max_seq_len=131072, norm_eps=1e-5, rope_theta=1e6,
    ),
    SILU, fixed={"router_jitter_noise": 0.0},
)  # fmt: skip
OLMOE = Architecture(
    "olmoe", "OlmoeForCausalLM", replace(NAMES, block={**NAMES.block, **HEAD_NORMS, **_EXPERTS}),
    {"qk_norm": True, "qk_norm_width": QKNormWidth.full, "head_size": share_of_hidden},
    numbers(
        *_expert_numbers(("num_experts", "num_local_experts"), 64, 8, _WIDTH, 0.01),
        without=("ffn_size", "head_size"), max_seq_len=4096, norm_eps=1e-5,
    ),
    # transformers clips after the norms of queries and keys, megads before them.
    SILU, flags=(ATTENTION_BIAS, _NORMALIZED), fixed={"clip_qkv": None},
)  # fmt: skip


def _even_layers_slide(content: Content, index: int) -> bool:
    first: int = Number("", ("max_window_layers",), default=28).read(content)
    return bool(content.get("use_sliding_window")) and index % 2 == 0 and index < first


def _qwen(width: int) -> Number:
    return Number("moe.expert_ffn_size", ("moe_intermediate_size",), default=width)


_QWEN: dict[str, Any] = {"experts_of_layers": QwenExpertLayers()}
QWEN2_MOE = Architecture(
    "qwen2_moe", "Qwen2MoeForCausalLM", replace(NAMES, block={**NAMES.block, **_EXPERTS, **_SHARED}),
    {"moe.shared_gate": True, "head_size": share_of_hidden},
    numbers(
        *_expert_numbers(("num_experts", "num_local_experts"), 60, 4, _qwen(1408), 0.001),
        Number("moe.shared_ffn_size", ("shared_expert_intermediate_size",), default=5632),
        without=("head_size",), num_kv_heads=16, max_seq_len=32768,
    ),
    SILU, flags=(Flag("qkv_bias", ("qkv_bias",), default=True), _NORMALIZED),
    translation=QwenLayers(_even_layers_slide), **_QWEN,
)  # fmt: skip
QWEN3_MOE = Architecture(
    "qwen3_moe", "Qwen3MoeForCausalLM", replace(NAMES, block={**NAMES.block, **HEAD_NORMS, **_EXPERTS}),
    {"qk_norm": True},
    numbers(
        *_expert_numbers(("num_experts", "num_local_experts"), 128, 8, _qwen(768), 0.001),
        num_kv_heads=4, max_seq_len=32768,
    ),
    SILU, flags=(ATTENTION_BIAS, _NORMALIZED), translation=WindowIfUsed(), **_QWEN,
)  # fmt: skip
_GLM_EXPERTS = {
    **_EXPERTS,
    **{name: tuple(part.replace("shared_expert.", "shared_experts.") for part in parts)
       for name, parts in _SHARED.items() if name != "mlp.shared_gate"},
    STATE_OF_BIAS: ("mlp.gate.e_score_correction_bias",),
}  # fmt: skip
GLM4_MOE = Architecture(
    "glm4_moe", "Glm4MoeForCausalLM", replace(NAMES, block={**NAMES.block, **HEAD_NORMS, **_GLM_EXPERTS}),
    {"moe.score": RouterScore.sigmoid},
    numbers(
        Number("rotary_fraction", ("partial_rotary_factor",), float, 0.5),
        Number("moe.num_experts", ("n_routed_experts", "num_local_experts"), default=128),
        Number("moe.top_k", ("num_experts_per_tok",), default=8),
        _qwen(1408),
        Number("moe.routed_scale", ("routed_scaling_factor",), float, 1.0),
        Number("moe.num_groups", ("n_group",), default=1),
        Number("moe.top_groups", ("topk_group",), default=1),
        num_kv_heads=8, max_seq_len=131072, norm_eps=1e-5,
    ),
    SILU,
    flags=(
        Flag("attention_bias", ("qkv_bias",)), Flag("norm_topk_prob", ("moe.normalize_weights",), default=True),
        Flag("use_qk_norm", ("qk_norm",)),
    ),
    experts_of_layers=BiasedExperts(),
)  # fmt: skip
