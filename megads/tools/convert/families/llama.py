"""Architectures with Llama's modules: RMSNorm (but StableLM and OLMo), rope, a gated MLP, separate projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from megads.api import MLPKind, ModelConfig, NormKind, NormPlacement, QKNormWidth
from megads.tools.convert.architecture import Architecture, Content, Flag, Number, share_of_hidden
from megads.tools.convert.layer_maps import LayersWithoutPositions, SlidingLayers, period
from megads.tools.convert.weights import Names

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)}
_ATTENTION = {"attention.qkv": _QKV, "attention.dense": ("self_attn.o_proj",)}
HEAD_NORMS = {"attention.query_norm": ("self_attn.q_norm",), "attention.key_norm": ("self_attn.k_norm",)}
_INPUT_NORMS = {"input_norm": ("input_layernorm",), "post_attention_norm": ("post_attention_layernorm",)}
_OUTPUT_NORMS = {
    "attention_output_norm": ("post_attention_layernorm",), "mlp_output_norm": ("post_feedforward_layernorm",),
}  # fmt: skip
NAMES = Names(
    outer={"embedding.word": "model.embed_tokens", "final_norm": "model.norm"},
    block={**_INPUT_NORMS, **_ATTENTION, **_MLP},
    prefix="model.layers.{}",
)
_NUMBERS = (
    Number("vocab_size", ("vocab_size",)),
    Number("hidden_size", ("hidden_size",)),
    Number("ffn_size", ("intermediate_size",)),
    Number("num_layers", ("num_hidden_layers",)),
    Number("num_heads", ("num_attention_heads",)),
    Number("num_kv_heads", ("num_key_value_heads",), default=None),
    Number("head_size", ("head_dim",), default=None),
    Number("max_seq_len", ("max_position_embeddings",), default=2048),
    Number("norm_eps", ("rms_norm_eps",), float, 1e-6),
    Number("rope_theta", ("rope_theta",), float, 10000.0),
    Number("attention_dropout", ("attention_dropout",), float, 0.0),
)
SILU = {"silu": MLPKind.swiglu}
_GEMMA = {"gelu_pytorch_tanh": MLPKind.geglu, "gelu": MLPKind.geglu_exact}
ATTENTION_BIAS = Flag("attention_bias", ("qkv_bias", "attention_output_bias"))
_MLP_BIAS = Flag("mlp_bias", ("mlp_bias",))


def numbers(*more: Number, without: tuple[str, ...] = (), **defaults: Any) -> tuple[Number, ...]:
    """Llama's numeric keys, some left out or with other defaults, and more of them."""
    kept = (number for number in _NUMBERS if number.ours not in without)
    return (*(replace(number, default=defaults.get(number.ours, number.default)) for number in kept), *more)


_WINDOW = Number("window", ("sliding_window",), default=None)
LLAMA = Architecture(
    "llama", "LlamaForCausalLM", NAMES, {}, _NUMBERS, SILU, flags=(ATTENTION_BIAS, _MLP_BIAS),
)  # fmt: skip
MISTRAL = Architecture("mistral", "MistralForCausalLM", NAMES, {}, numbers(_WINDOW), SILU)
MINISTRAL = Architecture(
    "ministral", "MinistralForCausalLM", NAMES, {}, numbers(num_kv_heads=8), SILU,
    translation=SlidingLayers(lambda content, _: content.get("sliding_window") is not None),
)  # fmt: skip


def _upper_layers_slide(content: Content, index: int) -> bool:
    first: int = Number("", ("max_window_layers",), default=28).read(content)
    return bool(content.get("use_sliding_window")) and index >= first


class QwenLayers(SlidingLayers):
    """Qwen's sliding_window only applies with use_sliding_window."""

    theirs: ClassVar[tuple[str, ...]] = (*SlidingLayers.theirs, "use_sliding_window", "max_window_layers")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        content = super().write(model)
        return {**content, "use_sliding_window": content["sliding_window"] is not None}

    def read(self, config_json: Content) -> dict[str, Any]:
        used = config_json.get("use_sliding_window")
        return super().read(config_json if used else {**config_json, "sliding_window": None})


