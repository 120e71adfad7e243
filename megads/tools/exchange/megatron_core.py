"""Reads Megatron-LM's distributed checkpoints (`--ckpt-format torch_dist`), written by megatron.core.

    latest_checkpointed_iteration.txt    100
    iter_0000100/.metadata               files of the parts of each tensor
    iter_0000100/__0_0.distcp, ...       the parts
    iter_0000100/common.pt               the arguments of the training
    iter_0000100/metadata.json           {"sharded_backend": "torch_dist", ...}

Tensors are unsharded regardless of the layout. Layers are stacked in one tensor, or each layer has its own.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from megads.errors import CheckpointError, ConfigError
from megads.runtime.files import read_regular
from megads.tools.exchange.arguments import Arguments
from megads.tools.exchange.config import ImportConfig
from megads.tools.exchange.distributed_files import METADATA_FILE, DistributedFiles
from megads.tools.exchange.hugging_face import read_json_object
from megads.tools.exchange.layer_files import NAMES, merged
from megads.tools.exchange.megatron_deepspeed import arguments_of, model_of, progress_of, stacks_of
from megads.tools.exchange.pickles import load_mapping
from megads.tools.exchange.source import WEIGHT, Source, Stored

_POINTER, _COMMON_FILE, _FORMAT_FILE = "latest_checkpointed_iteration.txt", "common.pt", "metadata.json"
_LAYERS = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)\.(\w+)")
_OUTER = {
    "embedding.word_embeddings": "word_embeddings",
    "embedding.position_embeddings": "position_embeddings",
    "decoder.final_layernorm": "final_layernorm",
    "output_layer": "lm_head",
}
_BLOCK = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_FUSED_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "post_attention_layernorm"}
"""Norms that Transformer Engine fuses into the next projection, stored as <projection>.layer_norm_weight."""


def lies_in(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    found = _step_folder(folder)
    return (found / METADATA_FILE).is_file() and (found / _COMMON_FILE).is_file()


def open_source(folder: Path, _config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: megads does not support the model or the format.
        CheckpointError: a file is missing or damaged.
    """
    found = _step_folder(folder)
    backend = read_json_object(found / _FORMAT_FILE, CheckpointError).get("sharded_backend")
    if backend != "torch_dist":
        raise ConfigError(f"{found / _FORMAT_FILE}: sharded_backend = {backend!r}: megads reads torch_dist")
    state = load_mapping(found / _COMMON_FILE)
    arguments = translated(arguments_of(state, found / _COMMON_FILE))
    model = model_of(arguments)
    files = DistributedFiles(found)
    tensors: dict[str, Stored] = {}
    for name in files.shapes:
        if name.startswith(("optimizer.", "rng_state", "rerun_state")) or name.endswith("_extra_state"):
            continue
        for ours, stored in _named(files, name).items():
            tensors |= merged(ours, [stored], stacks_of(model))
    return Source(
        title=f"Megatron-LM, {found.name}, torch_dist",
        told_by=arguments.origin,
        model=model,
        names=NAMES,
        tensors={WEIGHT: tensors},
        progress=progress_of(state, arguments),
    )


def _step_folder(folder: Path) -> Path:
    pointer = folder / _POINTER
    if pointer.is_file():
        try:
            return folder / f"iter_{int(read_regular(pointer)):07d}"
        except (ValueError, OSError):
            return folder
    return folder


def translated(arguments: Arguments) -> Arguments:
    """Returns Megatron-LM's arguments under Megatron-DeepSpeed's names.

    Raises:
        ConfigError: megads does not support the model.
    """
    values = arguments.values
    for name in (
        "qk_layernorm", "multi_latent_attention", "add_qkv_bias", "rotary_interleaved", "use_rope_scaling",
        "layernorm_zero_centered_gamma", "quick_geglu", "heterogeneous_layers_config_path",
    ):  # fmt: skip
        arguments.require(name, False)
    for name in ("window_size", "mtp_num_layers", "rotary_seq_len_interpolation_factor"):
        arguments.require(name)
    grouped = values.get("num_query_groups") if values.get("group_query_attention") else None
    renamed = {"num_key_value_heads": grouped, "rope_theta": values.get("rotary_base")}
    if values.get("norm_epsilon") is not None:
        renamed["layernorm_epsilon"] = values["norm_epsilon"]
    return Arguments({**values, **renamed}, arguments.origin)


def _named(files: DistributedFiles, name: str) -> dict[str, Stored]:
    """Returns a tensor under Megatron-DeepSpeed's name, or one per layer if layers are stacked."""
    match = _LAYERS.fullmatch(name)
    if match is None:
        module, _, kind = name.rpartition(".")
        return {f"{_OUTER.get(module, module)}.{kind}": files.stored(name)}
    number, module, kind = match.groups()
    if kind.startswith("layer_norm_") and module in _FUSED_NORMS:
        inner = f"{_FUSED_NORMS[module]}.{kind.removeprefix('layer_norm_')}"
    else:
        inner = f"{_BLOCK.get(module, module)}.{kind}"
    if number is not None or not files.shapes[name]:
        return {f"layers.{number}.{inner}": files.stored(name)}
    return {f"layers.{index}.{inner}": files.stored(name, index) for index in range(files.shapes[name][0])}
