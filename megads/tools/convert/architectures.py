"""Published architectures: the models that each can express, its tensor names and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.tools.convert.weights import Names

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Number:
    """A numeric key of config.json.

    Attributes:
        ours: field of ModelConfig.
        theirs: the key, followed by its names in older files.
        kind: int or float.
        default: value that transformers uses if the key is absent; an ellipsis if the key is required.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: type = int
    default: Any = ...

    def read(self, config_json: Content) -> Any:
        """Returns the value.

        Raises:
            ConfigError: the key is missing, or its value is not a number.
        """
        name = next((name for name in self.theirs if config_json.get(name) is not None), None)
        value = self.default if name is None else config_json[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float) if self.kind is float else int):
            told = "is missing" if value is ... else f"= {value!r}"
            kind = "a number" if self.kind is float else "an integer"
            raise ConfigError(f"config.json: {name or self.theirs[0]} {told}: want {kind}")
        return self.kind(value)


@dataclass(frozen=True)
class Architecture:
    """A decoder architecture of transformers.

    Attributes:
        model_type: model_type in config.json.
        class_name: class in transformers.
        names: names of its modules.
        wants: fields of ModelConfig with the only value that the architecture can express, or a function of the model
            that returns it.
        keys: numeric keys of config.json.
        fixed: other keys of config.json with the only value that megads supports.
        tied: whether the embeddings are tied if config.json does not say.
        optional_bias: whether config.json states if there are biases; otherwise there always are, unless `wants` says
            no.
        needs: keys of `fixed` that must be present, because transformers' default is another value.
    """

    model_type: str
    class_name: str
    names: Names
    wants: Mapping[str, Any]
    keys: tuple[Number, ...]
    fixed: Mapping[str, Any]
    tied: bool
    optional_bias: bool = False
    needs: tuple[str, ...] = ()

    def refusals(self, model: ModelConfig) -> list[str]:
        """Returns what of a model the architecture cannot express; empty if it can express all of it."""
        wanted = {field: value(model) if callable(value) else value for field, value in self.wants.items()}
        found = [
            f"model.{field} = {_effective(model, field)} where {self.model_type} has {value}"
            for field, value in wanted.items()
            if _effective(model, field) != value
        ]
        expressed = {*wanted, *(key.ours for key in self.keys), *_EXPRESSED_BY_ALL}
        found += [
            f"model.{field.name} = {_effective(model, field.name)}, which {self.model_type} has not"
            for field in fields(model)
            if field.name not in expressed and _effective(model, field.name) != getattr(_DEFAULTS, field.name)
        ]
        return [*found, *([f"model.block.name = {model.block.name}"] if model.block.is_custom else [])]

    def config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Returns config.json of a model, without the tokenizer's keys."""
        config_json = {"model_type": self.model_type, "architectures": [self.class_name], **self.fixed}
        config_json |= {key.theirs[0]: _effective(model, key.ours) for key in self.keys}
        if model.position is Position.rope:
            config_json["rope_parameters"] = {**_scaling_content(model.rope_scaling), "rope_theta": model.rope_theta}
            # transformers 4 reads rope_scaling.
            config_json["rope_scaling"] = (
                None if model.rope_scaling == RopeScalingConfig() else config_json["rope_parameters"]
            )
        if self.optional_bias:
            config_json |= {"attention_bias": model.bias, "mlp_bias": model.bias}
        return {**config_json, "initializer_range": model.weight_std, "tie_word_embeddings": model.tie_embeddings}

    def model_of(self, config_json: Content) -> ModelConfig:
        """Returns the model that a config.json describes.

        Raises:
            ConfigError: megads does not support the model; the message names the key.
        """
        config_json = _of_version_4(config_json)
        for key, wanted in self.fixed.items():
            given = config_json.get(key, None if key in self.needs else wanted)
            if given != wanted and not (given in _TANH_GELUS and wanted in _TANH_GELUS):
                raise ConfigError(f"config.json: {key} = {given!r}: megads computes {wanted!r} only")
        layer_types = config_json.get("layer_types") or []
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise ConfigError(f"config.json: layer_types = {layer_types!r}: megads has full_attention in every layer")
        values = {key.ours: key.read(config_json) for key in self.keys}
        if "rope_theta" in values:
            values["rope_scaling"] = _scaling_of(config_json)
        values |= {field: value for field, value in self.wants.items() if not callable(value)}
        values["bias"] = self._bias(config_json) if self.optional_bias else self.wants.get("bias", True)
        values["tie_embeddings"] = bool(config_json.get("tie_word_embeddings", self.tied))
        values["init_std"] = Number("init_std", ("initializer_range",), float, None).read(config_json) or None
        model = ModelConfig(**values)
        model.check()
        refused = self.refusals(model)
        if refused:
            raise ConfigError(f"config.json: {'; '.join(refused)}")
        return model

    @staticmethod
    def _bias(config_json: Content) -> bool:
        attention, mlp = (bool(config_json.get(key, False)) for key in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            raise ConfigError(
                f"config.json: attention_bias = {attention}, mlp_bias = {mlp}: megads has biases in both or in neither"
            )
        return attention


_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Hugging Face's names of the tanh approximation of GELU, which megads uses."""


_DEFAULTS = ModelConfig()
_EXPRESSED_BY_ALL = (
    *("vocab_size", "tie_embeddings", "init_std", "hidden_dropout", "attention_dropout", "attention", "block"),
    *("bias", "rope_theta", "rope_scaling", "qk_norm_width"),
    *("mup", "logit_scale", "attention_multiplier"),
)
"""Fields of ModelConfig that every architecture expresses, or that its other fields make irrelevant; the last three are
folded into weights. An architecture that names another field in neither `wants` nor `keys` has its default."""


def _effective(model: ModelConfig, field: str) -> Any:
    """Returns a field of a model: null replaced by what it stands for, but biases as model.bias says by null."""
    filled: dict[str, Any] = {"num_kv_heads": model.kv_heads, "head_size": model.head_dim, "ffn_size": model.ffn_width}
    for part in ("qkv_bias", "attention_output_bias", "mlp_bias"):
        filled |= {part: None} if getattr(model, part) == model.bias else {}
    return filled.get(field, getattr(model, field))


def _of_version_4(config_json: Content) -> Content:
    """Adds the keys of transformers 4 to a config.json of transformers 5, which has the RoPE settings in a dict.

    Raises:
        ConfigError: rope_parameters is not a dict.
    """
    parameters = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"config.json: rope_parameters = {parameters!r}: want an object")
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "rotary_pct"}
    return {**config_json, **{names[name]: value for name, value in parameters.items() if name in names}}