QWEN2 = Architecture(
    "qwen2", "Qwen2ForCausalLM", NAMES, {"qkv_bias": True, "head_size": share_of_hidden},
    numbers(without=("head_size",), max_seq_len=32768, num_kv_heads=32), SILU,
    translation=QwenLayers(_upper_layers_slide),
)  # fmt: skip
QWEN3 = Architecture(
    "qwen3", "Qwen3ForCausalLM", replace(NAMES, block={**NAMES.block, **HEAD_NORMS}), {"qk_norm": True},
    numbers(head_size=128, num_kv_heads=..., max_seq_len=32768), SILU, flags=(ATTENTION_BIAS,),
    translation=QwenLayers(_upper_layers_slide),
)  # fmt: skip
SEED_OSS = Architecture(
    "seed_oss", "SeedOssForCausalLM", NAMES, {},
    numbers(
        Number("hidden_dropout", ("residual_dropout",), float, 0.1),
        max_seq_len=524288, head_size=128, num_kv_heads=8, attention_dropout=0.1,
    ),
    SILU,
    flags=(
        Flag("attention_bias", ("qkv_bias",), default=True), Flag("attention_out_bias", ("attention_output_bias",)),
        _MLP_BIAS,
    ),
)  # fmt: skip
SMOLLM3 = Architecture(
    "smollm3", "SmolLM3ForCausalLM", NAMES, {"head_size": share_of_hidden},
    numbers(without=("head_size",), max_seq_len=32768, num_kv_heads=4, rope_theta=2e6), SILU,
    flags=(ATTENTION_BIAS, _MLP_BIAS), tied=True, translation=LayersWithoutPositions(),
)  # fmt: skip
GRANITE = Architecture(
    "granite", "GraniteForCausalLM", NAMES, {"head_size": share_of_hidden},
    numbers(
        Number("embedding_multiplier", ("embedding_multiplier",), float, 1.0),
        Number("residual_multiplier", ("residual_multiplier",), float, 1.0),
        Number("attention_multiplier", ("attention_multiplier",), float, 1.0),
        Number("logit_scale", ("logits_scaling",), float, 1.0, power=-1.0),
        without=("head_size",),
    ),
    SILU, flags=(ATTENTION_BIAS, _MLP_BIAS),
)  # fmt: skip
PHI3 = Architecture(
    "phi3", "Phi3ForCausalLM",
    replace(
        NAMES,
        block={**NAMES.block, "attention.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)},
        stacked_qkv=True,
    ),
    {"head_size": share_of_hidden},
    numbers(
        _WINDOW,
        Number("hidden_dropout", ("embd_pdrop",), float, 0.0), Number("hidden_dropout", ("resid_pdrop",), float, 0.0),
        Number("rotary_fraction", ("partial_rotary_factor",), float, 1.0),
        without=("head_size",), max_seq_len=4096, norm_eps=1e-5,
    ),
    SILU,
)  # fmt: skip
_OLMO2_BLOCK = {**_ATTENTION, **_MLP, **HEAD_NORMS, **_OUTPUT_NORMS}
_OLMO2_HAS = {
    "norm_placement": NormPlacement.output, "qk_norm": True, "qk_norm_width": QKNormWidth.full,
}  # fmt: skip
OLMO = Architecture(
    "olmo", "OlmoForCausalLM", NAMES,
    {"norm": NormKind.layernorm, "norm_affine": False, "norm_eps": 1e-5, "head_size": share_of_hidden},
    numbers(Number("qkv_clip", ("clip_qkv",), float, None), without=("head_size", "norm_eps")), SILU,
    flags=(ATTENTION_BIAS,),
)  # fmt: skip
OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", replace(NAMES, block=_OLMO2_BLOCK), _OLMO2_HAS, numbers(norm_eps=1e-5), SILU,
    flags=(ATTENTION_BIAS,),
)  # fmt: skip
OLMO3 = Architecture(
    "olmo3", "Olmo3ForCausalLM", replace(NAMES, block=_OLMO2_BLOCK), _OLMO2_HAS,
    numbers(norm_eps=1e-5, rope_theta=5e5), SILU, flags=(ATTENTION_BIAS,),
    translation=SlidingLayers(lambda _, index: (index + 1) % 4 != 0, (5e5, 5e5)),
)  # fmt: skip
_GEMMA_HAS = {"norm_zero_centered": True, "scale_embedding": True}
_GEMMA2_BLOCK = {
    **_ATTENTION, **_MLP, **_OUTPUT_NORMS, "input_norm": ("input_layernorm",),
    "post_attention_norm": ("pre_feedforward_layernorm",),
}  # fmt: skip


