"""Architectures with GPT-2's layers: LayerNorm and a plain MLP; ALiBi, learned positions or rope."""

from __future__ import annotations

from typing import Any, ClassVar

from megads.api import ConfigError, MLPKind, ModelConfig, NormKind, Position
from megads.tools.convert.architecture import Architecture, Content, Flag, Number, share_of_hidden
from megads.tools.convert.weights import Names


def _all_heads(model: ModelConfig) -> int:
    return model.num_heads


def _four_times_hidden(model: ModelConfig) -> int:
    return 4 * model.hidden_size


_EQUAL_HEADS: dict[str, Any] = {"num_kv_heads": _all_heads, "head_size": share_of_hidden}
_HAS: dict[str, Any] = {"norm": NormKind.layernorm, "bias": True}
_ANY_GELU = {"gelu_new": MLPKind.gelu, "gelu_pytorch_tanh": MLPKind.gelu, "gelu": MLPKind.gelu_exact}
_PLAIN = {**_ANY_GELU, "relu": MLPKind.relu, "relu2": MLPKind.relu2}
_ATTENTION_DROPOUT = Number("attention_dropout", ("attention_dropout",), float, 0.0)
_HIDDEN_DROPOUT = Number("hidden_dropout", ("hidden_dropout",), float, 0.0)
_THETA = Number("rope_theta", ("rope_theta", "rotary_emb_base"), float, 10000.0)
_LN_EPS = Number("norm_eps", ("layer_norm_epsilon",), float, 1e-5)
_NEOX_BLOCK = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.dense": ("attention.dense",),
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
_BLOOM_BLOCK = {
    name: tuple(
        each.replace("attention.", "self_attention.") if name.startswith("attention") else each for each in their
    )
    for name, their in _NEOX_BLOCK.items()
}
_GPT2_SIZES = (
    Number("vocab_size", ("vocab_size",)),
    Number("hidden_size", ("n_embd",)),
    Number("ffn_size", ("n_inner",), default=None),
    Number("num_layers", ("n_layer",)),
    Number("num_heads", ("n_head",)),
)
_SIZES = (
    Number("vocab_size", ("vocab_size",)),
    Number("hidden_size", ("hidden_size",)),
    Number("num_layers", ("num_hidden_layers",)),
    Number("num_heads", ("num_attention_heads",)),
    Number("max_seq_len", ("max_position_embeddings",), default=2048),
)
_FFN = Number("ffn_size", ("intermediate_size",))


def _dropouts(default: float, embedding: str, residual: str, attention: str) -> tuple[Number, ...]:
    hidden = (Number("hidden_dropout", (name,), float, default) for name in (embedding, residual))
    return (*hidden, Number("attention_dropout", (attention,), float, default))


BLOOM = Architecture(
    "bloom", "BloomForCausalLM",
    Names(
        outer={
            "embedding.word": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "final_norm": "transformer.ln_f",
        },
        block=_BLOOM_BLOCK,
        prefix="transformer.h.{}",
    ),
    {**_HAS, **_EQUAL_HEADS, "position": Position.alibi, "embedding_norm": True, "ffn_size": _four_times_hidden},
    (
        Number("vocab_size", ("vocab_size",)),
        Number("hidden_size", ("hidden_size", "n_embed")),
        Number("num_layers", ("n_layer", "num_hidden_layers")),
        Number("num_heads", ("n_head", "num_attention_heads")),
        Number("max_seq_len", ("seq_length",), default=2048),
        _LN_EPS, _HIDDEN_DROPOUT, _ATTENTION_DROPOUT,
    ),
    {"gelu_pytorch_tanh": MLPKind.gelu}, "", fixed={"apply_residual_connection_post_layernorm": False}, tied=True,
)  # fmt: skip
GPT2 = Architecture(
    "gpt2", "GPT2LMHeadModel",
    Names(
        outer={
            "embedding.word": "transformer.wte",
            "embedding.position": "transformer.wpe",
            "final_norm": "transformer.ln_f",
        },
        block={
            "input_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.dense": ("attn.c_proj",),
            "post_attention_norm": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
        },
        prefix="transformer.h.{}",
        inputs_first=True,
        stacked_qkv=True,
    ),
    {**_HAS, **_EQUAL_HEADS, "position": Position.learned},
    (
        *_GPT2_SIZES, Number("max_seq_len", ("n_positions",), default=1024), _LN_EPS,
        *_dropouts(0.1, "embd_pdrop", "resid_pdrop", "attn_pdrop"),
    ),
    _PLAIN, "activation_function", fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    tied=True,
)  # fmt: skip