_SCALING_KEYS = {
    RopeScaling.none: {},
    RopeScaling.linear: {"factor": "factor"},
    RopeScaling.llama3: {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
    RopeScaling.yarn: {
        "factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
        "original_max_seq_len": "original_max_position_embeddings",
    },
}  # fmt: skip
"""Keys of rope_parameters for the fields of RopeScalingConfig."""


def _scaling_content(scaling: RopeScalingConfig) -> dict[str, Any]:
    kind = "default" if scaling.kind is RopeScaling.none else scaling.kind.value
    return {"rope_type": kind, **{t: getattr(scaling, o) for o, t in _SCALING_KEYS[scaling.kind].items()}}


def _scaling_type(field: str) -> type:
    return int if field == "original_max_seq_len" else float


def _scaling_of(config_json: Content) -> RopeScalingConfig:
    """Returns the RoPE scaling that a config.json describes.

    Raises:
        ConfigError: megads does not support it.
    """
    found = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ["default", *RopeScaling]:
        raise ConfigError(
            f"config.json: rope_type = {kind!r}: megads computes default, {', '.join(list(RopeScaling)[1:])}"
        )
    scaling = RopeScaling.none if kind == "default" else RopeScaling(kind)
    names = _SCALING_KEYS[scaling]
    told = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    others = {key: found[key] for key in found.keys() - set(names.values()) - told if found[key] is not None}
    # Other keys, such as YaRN's mscale, change the attention scale in transformers.
    if others and scaling is not RopeScaling.none:
        raise ConfigError(f"config.json: rope_parameters has {others}, which megads does not compute")
    numbers = (Number(ours, (theirs,), _scaling_type(ours), None) for ours, theirs in names.items())
    values = {number.ours: value for number in numbers if (value := number.read(found)) is not None}
    if "original_max_seq_len" in names and "original_max_seq_len" not in values:
        values["original_max_seq_len"] = Number("", ("max_position_embeddings",)).read(config_json)
    made = RopeScalingConfig(kind=scaling, **values)
    made.check()
    return made


def _all_heads(model: ModelConfig) -> int:
    return model.num_heads


def _share_of_hidden(model: ModelConfig) -> float:
    share, rest = divmod(model.hidden_size, model.num_heads)
    return model.hidden_size / model.num_heads if rest else share


def _four_times_hidden(model: ModelConfig) -> int:
    return 4 * model.hidden_size


_BLOCK = {
    "input_norm": ("input_layernorm",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.dense": ("attention.dense",),
    "post_attention_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
"""GPT-NeoX's names; BLOOM's differ in the attention modules."""
_UNSCALED = {
    "scale_embedding": False,
    "attention_sinks": False,
    "attention_logit_softcap": None,
    "final_logit_softcap": None,
}
_GPT_WANTS = {
    "norm": NormKind.layernorm, "mlp": MLPKind.gelu, "parallel_block": False, "window": None,
    "num_kv_heads": _all_heads, "head_size": _share_of_hidden, "qk_norm": False,
    "norm_placement": NormPlacement.input, **_UNSCALED,
}  # fmt: skip
_LLAMA_WANTS = {
    "position": Position.rope, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": False,
    "embedding_norm": False, "norm_placement": NormPlacement.input, **_UNSCALED,
}  # fmt: skip
_LLAMA_NAMES = Names(
    outer={"embedding.word": "model.embed_tokens", "final_norm": "model.norm"},
    block={
        "input_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",),
        "post_attention_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    prefix="model.layers.{}",
)
_LLAMA_KEYS = (
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
BLOOM = Architecture(
    model_type="bloom",
    class_name="BloomForCausalLM",
    names=Names(
        outer={
            "embedding.word": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "final_norm": "transformer.ln_f",
        },
        block={name: (theirs[0].replace("attention.", "self_attention."),) for name, theirs in _BLOCK.items()}
        | {"post_attention_norm": ("post_attention_layernorm",)},
        prefix="transformer.h.{}",
    ),
    wants={**_GPT_WANTS, "position": Position.alibi, "embedding_norm": True, "ffn_size": _four_times_hidden},
    keys=(
        Number("vocab_size", ("vocab_size",)),
        Number("hidden_size", ("hidden_size", "n_embed")),
        Number("num_layers", ("n_layer", "num_hidden_layers")),
        Number("num_heads", ("n_head", "num_attention_heads")),
        Number("max_seq_len", ("seq_length",), default=2048),
        Number("norm_eps", ("layer_norm_epsilon",), float, 1e-5),
        Number("hidden_dropout", ("hidden_dropout",), float, 0.0),
        Number("attention_dropout", ("attention_dropout",), float, 0.0),
    ),
    fixed={"apply_residual_connection_post_layernorm": False},
    tied=True,
)
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    names=Names(
        outer={"embedding.word": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm"},
        block=_BLOCK,
        prefix="gpt_neox.layers.{}",
        head="embed_out",
    ),
    wants={**_GPT_WANTS, "position": Position.rope, "embedding_norm": False},
    keys=(
        Number("vocab_size", ("vocab_size",)),
        Number("hidden_size", ("hidden_size",)),
        Number("ffn_size", ("intermediate_size",)),
        Number("num_layers", ("num_hidden_layers",)),
        Number("num_heads", ("num_attention_heads",)),
        Number("max_seq_len", ("max_position_embeddings",), default=2048),
        Number("norm_eps", ("layer_norm_eps",), float, 1e-5),
        Number("rope_theta", ("rotary_emb_base", "rope_theta"), float, 10000.0),
        Number("hidden_dropout", ("hidden_dropout",), float, 0.0),
        Number("attention_dropout", ("attention_dropout",), float, 0.0),
    ),
    fixed={
        "use_parallel_residual": False,
        "rotary_pct": 1.0,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
    },
    tied=False,
    needs=("use_parallel_residual", "rotary_pct", "hidden_act"),
)
GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    names=Names(
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
    ),
    wants={**_GPT_WANTS, "position": Position.learned, "embedding_norm": False},
    keys=(
        Number("vocab_size", ("vocab_size",)),
        Number("hidden_size", ("n_embd",)),
        Number("ffn_size", ("n_inner",), default=None),
        Number("num_layers", ("n_layer",)),
        Number("num_heads", ("n_head",)),
        Number("max_seq_len", ("n_positions",), default=1024),
        Number("norm_eps", ("layer_norm_epsilon",), float, 1e-5),
        Number("hidden_dropout", ("embd_pdrop",), float, 0.1),
        Number("hidden_dropout", ("resid_pdrop",), float, 0.1),
        Number("attention_dropout", ("attn_pdrop",), float, 0.1),
    ),
    fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    tied=True,
)
LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    names=_LLAMA_NAMES,
    wants={**_LLAMA_WANTS, "window": None, "qk_norm": False},
    keys=_LLAMA_KEYS,
    fixed={"hidden_act": "silu"},
    tied=False,
    optional_bias=True,
)
MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    names=_LLAMA_NAMES,
    wants={**_LLAMA_WANTS, "bias": False, "qk_norm": False},
    keys=(*_LLAMA_KEYS, Number("window", ("sliding_window",), default=None)),
    fixed={"hidden_act": "silu"},
    tied=False,
)
_QWEN3_DEFAULTS = {"head_size": 128, "num_kv_heads": ..., "max_seq_len": 32768}
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    names=replace(
        _LLAMA_NAMES,
        block={
            **_LLAMA_NAMES.block,
            "attention.query_norm": ("self_attn.q_norm",),
            "attention.key_norm": ("self_attn.k_norm",),
        },
    ),
    wants={**_LLAMA_WANTS, "bias": False, "window": None, "qk_norm": True, "qk_norm_width": QKNormWidth.head},
    keys=tuple(replace(key, default=_QWEN3_DEFAULTS.get(key.ours, key.default)) for key in _LLAMA_KEYS),
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    tied=False,
)
OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    names=replace(
        _LLAMA_NAMES,
        block={
            "attention.qkv": _LLAMA_NAMES.block["attention.qkv"],
            "attention.query_norm": ("self_attn.q_norm",),
            "attention.key_norm": ("self_attn.k_norm",),
            "attention.dense": ("self_attn.o_proj",),
            "attention_output_norm": ("post_attention_layernorm",),
            "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
            "mlp_output_norm": ("post_feedforward_layernorm",),
        },
    ),
    wants={
        **_LLAMA_WANTS, "bias": False, "window": None, "norm_placement": NormPlacement.output, "qk_norm": True,
        "qk_norm_width": QKNormWidth.full,
    },
    keys=tuple(replace(key, default=1e-5) if key.ours == "norm_eps" else key for key in _LLAMA_KEYS),
    fixed={"hidden_act": "silu", "attention_bias": False},
    tied=False,
)  # fmt: skip
ARCHITECTURES = {some.model_type: some for some in (BLOOM, LLAMA, MISTRAL, QWEN3, OLMO2, GPT_NEOX, GPT2)}
"""Architectures by model_type, in order of preference."""