def _gemma_numbers(softcaps: tuple[float | None, float | None]) -> tuple[Number, ...]:
    return numbers(
        Number("attention_logit_softcap", ("attn_logit_softcapping",), float, softcaps[0]),
        Number("final_logit_softcap", ("final_logit_softcapping",), float, softcaps[1]),
        Number("attention_multiplier", ("query_pre_attn_scalar",), float, 256, power=-0.5),
        max_seq_len=8192, num_kv_heads=4, head_size=256,
    )  # fmt: skip


GEMMA = Architecture(
    "gemma", "GemmaForCausalLM", NAMES, _GEMMA_HAS, numbers(max_seq_len=8192, num_kv_heads=16, head_size=256),
    # transformers takes gelu, of the first releases, for the tanh approximation.
    {"gelu_pytorch_tanh": MLPKind.geglu, "gelu": MLPKind.geglu}, flags=(ATTENTION_BIAS,), tied=True,
)  # fmt: skip
GEMMA2 = Architecture(
    "gemma2", "Gemma2ForCausalLM", replace(NAMES, block=_GEMMA2_BLOCK),
    {**_GEMMA_HAS, "norm_placement": NormPlacement.both}, _gemma_numbers((50.0, 30.0)), _GEMMA, "hidden_activation",
    flags=(ATTENTION_BIAS,), tied=True, translation=SlidingLayers(lambda _, index: index % 2 == 0),
)  # fmt: skip
GEMMA3 = Architecture(
    "gemma3_text", "Gemma3ForCausalLM", replace(NAMES, block={**_GEMMA2_BLOCK, **HEAD_NORMS}),
    {**_GEMMA_HAS, "norm_placement": NormPlacement.both, "qk_norm": True},
    _gemma_numbers((None, None)), _GEMMA, "hidden_activation", flags=(ATTENTION_BIAS,), tied=True,
    translation=SlidingLayers(
        lambda content, index: (index + 1) % period(content, "sliding_window_pattern", 6) != 0, (1e6, 1e4)
    ),
)  # fmt: skip
STABLELM = Architecture(
    "stablelm", "StableLmForCausalLM", NAMES,
    {"norm": NormKind.layernorm, "bias": True, "attention_output_bias": False, "mlp_bias": False,
     "head_size": share_of_hidden},
    (
        *(number for number in _NUMBERS if number.ours not in ("head_size", "norm_eps", "max_seq_len")),
        Number("max_seq_len", ("max_position_embeddings",), default=4096),
        Number("norm_eps", ("layer_norm_eps", "norm_eps"), float, 1e-5),
        Number("rotary_fraction", ("partial_rotary_factor", "rope_pct"), float, 0.25),
        Number("hidden_dropout", ("hidden_dropout",), float, 0.0),
    ),
    SILU, flags=(Flag("use_qkv_bias", ("qkv_bias",)),),
    fixed={"qk_layernorm": False, "use_parallel_residual": False}, former_types=("stablelm_epoch",),
)  # fmt: skip
COHERE = Architecture(
    "cohere", "CohereForCausalLM",
    replace(NAMES, block={name: theirs for name, theirs in NAMES.block.items() if name != "post_attention_norm"}),
    {"norm": NormKind.layernorm, "parallel_block": True, "rotary_interleaved": True, "head_size": share_of_hidden},
    (
        *(number for number in _NUMBERS if number.ours not in ("head_size", "norm_eps", "rope_theta", "max_seq_len")),
        Number("max_seq_len", ("max_position_embeddings",), default=8192),
        Number("norm_eps", ("layer_norm_eps",), float, 1e-5),
        Number("rope_theta", ("rope_theta",), float, 5e5),
        Number("logit_scale", ("logit_scale",), float, 0.0625),
    ),
    SILU, flags=(ATTENTION_BIAS,), fixed={"use_qk_norm": False}, tied=True,
)  # fmt: skip
