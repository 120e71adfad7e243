"""Reads GPT-NeoX checkpoints: DeepSpeed pipeline modules with GPT-NeoX's names and settings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megads.api import ConfigError, MLPKind, ModelConfig, NormKind, Position, read_regular
from megads.tools.convert.deepspeed_files import (
    FIRST_STATE_FILE,
    NAMES,
    Layer,
    StackedProjection,
    decoder_tensors,
    has_optimizer_state,
    latest_step_folder,
    read_layers,
    read_optimizer_state,
)
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.megatron_deepspeed import read_progress, with_steps
from megads.tools.convert.pickles import attributes, load_mapping
from megads.tools.convert.source import WEIGHT, Arguments, Source, SourceTensor, summed

_CONFIGS = "configs"
_RENAMED = (
    ("attention.", "self_attention."),
    ("mlp.linear1.", "mlp.dense_h_to_4h."),
    ("mlp.linear2.", "mlp.dense_4h_to_h."),
    ("mlp.w1.", "mlp.gate."),
    ("mlp.w3.", "mlp.up."),
    ("mlp.w2.", "mlp.dense_4h_to_h."),
    ("final_linear.", "lm_head."),
)
"""Name prefixes of several versions, and Megatron-DeepSpeed's."""
_UPS_FIRST = StackedProjection("mlp.dense_h_to_4h", ("mlp.up", "mlp.gate"), (1, 1))
_QKV = tuple(f"self_attention.{part}" for part in ("query", "key", "value"))
_POSITIONS = {"learned": Position.learned, "rotary": Position.rope, "alibi": Position.alibi}


def is_this_format(folder: Path) -> bool:
    """Returns whether a folder has the files of this format: layers start at the embedding, settings are YAML."""
    found = latest_step_folder(folder)
    return any(found.glob("layer_*-model_*-model_states.pt")) and (
        (found / _CONFIGS).is_dir() or any(found.glob("layer_00-model_*-model_states.pt"))
    )


def open_source(folder: Path, config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: the settings are missing, or describe a model that megads does not support.
        CheckpointError: a file is missing or damaged.
    """
    found = latest_step_folder(folder)
    state = load_mapping(found / FIRST_STATE_FILE)
    settings = Arguments(
        _settings(found / _CONFIGS) | attributes(state.get("args")), f"{_CONFIGS} and args of {found.name}"
    )
    model = model_of(settings)
    tp = settings.integer("model_parallel_size", None)
    by_kind: dict[str, Sequence[Layer]] = {WEIGHT: read_layers(found, tp)}
    progress = read_progress(state, settings)
    if config.optimizer and has_optimizer_state(found):
        optimizer = read_optimizer_state(found, tp or 1)
        by_kind, progress = {**optimizer.layers}, with_steps(progress, optimizer.steps)
    layers = {kind: [_renamed(layer, model, kind) for layer in of] for kind, of in by_kind.items()}
    if model.mlp is MLPKind.swiglu:
        # The rule that derives the width of a gated MLP from the setting differs between versions.
        model = replace(model, ffn_size=_mlp_width(layers[WEIGHT]))
    separate = model.num_kv_heads not in (None, model.num_heads)
    stacks: list[StackedProjection] = [_UPS_FIRST] if model.mlp is MLPKind.swiglu else []
    if separate:
        shares = (model.queries_per_kv, 1, 1)
        stacks.append(StackedProjection("self_attention.query_key_value", _QKV, shares))
    return Source(
        title=f"GPT-NeoX, {found.name}, tensor parallel {tp or 1}",
        told_by=settings.origin,
        model=model,
        names=replace(NAMES, block={**NAMES.block, "attention.qkv": _QKV}) if separate else NAMES,
        tensors={kind: decoder_tensors(of, stacks) for kind, of in layers.items()},
        progress=progress,
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the merged settings of all YAML files of a folder, with underscores in their names.

    Raises:
        ConfigError: there are no files, or a file is not YAML.
    """
    files = sorted(path for path in folder.glob("*.y*ml")) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            f"{folder}: holds no *.yml: GPT-NeoX saves its settings there; copy the training's settings there, which "
            "describe the model"
        )
    found: dict[str, Any] = {}
    for path in files:
        try:
            content = yaml.safe_load(read_regular(path))
        except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: holds no settings")
        found |= {str(name).replace("-", "_"): value for name, value in content.items()}
    return found


