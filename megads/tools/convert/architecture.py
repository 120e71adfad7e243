"""What megads knows of a published architecture: the models that it can express, its tensor names and its config.json.

`megads.tools.convert.families` holds one table per architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from megads.api import (
    ConfigError,
    MLPKind,
    ModelConfig,
    MoEConfig,
    NormKind,
    NormPlacement,
    Position,
    QKNormWidth,
    RouterScore,
)
from megads.checkpoint.read import as_override
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.tools.convert.weights import Names

Content = Mapping[str, Any]

BIASES = {
    "qkv_bias": ("attention.qkv",),
    "attention_output_bias": ("attention.dense",),
    "mlp_bias": ("mlp.up", "mlp.gate_up", "mlp.down"),
}
"""Modules of a block by the field of ModelConfig that gives them biases."""
_USUAL: dict[str, Any] = {
    "position": Position.rope, "norm": NormKind.rmsnorm, "norm_placement": NormPlacement.input, "norm_affine": True,
    "norm_zero_centered": False, "qk_norm": False, "qk_norm_width": QKNormWidth.head, "parallel_block": False,
    "parallel_norms": 1, "embedding_norm": False, "scale_embedding": False, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": None, "logit_scale": 1.0, "head_bias": False, "qkv_clip": None,
    "attention_sinks": False, "attention_logit_softcap": None, "final_logit_softcap": None, "window": None,
    "layer_pattern": [], "rotary_fraction": 1.0, "rotary_interleaved": False, "rope_scaling": RopeScalingConfig(),
    "moe.num_experts": 0,
}  # fmt: skip
"""Fields that only some architectures have, with the value that they stand for where an architecture says nothing.

A field of ModelConfig that is missing here is not refused, so exports would drop it silently."""
EXPERTS = "moe."
"""Prefix of the fields of ModelConfig.moe in tables."""
_USUAL_EXPERTS: dict[str, Any] = {
    "moe.shared_ffn_size": 0, "moe.shared_gate": False, "moe.first_dense": 0, "moe.interval": 1,
    "moe.score": RouterScore.softmax, "moe.normalize_weights": True, "moe.routed_scale": 1.0, "moe.num_groups": 1,
    "moe.top_groups": 1, "moe.router_bias": False, "moe.bias_rate": 0.0,
}  # fmt: skip
"""The same for the fields of ModelConfig.moe, of architectures with experts; the balance losses, which only matter in
training, are not among them."""


@dataclass(frozen=True)
class Number:
    """A numeric key of config.json.

    Attributes:
        ours: field of ModelConfig.
        theirs: the key, followed by its names in older files.
        kind: int or float.
        default: value that transformers uses if the key is absent; an ellipsis if the key is required.
        power: the field is this power of the key.
    """

    ours: str
    theirs: tuple[str, ...]
    kind: type = int
    default: Any = ...
    power: float = 1.0

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
        if self.power == 1.0:
            return self.kind(value)
        if not value > 0:
            raise ConfigError(f"config.json: {name} = {value!r}: must be positive")
        return float(value) ** self.power

    def write(self, model: ModelConfig) -> Any:
        """The key's value for a model."""
        value = effective(model, self.ours)
        if self.ours == "attention_multiplier" and value is None and self.default is not None:
            value = model.head_dim**-0.5
        if self.power == 1.0:
            return value
        theirs = value ** (1.0 / self.power)
        return round(theirs) if math.isclose(theirs, round(theirs), rel_tol=1e-9) else theirs


@dataclass(frozen=True)
class Flag:
    """A boolean key of config.json.

    Attributes:
        theirs: the key.
        ours: fields of ModelConfig; they are false or true together.
        default: value that transformers uses if the key is absent.
        inverted: whether the fields are true where the key is false.
    """

    theirs: str
    ours: tuple[str, ...]
    default: bool = False
    inverted: bool = False

    def read(self, config_json: Content) -> bool:
        """The fields' value."""
        value = config_json.get(self.theirs)
        return bool(self.default if value is None else value) is not self.inverted

    def write(self, model: ModelConfig) -> bool:
        """The key's value for a model; a bias that only some of the fields have is written as zeros for the others."""
        return any(effective(model, name) for name in self.ours) is not self.inverted


