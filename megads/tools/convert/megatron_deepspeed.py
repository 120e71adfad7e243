"""Reads checkpoints of Megatron-DeepSpeed: BigScience's fork, which trained BLOOM, and Microsoft's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megads.api import CheckpointError, ConfigError, MLPKind, ModelConfig, NormKind, Position
from megads.tools.convert.deepspeed_files import (
    FIRST_STATE_FILE,
    GATES_FIRST,
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
from megads.tools.convert.pickles import Record, attributes, load_mapping
from megads.tools.convert.source import WEIGHT, Arguments, Source, TrainingProgress

_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}
"""Values of the enum PositionEmbeddingType."""


def is_this_format(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    found = latest_step_folder(folder)
    return any(found.glob("layer_*-model_*-model_states.pt"))


def open_source(folder: Path, config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: megads does not support the model.
        CheckpointError: a file is missing or damaged.
    """
    found = latest_step_folder(folder)
    state = load_mapping(found / FIRST_STATE_FILE)
    arguments = read_arguments(state, found / FIRST_STATE_FILE)
    model = model_of(arguments)
    tp = arguments.integer("tensor_model_parallel_size", None)
    layers: dict[str, Sequence[Layer]] = {WEIGHT: read_layers(found, tp)}
    progress = read_progress(state, arguments)
    if config.optimizer and has_optimizer_state(found):
        optimizer = read_optimizer_state(found, tp or 1)
        layers, progress = {**optimizer.layers}, with_steps(progress, optimizer.steps)
    pp = arguments.integer("pipeline_model_parallel_size", 1)
    return Source(
        title=f"Megatron-DeepSpeed, {found.name}, tensor parallel {tp or 1}, pipeline parallel {pp}",
        told_by=arguments.origin,
        model=model,
        names=NAMES,
        tensors={kind: decoder_tensors(of, stacked_projections(model)) for kind, of in layers.items()},
        unpadded=vocabulary_before_padding(state),
        progress=progress,
    )


def with_steps(progress: TrainingProgress, steps: int) -> TrainingProgress:
    """Returns the progress with the number of steps that the optimizer took."""
    return replace(progress, step=max(progress.step, steps), optimizer_steps=steps)


def stacked_projections(model: ModelConfig) -> tuple[StackedProjection, ...]:
    """Returns the projections that are stacked in the files."""
    return (GATES_FIRST,) if model.mlp is MLPKind.swiglu else ()


def read_arguments(state: Mapping[str, Any], path: Path) -> Arguments:
    """Returns the training's arguments from the saved state.

    Args:
        state: content of the trainer's state file.
        path: path of that file, for messages.

    Raises:
        CheckpointError: the state has no arguments.
    """
    values = attributes(state.get("args"))
    if not values:
        raise CheckpointError(f"{path}: holds no args, which describe the model")
    return Arguments(values, f"args of {path.name}")


def model_of(arguments: Arguments) -> ModelConfig:
    """Returns the model that a training's arguments describe.

    Raises:
        ConfigError: megads does not support the model; the message names the argument.
    """
    arguments.require("glu_activation")
    for name in ("apply_residual_connection_post_layernorm", "apply_layernorm_1p", "onnx_safe"):
        arguments.require(name, False)
    arguments.require("num_experts", 1, [1])
    norm = arguments.values.get("normalization")
    arguments.require("normalization", "layernorm", "rmsnorm", "LayerNorm", "RMSNorm")
    rms = norm is not None and norm.lower() == "rmsnorm"
    bias = arguments.flag("add_bias_linear", True)
    if not bias and not rms:
        raise ConfigError(
            f"{arguments.origin}: add_bias_linear = False: megads has biases in norms and projections, or in neither"
        )
    hidden, heads = arguments.integer("hidden_size"), arguments.integer("num_attention_heads")
    position = _position(arguments)
    model = ModelConfig(
        num_layers=arguments.integer("num_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=arguments.integer("num_key_value_heads", None),
        ffn_size=arguments.integer("ffn_hidden_size", None),
        vocab_size=arguments.integer("padded_vocab_size"),
        max_seq_len=arguments.integer("max_position_embeddings", None) or arguments.integer("seq_length"),
        position=position,
        rope_theta=arguments.number("rope_theta", 10000.0),
        rotary_fraction=arguments.number("rotary_percent", 1.0) if position is Position.rope else 1.0,
        norm=NormKind.rmsnorm if rms else NormKind.layernorm,
        bias=bias,
        mlp=_mlp(arguments, bias),
        embedding_norm=arguments.flag("embed_layernorm"),
        tie_embeddings=not arguments.flag("untie_embeddings_and_output_weights"),
        hidden_dropout=arguments.number("hidden_dropout", 0.0),
        attention_dropout=arguments.number("attention_dropout", 0.0),
        norm_eps=arguments.number("layernorm_epsilon", 1e-5),
        init_std=arguments.number("init_method_std", None) or None,
    )
    model.check()
    if arguments.integer("kv_channels", model.head_dim) != model.head_dim:
        raise ConfigError(f"{arguments.origin}: kv_channels = {arguments.values['kv_channels']}: want {model.head_dim}")
    return model


def _mlp(arguments: Arguments, bias: bool) -> MLPKind:
    """Returns the kind of the MLP; without its fused kernel, which needs biases, Megatron computes the exact GELU."""
    kinds = {"swiglu": MLPKind.swiglu, "squared_relu": MLPKind.relu2, "openai_gelu": MLPKind.gelu}
    given = [name for name in kinds if arguments.flag(name)]
    if len(given) > 1:
        raise ConfigError(f"{arguments.origin}: {' and '.join(given)} are both set: want one activation")
    if given:
        return kinds[given[0]]
    return MLPKind.gelu if bias and arguments.flag("bias_gelu_fusion", True) else MLPKind.gelu_exact


def _position(arguments: Arguments) -> Position:
    """Returns the position embedding: an enum in BigScience's fork, two Boolean arguments in Microsoft's."""
    given = arguments.values.get("position_embedding_type")
    if isinstance(given, Record):
        *_, member = given.arguments or (None,)  # its value, or its class and its name
        given = _POSITIONS.get(member, member) if isinstance(member, int) else member
    if arguments.flag("use_rotary_position_embeddings") or given in ("rotary", "rope"):
        return Position.rope
    if given == "alibi":
        return Position.alibi
    if given in (None, "absolute", "learned_absolute") and arguments.flag("add_position_embedding", True):
        return Position.learned
    raise ConfigError(
        f"{arguments.origin}: position_embedding_type = {given!r}: megads computes alibi, rotary and absolute"
    )


def vocabulary_before_padding(state: Mapping[str, Any]) -> int | None:
    """Returns the vocabulary size before padding, or None if the checkpoint does not contain it."""
    for key in ("universal_checkpoint_info", "checkpoint_info"):
        size = attributes(state.get(key)).get("original_vocab_size")
        if isinstance(size, int) and size > 0:
            return size
    return None


def read_progress(state: Mapping[str, Any], arguments: Arguments) -> TrainingProgress:
    """Returns the training progress that the checkpoint records."""

    def count(*values: Any) -> int:
        return next((value for value in values if isinstance(value, int) and 0 <= value < 2**63), 0)

    step = count(state.get("iteration"), state.get("global_steps"))
    return TrainingProgress(
        step=step,
        samples=count(arguments.values.get("consumed_train_samples"), state.get("global_samples")),
        tokens=count(state.get("tokens"), arguments.values.get("consumed_train_tokens")),
        optimizer_steps=max(0, step - count(state.get("skipped_steps"))),
    )