def model_of(settings: Arguments) -> ModelConfig:
    """Returns the model that settings describe.

    Raises:
        ConfigError: megads does not support the model; the message names the setting.
    """
    settings.require("norm", "layernorm", "rmsnorm")
    settings.require("pos_emb", *_POSITIONS)
    settings.require("activation", "gelu", "swiglu")
    settings.require("moe_num_experts", 1)
    for name in ("use_qk_layernorm", "use_mup", "te_layernorm_mlp", "te_mha"):
        settings.require(name, False)
    gated = settings.values.get("activation") == "swiglu"
    # The fused kernel computes the tanh approximation.
    gelu = MLPKind.gelu if settings.flag("bias_gelu_fusion") else MLPKind.gelu_exact
    parallel = settings.flag("gpt_j_residual")
    attention_bias, mlp_bias = (settings.flag(f"use_bias_in_{name}", True) for name in ("attn_linear", "mlp"))
    rms = settings.values.get("norm") == "rmsnorm"
    bias = attention_bias if rms else settings.flag("use_bias_in_norms", True)
    position = _POSITIONS[settings.values.get("pos_emb") or "learned"]
    epsilon = ("rms_norm_epsilon", 1e-8) if rms else ("layernorm_epsilon", 1e-5)
    model = ModelConfig(
        num_layers=settings.integer("num_layers"),
        hidden_size=settings.integer("hidden_size"),
        num_heads=settings.integer("num_attention_heads"),
        num_kv_heads=settings.integer("num_kv_heads", None),
        ffn_size=settings.integer("intermediate_size", None),
        vocab_size=settings.integer("padded_vocab_size"),
        max_seq_len=settings.integer("max_position_embeddings"),
        position=position,
        rope_theta=settings.number("rotary_emb_base", 10000.0),
        rotary_fraction=settings.number("rotary_pct", 1.0) if position is Position.rope else 1.0,
        norm=NormKind.rmsnorm if rms else NormKind.layernorm,
        bias=bias,
        qkv_bias=None if attention_bias == bias else attention_bias,
        attention_output_bias=None if attention_bias == bias else attention_bias,
        mlp_bias=None if mlp_bias == bias else mlp_bias,
        mlp=MLPKind.swiglu if gated else gelu,
        parallel_block=parallel,
        parallel_norms=2 if parallel and not settings.flag("gpt_j_tied") else 1,
        embedding_norm=False,
        tie_embeddings=not settings.flag("no_weight_tying"),
        hidden_dropout=settings.number("hidden_dropout", 0.0),
        attention_dropout=settings.number("attention_dropout", 0.0),
        norm_eps=settings.number(*epsilon),
        init_std=settings.number("init_method_std", None) or None,
    )
    model.check()
    return model


def _mlp_width(layers: Sequence[Layer]) -> int | None:
    """Returns the input width of the first MLP's down projection; the other layers are checked against it."""
    name = "mlp.dense_4h_to_h.weight"
    shards = next((layer.shards[name] for layer in layers if name in layer.shards), ())
    return sum(part.shape[-1] for part in shards if part.shape) or None


def _renamed(layer: Layer, model: ModelConfig, kind: str) -> Layer:
    """Returns a layer with Megatron-DeepSpeed's names."""
    shards: dict[str, Sequence[SourceTensor]] = {}
    for name, parts in layer.shards.items():
        # A parallel block with one norm has a second norm that is not used.
        if model.parallel_block and model.parallel_norms == 1 and name.startswith("post_attention_layernorm."):
            continue
        ours = _ours(name)
        terms = model.parallel_block and ours in ("self_attention.dense.bias", "mlp.dense_4h_to_h.bias")
        # Every tensor-parallel rank adds its own bias before the all-reduce; all have the gradient of the sum.
        shards[ours] = [summed(parts)] if terms and kind == WEIGHT else parts
    return replace(layer, shards=shards)


def _ours(name: str) -> str:
    for theirs, ours in _RENAMED:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    return f"{name.removesuffix('.scale')}.weight" if name.endswith(".scale") else name
