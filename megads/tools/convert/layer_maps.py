"""Layers that differ, as config.json describes them: with a sliding window, without positions, without experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from megads.api import ConfigError, ModelConfig, Position
from megads.model.config import LayerKind
from megads.model.rope_scaling import RopeScalingConfig
from megads.tools.convert.architecture import Content, Number, scaling_content, scaling_of

_SLIDING, _FULL = "sliding_attention", "full_attention"


def pattern_of(kinds: Sequence[LayerKind]) -> list[LayerKind]:
    """The shortest `layer_pattern` of a model with one kind per layer; empty if all layers are equal to the model.

    Args:
        kinds: kind of each layer, one layer each.
    """
    if all(kind == LayerKind() for kind in kinds):
        return []
    repeat = next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return [replace(kind, layers=len(list(same))) for kind, same in groupby(kinds[:repeat])]


def period(content: Content, key: str, default: int | None = None) -> int:
    """A number of layers in config.json.

    Raises:
        ConfigError: it is no positive number.
    """
    count: int = Number("", (key,), default=... if default is None else default).read(content)
    if count < 1:
        raise ConfigError(f"config.json: {key} = {count}: must be at least 1")
    return count


@dataclass(frozen=True)
class SlidingLayers:
    """Some layers attend to a sliding window: layer_types and sliding_window.

    Attributes:
        slides: whether a layer, by its index, slides if config.json has no layer_types.
        thetas: default bases of the rotary frequencies in full and in sliding layers, which rope_parameters states
            apart; None: all layers have the same.
    """

    slides: Callable[[Content, int], bool]
    thetas: tuple[float, float] | None = None
    ours: ClassVar[tuple[str, ...]] = ("window", "layer_pattern")
    theirs: ClassVar[tuple[str, ...]] = (
        "layer_types",
        "sliding_window",
        "sliding_window_pattern",
        "rope_local_base_freq",
    )

    def refusal(self, model: ModelConfig) -> str:
        """Positions that differ, several windows, or frequencies that differ between layers of one type."""
        layers = [model.layer(index) for index in range(model.num_layers)]
        windows = {layer.window for layer in layers} - {None}
        ropes = {bool(layer.window): (layer.rope_theta, layer.rope_scaling) for layer in layers}
        unequal = any(ropes[bool(layer.window)] != (layer.rope_theta, layer.rope_scaling) for layer in layers)
        unequal |= self.thetas is None and len(set(ropes.values())) > 1
        if len(windows) > 1 or unequal or {layer.position for layer in layers} != {Position.rope}:
            return "model.layer_pattern has other kinds than layers with one sliding window and layers without"
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        layers = [model.layer(index) for index in range(model.num_layers)]
        sliding = next((layer for layer in layers if layer.window is not None), None)
        full = next((layer for layer in layers if layer.window is None), model)
        window = None if sliding is None else sliding.window
        types = [_FULL if layer.window is None else _SLIDING for layer in layers]
        content: dict[str, Any] = {"layer_types": types, "sliding_window": window}
        if self.thetas is None:
            return content
        ropes = {
            name: {**scaling_content(layer.rope_scaling), "rope_theta": layer.rope_theta}
            for name, layer in ((_FULL, full), (_SLIDING, sliding or full))
        }
        scaled = None if full.rope_scaling == RopeScalingConfig() else ropes[_FULL]
        return {
            **content, "rope_parameters": ropes, "rope_theta": full.rope_theta, "rope_scaling": scaled,
            "rope_local_base_freq": (sliding or full).rope_theta,
        }  # fmt: skip

    def read(self, config_json: Content) -> dict[str, Any]:
        count = period(config_json, "num_hidden_layers")
        types = config_json.get("layer_types") or [
            _SLIDING if self.slides(config_json, index) else _FULL for index in range(count)
        ]
        if not isinstance(types, list) or len(types) < count or not all(kind in (_SLIDING, _FULL) for kind in types):
            raise ConfigError(f"config.json: layer_types = {types!r}: want {_SLIDING} or {_FULL} for every layer")
        types = types[:count]
        window = Number("window", ("sliding_window",), default=None).read(config_json)
        if _SLIDING in types and window is None:
            raise ConfigError(f"config.json: sliding_window is missing, and layer_types has {_SLIDING}")
        found: dict[str, Any] = {}
        sliding = LayerKind(window=window)
        if self.thetas is not None:
            found, local = _ropes(config_json, *self.thetas)
            if local != found:
                sliding = LayerKind(window=window, **local)
        if set(types) == {_SLIDING}:
            own = {name: value for name, value in vars(sliding).items() if name != "layers" and value is not None}
            return {**found, **own, "layer_pattern": []}
        kinds = [sliding if kind == _SLIDING else LayerKind() for kind in types]
        return {**found, "window": None, "layer_pattern": pattern_of(kinds)}


def _ropes(config_json: Content, full_theta: float, sliding_theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """rope_theta and rope_scaling of full layers, then of sliding layers."""
    told = config_json.get("rope_parameters") or {}
    if _FULL not in told:  # as in files of transformers 4
        told = {
            _FULL: {**(config_json.get("rope_scaling") or {}), "rope_theta": config_json.get("rope_theta")},
            _SLIDING: {"rope_theta": config_json.get("rope_local_base_freq")},
        }
    found = []
    for name, default in ((_FULL, full_theta), (_SLIDING, sliding_theta)):
        own = told.get(name) or {}
        if not isinstance(own, Mapping):
            raise ConfigError(f"config.json: rope_parameters has {name} = {own!r}: want an object")
        others = {"rope_scaling": None, "original_max_position_embeddings": None}
        scaling = scaling_of({**config_json, "rope_parameters": own, **others})
        found.append({"rope_theta": Number("", ("rope_theta",), float, default).read(own), "rope_scaling": scaling})
    return found[0], found[1]


@dataclass(frozen=True)
class LayersWithoutPositions:
    """Every n-th layer has no positions: no_rope_layers of SmolLM3, 1 for a layer with rope, 0 for one without."""

    ours: ClassVar[tuple[str, ...]] = ("position", "layer_pattern")
    theirs: ClassVar[tuple[str, ...]] = ("no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window")

    def refusal(self, model: ModelConfig) -> str:
        """Layers that differ in anything else."""
        plain = replace(model, layer_pattern=[], position=Position.rope, attention=model.attention)
        layers = (replace(model.layer(index), attention=model.attention) for index in range(model.num_layers))
        positions = {kind.position for kind, _ in model.layer_kinds()}
        if positions <= {Position.rope, Position.none} and all(
            replace(layer, position=Position.rope) == plain for layer in layers
        ):
            return ""
        return "model.layer_pattern has other kinds than layers with rope and layers without positions"

    def write(self, model: ModelConfig) -> dict[str, Any]:
        has_rope = [int(model.layer(index).position is Position.rope) for index in range(model.num_layers)]
        return {"no_rope_layers": has_rope, "layer_types": [_FULL] * model.num_layers, "use_sliding_window": False}

    def read(self, config_json: Content) -> dict[str, Any]:
        if config_json.get("use_sliding_window"):
            raise ConfigError("config.json: use_sliding_window = true: megads computes false only")
        count, told = period(config_json, "num_hidden_layers"), config_json.get("no_rope_layers")
        every = period(config_json, "no_rope_layer_interval", 4)
        told = told if told is not None else [int((index + 1) % every != 0) for index in range(count)]
        if not isinstance(told, list) or len(told) < count or not all(has_rope in (0, 1) for has_rope in told):
            raise ConfigError(f"config.json: no_rope_layers = {told!r}: want 0 or 1 for every layer")
        kinds = [LayerKind() if has_rope else LayerKind(position=Position.none) for has_rope in told[:count]]
        return {"position": Position.rope, "layer_pattern": pattern_of(kinds)}


@dataclass(frozen=True)
class WindowIfUsed:
    """sliding_window, in all layers, only applies with use_sliding_window (Qwen3-MoE)."""

    ours: ClassVar[tuple[str, ...]] = ("window",)
    theirs: ClassVar[tuple[str, ...]] = ("use_sliding_window", "sliding_window", "max_window_layers")

    def refusal(self, model: ModelConfig) -> str:
        """Nothing: any window can be written."""
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"use_sliding_window": model.window is not None, "sliding_window": model.window}

    def read(self, config_json: Content) -> dict[str, Any]:
        if not config_json.get("use_sliding_window"):
            return {"window": None}
        default = None if "sliding_window" in config_json else 4096
        return {"window": Number("window", ("sliding_window",), default=default).read(config_json)}


@dataclass(frozen=True)
class QwenExpertLayers:
    """Every decoder_sparse_step-th layer has experts, unless it is one of mlp_only_layers (Qwen's MoE)."""

    ours: ClassVar[tuple[str, ...]] = ("moe.first_dense", "moe.interval")
    theirs: ClassVar[tuple[str, ...]] = ("decoder_sparse_step", "mlp_only_layers")

    def refusal(self, model: ModelConfig) -> str:
        """Nothing: the first layers, and every n-th one, can be written."""
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"decoder_sparse_step": model.moe.interval, "mlp_only_layers": list(range(model.moe.first_dense))}

    def read(self, config_json: Content) -> dict[str, Any]:
        step, count = period(config_json, "decoder_sparse_step", 1), period(config_json, "num_hidden_layers", 24)
        dense = config_json.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise ConfigError(f"config.json: mlp_only_layers = {dense!r}: want a list of layers")
        holders = range(step - 1, count, step)
        without = [layer for layer in holders if layer in dense]
        if without != list(holders[: len(without)]):
            raise ConfigError(
                f"config.json: mlp_only_layers = {dense}: megads supports the first layers only, with "
                f"decoder_sparse_step = {step} the first of {list(holders[:4])}, ..."
            )
        first = without[-1] + 1 if without else 0
        while first in dense:
            first += 1
        return {"moe.first_dense": first, "moe.interval": step}