def choose_architecture(model: ModelConfig, wanted: str) -> Architecture:
    """Returns the architecture to export a model to.

    Args:
        model: the model.
        wanted: model_type of an architecture, or auto.

    Raises:
        ConfigError: the architecture, or for auto every architecture, cannot express the model; the message gives the
            reasons, for auto those of the nearest architecture.
    """
    candidates = list(ARCHITECTURES.values()) if wanted == "auto" else [ARCHITECTURES[wanted]]
    refusals = [(some.refusals(model), some) for some in candidates]
    refused, nearest = min(refusals, key=lambda found: len(found[0]))
    if not refused:
        return nearest
    others = [some.model_type for some in ARCHITECTURES.values() if not some.refusals(model)]
    if wanted != "auto":
        remedy = f"; format={others[0]} can" if others else "; no published architecture that megads knows can"
        raise ConfigError(f"format = {wanted} cannot express the model: {'; '.join(refused)}{remedy}")
    raise ConfigError(
        f"no published architecture that megads knows can express the model; the nearest is {nearest.model_type}: "
        f"{'; '.join(refused)}"
    )


def architecture_of(config_json: Content) -> Architecture:
    """Returns the architecture of a config.json.

    Raises:
        ConfigError: megads does not support the architecture.
    """
    kind = config_json.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"config.json: model_type = {kind!r}: megads knows {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[kind]