class _ParallelResidual:
    """A parallel block of GPT-NeoX has two norms: use_parallel_residual."""

    ours: ClassVar[tuple[str, ...]] = ("parallel_block", "parallel_norms")
    theirs: ClassVar[tuple[str, ...]] = ("use_parallel_residual",)

    def refusal(self, model: ModelConfig) -> str:
        """A parallel block with one norm."""
        alone = model.parallel_block and model.parallel_norms == 1
        return "model.parallel_norms = 1 where gpt_neox has 2" if alone else ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"use_parallel_residual": model.parallel_block}

    def read(self, config_json: Content) -> dict[str, Any]:
        parallel = bool(config_json.get("use_parallel_residual", True))
        return {"parallel_block": parallel, "parallel_norms": 1 + parallel}


GPT_NEOX = Architecture(
    "gpt_neox", "GPTNeoXForCausalLM",
    Names(
        outer={"embedding.word": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm"},
        block=_NEOX_BLOCK,
        prefix="gpt_neox.layers.{}",
        head="embed_out",
    ),
    {**_HAS, **_EQUAL_HEADS},
    (
        *_SIZES, _FFN, Number("norm_eps", ("layer_norm_eps",), float, 1e-5),
        Number("rope_theta", ("rotary_emb_base", "rope_theta"), float, 10000.0),
        Number("rotary_fraction", ("rotary_pct", "partial_rotary_factor"), float, 0.25),
        _HIDDEN_DROPOUT, _ATTENTION_DROPOUT,
    ),
    {"gelu": MLPKind.gelu_exact, **_PLAIN},
    flags=(Flag("attention_bias", ("qkv_bias", "attention_output_bias"), default=True),),
    translation=_ParallelResidual(),
)  # fmt: skip


class _RotaryFeatures:
    """rotary_dim of GPT-J: the number of features of a head that rope rotates."""

    ours: ClassVar[tuple[str, ...]] = ("rotary_fraction",)
    theirs: ClassVar[tuple[str, ...]] = ("rotary_dim",)

    def refusal(self, model: ModelConfig) -> str:
        """Any model can be expressed."""
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"rotary_dim": model.rotary_dim}

    def read(self, config_json: Content) -> dict[str, Any]:
        rotated, width, heads = (
            Number("", (name,), default=default).read(config_json)
            for name, default in (("rotary_dim", 64), ("n_embd", ...), ("n_head", ...))
        )
        return {"rotary_fraction": rotated * heads / max(width, 1)}


GPTJ = Architecture(
    "gptj", "GPTJForCausalLM",
    Names(
        outer={"embedding.word": "transformer.wte", "final_norm": "transformer.ln_f"},
        block={
            "input_norm": ("ln_1",),
            "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            "attention.dense": ("attn.out_proj",),
            "mlp.up": ("mlp.fc_in",),
            "mlp.down": ("mlp.fc_out",),
        },
        prefix="transformer.h.{}",
    ),
    {
        **_HAS, **_EQUAL_HEADS, "qkv_bias": False, "attention_output_bias": False, "parallel_block": True,
        "rotary_interleaved": True, "head_bias": True, "rope_theta": 10000.0,
    },
    (
        *_GPT2_SIZES, Number("max_seq_len", ("n_positions",), default=2048), _LN_EPS,
        *_dropouts(0.0, "embd_pdrop", "resid_pdrop", "attn_pdrop"),
    ),
    _PLAIN, "activation_function", translation=_RotaryFeatures(),
)  # fmt: skip


class _OptEmbedding:
    """OPT's embedding may be narrower than the model, which megads does not support; its init_std has another name."""

    ours: ClassVar[tuple[str, ...]] = ()
    theirs: ClassVar[tuple[str, ...]] = ("word_embed_proj_dim", "init_std")

    def refusal(self, model: ModelConfig) -> str:
        """Any model can be expressed."""
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"word_embed_proj_dim": model.hidden_size, "init_std": model.weight_std}

    def read(self, config_json: Content) -> dict[str, Any]:
        narrow, hidden = config_json.get("word_embed_proj_dim"), config_json.get("hidden_size")
        if narrow not in (None, hidden):
            raise ConfigError(
                f"config.json: word_embed_proj_dim = {narrow!r}: megads computes hidden_size, {hidden}, only"
            )
        return {}