class Translation(Protocol):
    """Keys and fields that depend on each other, such as layers that differ."""

    ours: ClassVar[tuple[str, ...]]
    """Fields of ModelConfig that it reads and writes."""
    theirs: ClassVar[tuple[str, ...]]
    """Keys of config.json."""

    def refusal(self, model: ModelConfig) -> str:
        """What of the model the keys cannot express; empty if nothing."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys' values for a model."""

    def read(self, config_json: Content) -> dict[str, Any]:
        """The fields' values.

        Raises:
            ConfigError: megads does not support them.
        """


@dataclass(frozen=True)
class Architecture:
    """A decoder architecture of transformers.

    Attributes:
        model_type: model_type in config.json.
        class_name: class in transformers.
        names: names of a model's modules.
        has: fields of ModelConfig with the only value that the architecture can express, or a function of the model
            that returns it; for other fields that `numbers`, `flags` and `translation` leave out, the usual value.
        numbers: numeric keys of config.json.
        flags: boolean keys of config.json.
        activations: kind of the MLP by the value of the key `activation_key`; the first is transformers' default.
        activation_key: key of the activation; empty if the architecture has one activation only.
        fixed: other keys of config.json with the only value that megads supports.
        tied: whether the embeddings are tied if config.json does not say.
        translation: keys that depend on each other; None: there are none.
        experts_of_layers: keys that say which layers have experts; None: all have, or none.
        nested: key of config.json that holds an object with some of the keys.
        former_types: model_type in older files.
    """

    model_type: str
    class_name: str
    names: Names | Callable[[ModelConfig], Names]
    has: Mapping[str, Any]
    numbers: tuple[Number, ...]
    activations: Mapping[str, MLPKind]
    activation_key: str = "hidden_act"
    flags: tuple[Flag, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    translation: Translation | None = None
    experts_of_layers: Translation | None = None
    nested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    former_types: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return any(number.ours == "moe.num_experts" for number in self.numbers)

    @property
    def translations(self) -> tuple[Translation, ...]:
        """Keys that depend on each other."""
        return tuple(one for one in (self.translation, self.experts_of_layers) if one is not None)

    def names_of(self, model: ModelConfig) -> Names:
        """Names of the modules of a model."""
        return self.names(model) if callable(self.names) else self.names

    def keys(self) -> set[str]:
        """Keys of config.json that the table knows."""
        numbers = {name for number in self.numbers for name in number.theirs}
        translated = {name for translation in self.translations for name in translation.theirs}
        flags = (flag.theirs for flag in self.flags)
        return {*numbers, *flags, *translated, *self.fixed, *self.nested, self.activation_key}

    def refusals(self, model: ModelConfig) -> list[str]:
        """Returns what of a model the architecture cannot express; empty if it can express all of it."""
        found = []
        for name, value in self._fixed_fields().items():
            wanted, given = value(model) if callable(value) else value, effective(model, name)
            # Biases that the architecture always has are written as zeros if the model has none.
            if given != wanted and not (name in {*BIASES, "bias"} and wanted):
                told = f"model.{name} = {as_override(given)}"
                found.append(f"{told} where {self.model_type} has {as_override(wanted)}")
        if model.mlp not in self.activations.values():
            kinds = ", ".join(dict.fromkeys(self.activations.values()))
            found.append(f"model.mlp = {model.mlp} where {self.model_type} has {kinds}")
        if self.has_experts and not model.moe.enabled:
            found.append(f"model.moe.num_experts = 0 where {self.model_type} has experts")
        found += [refusal for translation in self.translations if (refusal := translation.refusal(model))]
        if len(_dynamic_lengths(model)) > 1:
            found.append("dynamic rope_scaling of several original_max_seq_len")
        if model.mup.base_width is not None and not model.norm_affine:
            found.append("model.mup.base_width, whose multipliers are exported in the weights of norms, which it lacks")
        return [*found, *([f"model.block.name = {model.block.name}"] if model.block.is_custom else [])]

    def with_all_biases(self, model: ModelConfig) -> ModelConfig:
        """The model with every bias that the architecture has, given those that the model has."""
        told = {**self._fixed_fields(), **{n: f.write(model) is not f.inverted for f in self.flags for n in f.ours}}
        biases: dict[str, Any] = {name: bool(told[name]) for name in BIASES}
        return replace(model, bias=bool(told["bias"]), head_bias=bool(told["head_bias"]), **biases)

    def config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Returns config.json of a model, without the tokenizer's keys."""
        content = {"model_type": self.model_type, "architectures": [self.class_name], **self.fixed}
        content |= {number.theirs[0]: number.write(model) for number in self.numbers}
        content |= {flag.theirs: flag.write(model) for flag in self.flags}
        if self.activation_key:
            content[self.activation_key] = next(n for n, kind in self.activations.items() if kind is model.mlp)
        if Position.rope in {kind.position for kind, _ in model.layer_kinds()}:
            parameters = {**scaling_content(model.rope_scaling), "rope_theta": model.rope_theta}
            if model.rotary_fraction != 1.0:
                parameters["partial_rotary_factor"] = model.rotary_fraction
            # transformers 4 reads rope_scaling.
            scaled = None if model.rope_scaling == RopeScalingConfig() else parameters
            content |= {"rope_parameters": parameters, "rope_scaling": scaled}
            if model.rope_scaling.kind is RopeScaling.longrope:  # Phi-3 reads it from here
                content[_ORIGINAL] = model.rope_scaling.original_max_seq_len
            for length in _dynamic_lengths(model):
                content["max_position_embeddings"] = length
        for translation in self.translations:
            content |= translation.write(model)
        for outer, inner in self.nested.items():
            content[outer] = {name: content.pop(name) for name in inner}
        return {**content, "initializer_range": model.weight_std, "tie_word_embeddings": model.tie_embeddings}

    def model_of(self, config_json: Content) -> ModelConfig:
        """Returns the model that a config.json describes.

        Raises:
            ConfigError: megads does not support the model; the message names the key.
        """
        content = _flat(config_json, self.nested)
        for key, wanted in self.fixed.items():
            given = content.get(key, wanted)
            if given != wanted:
                raise ConfigError(f"config.json: {key} = {given!r}: megads computes {wanted!r} only")
        values = {name: value for name, value in self._fixed_fields().items() if not callable(value)}
        values |= {number.ours: number.read(content) for number in self.numbers}
        values |= {name: flag.read(content) for flag in self.flags for name in flag.ours}
        values["mlp"] = self._activation(content)
        if "rope_theta" in values:
            values["rope_scaling"] = scaling_of(content)
        for translation in self.translations:
            values |= translation.read(content)
        if not any("layer_pattern" in translation.ours for translation in self.translations):
            _require_equal_layers(content)
        values["tie_embeddings"] = bool(content.get("tie_word_embeddings", self.tied))
        values["init_std"] = Number("init_std", ("initializer_range", "init_std"), float, None).read(content) or None
        values |= _one_bias(values)
        experts = {name[len(EXPERTS) :]: values.pop(name) for name in list(values) if name.startswith(EXPERTS)}
        if self.has_experts:
            if experts["num_experts"] < 1:
                raise ConfigError(f"config.json: it has {experts['num_experts']} experts: want at least 1")
            values["moe"] = MoEConfig(**experts)
        model = ModelConfig(**values)
        model.check()
        refused = self.refusals(model)
        if refused:
            raise ConfigError(f"config.json: {'; '.join(refused)}")
        return model

    def _fixed_fields(self) -> dict[str, Any]:
        """Fields that the keys of config.json do not change, with their values."""
        told = {number.ours for number in self.numbers} | {name for flag in self.flags for name in flag.ours}
        told |= {name for translation in self.translations for name in translation.ours}
        if "rope_theta" in told:
            told.add("rope_scaling")
        biases = dict.fromkeys(("bias", *BIASES), self.has.get("bias", False))
        fields = {**_USUAL, **(_USUAL_EXPERTS if self.has_experts else {}), **biases, **self.has}
        return {name: value for name, value in fields.items() if name not in told or name in self.has}

    def _activation(self, content: Content) -> MLPKind:
        first = next(iter(self.activations))
        given = content.get(self.activation_key, first) if self.activation_key else first
        if given in _TANH_GELUS and given not in self.activations:
            given = "gelu_pytorch_tanh"
        if not isinstance(given, str) or given not in self.activations:
            raise ConfigError(
                f"config.json: {self.activation_key} = {given!r}: megads computes {', '.join(self.activations)} only"
            )
        return self.activations[given]


_TANH_GELUS = ["gelu_new", "gelu_pytorch_tanh", "gelu_fast"]
"""Hugging Face's names of the tanh approximation of GELU."""


def effective(model: ModelConfig, name: str) -> Any:
    """Returns a field of a model, with null replaced by the value that it stands for."""
    match name:
        case "num_kv_heads":
            return model.kv_heads
        case "head_size":
            return model.head_dim
        case "ffn_size":
            return model.ffn_width
        case "bias":  # of the norms: the projections have fields of their own
            return model.bias and model.norm is NormKind.layernorm and model.norm_affine
        case "attention_multiplier":
            value, usual = model.attention_multiplier, model.head_dim**-0.5
            return None if value is None or math.isclose(value, usual) else value
        case "qk_norm_width":
            return model.qk_norm_width if model.qk_norm else QKNormWidth.head
        case "moe.expert_ffn_size":
            return model.expert_width
        case _ if name.startswith(EXPERTS):
            return getattr(model.moe, name[len(EXPERTS) :])
        case _:
            return getattr(model, f"has_{name}" if name in BIASES else name)


def share_of_hidden(model: ModelConfig) -> float:
    """hidden_size / num_heads: the size of a head if config.json has no key for it."""
    share, rest = divmod(model.hidden_size, model.num_heads)
    return model.hidden_size / model.num_heads if rest else share


def _one_bias(values: Mapping[str, Any]) -> dict[str, Any]:
    """model.bias alone where it says everything, so that presets stay short."""
    parts = {values[name] for name in BIASES}
    norms = values["bias"] if values.get("norm") is NormKind.layernorm and values.get("norm_affine", True) else None
    if len(parts) == 1 and norms in (None, *parts):
        return {"bias": parts.pop(), **dict.fromkeys(BIASES)}
    return {"bias": bool(norms)}


def _require_equal_layers(content: Content) -> None:
    layer_types = content.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(f"config.json: layer_types = {layer_types!r}: megads has full_attention in every layer")


def _flat(config_json: Content, nested: Mapping[str, tuple[str, ...]]) -> Content:
    """Adds the keys of objects inside a config.json, such as rope_parameters of transformers 5.

    Raises:
        ConfigError: one of them is not an object.
    """
    content = dict(config_json)
    parameters = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    objects = {"rope_parameters": parameters, **{name: config_json.get(name) or {} for name in nested}}
    for name, found in objects.items():
        if not isinstance(found, Mapping):
            raise ConfigError(f"config.json: {name} = {found!r}: want an object")
    told = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    content |= {told[name]: value for name, value in parameters.items() if name in told}
    for name, inner in nested.items():
        content |= {key: objects[name][key] for key in inner if key in objects[name]}
    return content


_SCALING_KEYS = {
    RopeScaling.none: {},
    RopeScaling.linear: {"factor": "factor"},
    RopeScaling.dynamic: {"factor": "factor"},
    RopeScaling.llama3: {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
    RopeScaling.yarn: {
        "factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
    RopeScaling.longrope: {
        "factor": "factor", "attention_factor": "attention_factor",
        "short_factor": "short_factor", "long_factor": "long_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
}  # fmt: skip
"""Keys of rope_parameters for the fields of RopeScalingConfig."""
_ORIGINAL = "original_max_position_embeddings"


def scaling_content(scaling: RopeScalingConfig) -> dict[str, Any]:
    """RoPE scaling as keys of rope_parameters."""
    kind = "default" if scaling.kind is RopeScaling.none else scaling.kind.value
    values = {theirs: getattr(scaling, ours) for ours, theirs in _SCALING_KEYS[scaling.kind].items()}
    return {"rope_type": kind, **{name: value for name, value in values.items() if value is not None}}


def _scaling_value(name: str, theirs: str, found: Content) -> Any:
    """A field of RopeScalingConfig from rope_parameters; None if the key is absent."""
    if not name.endswith(("short_factor", "long_factor")):
        kind = int if name == "original_max_seq_len" else float
        return Number(name, (theirs,), kind, None).read(found)
    factors = found.get(theirs)
    if not isinstance(factors, list):
        raise ConfigError(f"config.json: rope_parameters has {theirs} = {factors!r}: want a list of numbers")
    return [Number(name, (theirs,), float).read({theirs: factor}) for factor in factors]


def _dynamic_lengths(model: ModelConfig) -> set[int]:
    """Lengths up to which dynamic scaling changes nothing; transformers has one, max_position_embeddings."""
    scalings = [kind.rope_scaling for kind in model.length_dependent_layers()]
    return {scaling.original_max_seq_len for scaling in scalings if scaling.kind is RopeScaling.dynamic}


def scaling_of(config_json: Content) -> RopeScalingConfig:
    """Returns the RoPE scaling that a config.json describes.

    Raises:
        ConfigError: megads does not support it.
    """
    found = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    kind = RopeScaling.longrope.value if kind == "su" else kind  # its name in the first files of Phi-3
    if kind not in ["default", *RopeScaling]:
        raise ConfigError(
            f"config.json: rope_type = {kind!r}: megads computes default, {', '.join(list(RopeScaling)[1:])}"
        )
    scaling = RopeScaling.none if kind == "default" else RopeScaling(kind)
    names = _SCALING_KEYS[scaling]
    told = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    others = {key: found[key] for key in found.keys() - set(names.values()) - told if found[key] is not None}
    # transformers computes dynamic scaling from max_position_embeddings, even if this key is there.
    if others.get(_ORIGINAL) == config_json.get("max_position_embeddings") and scaling is RopeScaling.dynamic:
        del others[_ORIGINAL]
    # Other keys, such as YaRN's mscale, change the attention scale in transformers.
    if others and scaling is not RopeScaling.none:
        raise ConfigError(f"config.json: rope_parameters has {others}, which megads does not compute")
    found_values = {ours: _scaling_value(ours, theirs, found) for ours, theirs in names.items()}
    values = {name: value for name, value in found_values.items() if value is not None}
    longest = Number("", ("max_position_embeddings",), default=None).read(config_json)
    if scaling is RopeScaling.longrope and config_json.get(_ORIGINAL) is not None:
        values["original_max_seq_len"] = Number("", (_ORIGINAL,)).read(config_json)
    if scaling not in (RopeScaling.none, RopeScaling.linear) and "original_max_seq_len" not in values:
        values["original_max_seq_len"] = Number("", ("max_position_embeddings",)).read(config_json)
    if scaling is RopeScaling.longrope and "factor" not in values and longest is not None:
        values["factor"] = max(1.0, longest / max(1, values["original_max_seq_len"]))
    made = RopeScalingConfig(kind=scaling, **values)
    made.check()
    return made