_PUBLISHED_BIAS_RATE = 0.001
"""DeepSeek-V3's; config.json says nothing about the training."""


@dataclass(frozen=True)
class BiasedExperts:
    """The first layers have no experts, the others a bias that selects them, and several shared experts (GLM-4.5)."""

    ours: ClassVar[tuple[str, ...]] = ("moe.first_dense", "moe.bias_rate", "moe.shared_ffn_size")
    theirs: ClassVar[tuple[str, ...]] = ("first_k_dense_replace", "n_shared_experts")

    def refusal(self, model: ModelConfig) -> str:
        """Experts selected without a bias, and a shared expert that is not as wide as some of the others."""
        if not model.moe.selects_by_bias:
            return f"model.moe.bias_rate = {model.moe.bias_rate} where experts are selected with a bias"
        shared, width = model.moe.shared_ffn_size, model.expert_width
        if not shared or shared % width:
            return f"model.moe.shared_ffn_size = {shared} where it is a multiple of an expert's width, {width}"
        return ""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        shared = model.moe.shared_ffn_size // model.expert_width
        return {"first_k_dense_replace": model.moe.first_dense, "n_shared_experts": shared}

    def read(self, config_json: Content) -> dict[str, Any]:
        width: int = Number("", ("moe_intermediate_size",), default=1408).read(config_json)
        dense: int = Number("", ("first_k_dense_replace",), default=1).read(config_json)
        shared = period(config_json, "n_shared_experts", 1) * width
        return {"moe.first_dense": dense, "moe.bias_rate": _PUBLISHED_BIAS_RATE, "moe.shared_ffn_size": shared}