OPT = Architecture(
    "opt", "OPTForCausalLM",
    Names(
        outer={
            "embedding.word": "model.decoder.embed_tokens",
            "embedding.position": "model.decoder.embed_positions",
            "final_norm": "model.decoder.final_layer_norm",
        },
        block={
            "input_norm": ("self_attn_layer_norm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.dense": ("self_attn.out_proj",),
            "post_attention_norm": ("final_layer_norm",),
            "mlp.up": ("fc1",),
            "mlp.down": ("fc2",),
        },
        prefix="model.decoder.layers.{}",
        unused_positions=2,
    ),
    {**_HAS, **_EQUAL_HEADS, "position": Position.learned, "norm_eps": 1e-5},
    (
        *_SIZES, Number("ffn_size", ("ffn_dim",)), Number("hidden_dropout", ("dropout",), float, 0.1),
        _ATTENTION_DROPOUT,
    ),
    {"relu": MLPKind.relu, **_PLAIN}, "activation_function",
    fixed={
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    tied=True, translation=_OptEmbedding(),
)  # fmt: skip


class _FalconHeads:
    """Falcon's heads and norms: multi_query, new_decoder_architecture, num_kv_heads, num_ln_in_parallel_attn."""

    ours: ClassVar[tuple[str, ...]] = ("num_kv_heads", "parallel_block", "parallel_norms")
    theirs: ClassVar[tuple[str, ...]] = (
        "multi_query",
        "new_decoder_architecture",
        "num_kv_heads",
        "parallel_attn",
        "num_ln_in_parallel_attn",
        "n_head_kv",
    )

    def refusal(self, model: ModelConfig) -> str:
        """Grouped heads, or two norms, in blocks that are not parallel."""
        new = self._is_new(model)
        return (
            f"model.num_kv_heads = {model.kv_heads} without parallel_block" if new and not model.parallel_block else ""
        )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        new = self._is_new(model)
        return {
            "new_decoder_architecture": new, "multi_query": model.kv_heads == 1, "num_kv_heads": model.kv_heads,
            "parallel_attn": model.parallel_block, "num_ln_in_parallel_attn": model.parallel_norms if new else None,
        }  # fmt: skip

    def read(self, config_json: Content) -> dict[str, Any]:
        # The first files of Falcon 40B have n_head_kv, and no key for the architecture.
        new = bool(config_json.get("new_decoder_architecture", config_json.get("n_head_kv") is not None))
        parallel = config_json.get("parallel_attn", True)
        if new:
            heads = Number("", ("num_kv_heads", "n_head_kv", "num_attention_heads", "n_head")).read(config_json)
            norms = Number("", ("num_ln_in_parallel_attn",), default=2).read(config_json)
            return {"num_kv_heads": heads, "parallel_block": True, "parallel_norms": norms}
        heads = 1 if config_json.get("multi_query", True) else None
        return {"num_kv_heads": heads, "parallel_block": bool(parallel), "parallel_norms": 1}

    @staticmethod
    def _is_new(model: ModelConfig) -> bool:
        return model.parallel_norms == 2 or model.kv_heads not in (1, model.num_heads)


def _falcon_names(model: ModelConfig) -> Names:
    two = model.parallel_norms == 2
    norms = {"input_norm": ("ln_attn",), "post_attention_norm": ("ln_mlp",)} if two else {}
    return Names(
        outer={"embedding.word": "transformer.word_embeddings", "final_norm": "transformer.ln_f"},
        block={**_BLOOM_BLOCK, **norms},
        prefix="transformer.h.{}",
    )


FALCON = Architecture(
    "falcon", "FalconForCausalLM", _falcon_names,
    {**_HAS, "head_size": share_of_hidden},
    (
        Number("vocab_size", ("vocab_size",)), Number("hidden_size", ("hidden_size",)),
        Number("num_layers", ("num_hidden_layers", "n_layer")), Number("num_heads", ("num_attention_heads", "n_head")),
        Number("max_seq_len", ("max_position_embeddings",), default=2048),
        Number("ffn_size", ("ffn_hidden_size",), default=None), _LN_EPS,
        Number("rope_theta", ("rope_theta",), float, 10000.0), _HIDDEN_DROPOUT, _ATTENTION_DROPOUT,
    ),
    {"gelu": MLPKind.gelu_exact, **_PLAIN}, "activation",
    flags=(Flag("bias", ("qkv_bias", "attention_output_bias", "mlp_bias")),),
    # transformers rounds the biases of ALiBi to bf16 and scales them with the scores.
    fixed={"alibi": False}, tied=True, translation=_FalconHeads(), former_types=("RefinedWebModel", "RefinedWeb"),
)  # fmt: skip
MPT = Architecture(
    "mpt", "MptForCausalLM",
    Names(
        outer={"embedding.word": "transformer.wte", "final_norm": "transformer.norm_f"},
        block={
            "input_norm": ("norm_1",),
            "attention.qkv": ("attn.Wqkv",),
            "attention.dense": ("attn.out_proj",),
            "post_attention_norm": ("norm_2",),
            "mlp.up": ("ffn.up_proj",),
            "mlp.down": ("ffn.down_proj",),
        },
        prefix="transformer.blocks.{}",
        stacked_qkv=True,
    ),
    {
        "norm": NormKind.layernorm, "position": Position.alibi, "ffn_size": _four_times_hidden, "norm_eps": 1e-5,
        **_EQUAL_HEADS,
    },
    (
        Number("vocab_size", ("vocab_size",)), Number("hidden_size", ("d_model",)), Number("num_layers", ("n_layers",)),
        Number("num_heads", ("n_heads",)), Number("max_seq_len", ("max_seq_len",), default=2048),
        Number("qkv_clip", ("clip_qkv",), float, None), Number("attention_multiplier", ("softmax_scale",), float, None),
        Number("hidden_dropout", ("emb_pdrop",), float, 0.0), Number("hidden_dropout", ("resid_pdrop",), float, 0.0),
    ),
    {"gelu": MLPKind.gelu_exact}, "",
    fixed={
        "attn_pdrop": 0,
        "no_bias": True, "expansion_ratio": 4, "logit_scale": None, "alibi": True, "alibi_bias_max": 8, "qk_ln": False,
        "prefix_lm": False, "attn_type": "multihead_attention", "norm_type": "low_precision_layernorm",
    },
    tied=True,
    nested={
        "attn_config": (
            "alibi", "alibi_bias_max", "qk_ln", "prefix_lm", "attn_type", "clip_qkv", "softmax_scale", "attn_pdrop",
        ),
    },
)  # fmt: skip
STARCODER2 = Architecture(
    "starcoder2", "Starcoder2ForCausalLM",
    Names(
        outer={"embedding.word": "model.embed_tokens", "final_norm": "model.norm"},
        block={
            "input_norm": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.dense": ("self_attn.o_proj",),
            "post_attention_norm": ("post_attention_layernorm",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
        },
        prefix="model.layers.{}",
    ),
    {**_HAS, "head_size": share_of_hidden},
    (
        *_SIZES, _FFN, Number("num_kv_heads", ("num_key_value_heads",), default=2),
        Number("norm_eps", ("norm_epsilon",), float, 1e-5), Number("rope_theta", ("rope_theta",), float, 10000.0),
        Number("window", ("sliding_window",), default=None),
        *_dropouts(0.0, "embedding_dropout", "residual_dropout", "attention_dropout"),
    ),
    {"gelu_pytorch_tanh": MLPKind.gelu, **_PLAIN},
    flags=(Flag("use_bias", ("qkv_bias", "attention_output_bias", "mlp_bias"), default=True),), tied=True,
)  # fmt: skip
PHI = Architecture(
    "phi", "PhiForCausalLM",
    Names(
        outer={"embedding.word": "model.embed_tokens", "final_norm": "model.final_layernorm"},
        block={
            "input_norm": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.dense": ("self_attn.dense",),
            "mlp.up": ("mlp.fc1",),
            "mlp.down": ("mlp.fc2",),
        },
        prefix="model.layers.{}",
    ),
    {**_HAS, "head_size": share_of_hidden, "parallel_block": True, "head_bias": True},
    (
        *_SIZES, _FFN, Number("num_kv_heads", ("num_key_value_heads",), default=None),
        Number("norm_eps", ("layer_norm_eps",), float, 1e-5), Number("rope_theta", ("rope_theta",), float, 10000.0),
        Number("rotary_fraction", ("partial_rotary_factor",), float, 0.5),
        *_dropouts(0.0, "embd_pdrop", "resid_pdrop", "attention_dropout"),
    ),
    _PLAIN, fixed={"qk_layernorm": False},
)  # fmt: skip
