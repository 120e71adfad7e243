"""Reads Megatron-LM's distributed checkpoints (`--ckpt-format torch_dist`), written by megatron.core.

    latest_checkpointed_iteration.txt    100
    iter_0000100/.metadata               files of the parts of each tensor
    iter_0000100/__0_0.distcp, ...       the parts
    iter_0000100/common.pt               the arguments of the training
    iter_0000100/metadata.json           {"sharded_backend": "torch_dist", ...}

Tensors are unsharded regardless of the layout. Layers are stacked in one tensor, or each layer has its own.

The pickle `.metadata` maps parts of tensors to files. torch's reader executes it; this one executes nothing.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.api import CheckpointError, ConfigError, read_regular, reason_of
from megads.checkpoint.rank_file import Rectangle, coverage_fault
from megads.tools.convert.deepspeed_files import NAMES, merged
from megads.tools.convert.hugging_face import read_json_object
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.megatron_deepspeed import model_of, read_arguments, read_progress, stacked_projections
from megads.tools.convert.pickles import Named, load_inert, load_mapping, read_inert
from megads.tools.convert.source import WEIGHT, Arguments, Source, SourceTensor, require_float

METADATA_FILE = ".metadata"


@dataclass(frozen=True)
class StoredPart:
    """Location of a part of a tensor.

    Attributes:
        rectangle: position of the part in the tensor.
        file: name of the file in the checkpoint's folder.
        start: offset in the file, in bytes.
        length: length in the file, in bytes.
    """

    rectangle: Rectangle
    file: str
    start: int
    length: int


class DistributedFiles:
    """The tensors of a distributed checkpoint.

    Attributes:
        shapes: shapes of the tensors by name.

    Args:
        folder: folder of the files.

    Raises:
        CheckpointError: `.metadata` is missing or damaged, or parts of tensors are missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / METADATA_FILE
        try:
            metadata = read_inert(read_regular(path))
            self.shapes, self._parts = _contents(metadata)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path}: is not the metadata of a distributed checkpoint: {error}") from error
        for name, shape in self.shapes.items():
            fault = coverage_fault(shape, (part.rectangle for part in self._parts[name]))
            if fault:
                raise CheckpointError(f"{path}: {name} of shape {list(shape)} is not stored exactly once: {fault}")
        for file in {part.file for parts in self._parts.values() for part in parts}:
            if Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder / file} is missing, which {METADATA_FILE} names")

    def stored(self, name: str, index: int | None = None) -> SourceTensor:
        """Returns a tensor, or the slice at an index of its first dimension.

        Args:
            name: name of the tensor.
            index: index of a layer, if the tensor has the layers stacked.
        """
        whole, where = self.shapes[name], f"{self._folder}: {name}"
        if index is None:
            wanted = Rectangle((0,) * len(whole), whole)
            return SourceTensor(whole, lambda: self._read(name, wanted), where)
        layer = Rectangle((index, *(0 for _ in whole[1:])), (1, *whole[1:]))
        return SourceTensor(whole[1:], lambda: self._read(name, layer)[0], f"{where}, layer {index}")

    def _read(self, name: str, wanted: Rectangle) -> Tensor:
        found: Tensor | None = None
        for part in self._parts[name]:
            overlap = part.rectangle.overlap(wanted)
            if overlap is None:
                continue
            tensor = self._load(name, part)
            if found is None:
                found = torch.empty(wanted.shape, dtype=tensor.dtype)
            found[overlap.within(wanted)] = tensor[overlap.within(part.rectangle)]
        assert found is not None, name
        return found

    def _load(self, name: str, part: StoredPart) -> Tensor:
        path = self._folder / part.file
        where = f"{path}: {name} at {list(part.rectangle.offset)}"
        try:
            with path.open("rb") as file:
                file.seek(part.start)
                content = file.read(part.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
        if len(content) != part.length:
            raise CheckpointError(f"{where}: the file is too short")
        tensor = load_inert(io.BytesIO(content), where)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != part.rectangle.shape:
            raise CheckpointError(f"{where}: is not a tensor of shape {list(part.rectangle.shape)}")
        return require_float(tensor, where)


def _contents(metadata: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, list[StoredPart]]]:
    """Returns the shapes and parts of the tensors; skips other objects."""
    shapes, parts = {}, defaultdict(list)
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    for index, info in metadata.values["storage_data"].items():
        if index.values.get("offset") is not None:
            places[index.values["fqn"], _extents(index.values["offset"])] = info
    for name, entry in metadata.values["state_dict_metadata"].items():
        if not isinstance(entry, Named) or "chunks" not in entry.values:
            continue
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")
        shapes[name] = _extents(entry.values["size"])
        for chunk in entry.values["chunks"]:
            rectangle = Rectangle(_extents(chunk.values["offsets"]), _extents(chunk.values["sizes"]))
            info = places[name, rectangle.offset].values
            if info.get("transform_descriptors") or not isinstance(info["relative_path"], str):
                raise ValueError(f"{name} is compressed, or has no file")
            parts[name].append(StoredPart(rectangle, info["relative_path"], int(info["offset"]), int(info["length"])))
    return shapes, dict(parts)


def _extents(size: Any) -> tuple[int, ...]:
    """Returns the extents of a torch.Size, which is constructed from a tuple of integers."""
    found = size.arguments[0] if isinstance(size, Named) else size
    if not isinstance(found, tuple) or not all(isinstance(extent, int) and extent >= 0 for extent in found):
        raise ValueError(f"{found!r} is not a shape")
    return found


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


def is_this_format(folder: Path) -> bool:
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
    arguments = to_deepspeed_names(read_arguments(state, found / _COMMON_FILE))
    model = model_of(arguments)
    files = DistributedFiles(found)
    tensors: dict[str, SourceTensor] = {}
    for name in files.shapes:
        if name.startswith(("optimizer.", "rng_state", "rerun_state")) or name.endswith("_extra_state"):
            continue
        for ours, stored in _named(files, name).items():
            tensors |= merged(ours, [stored], stacked_projections(model))
    return Source(
        title=f"Megatron-LM, {found.name}, torch_dist",
        told_by=arguments.origin,
        model=model,
        names=NAMES,
        tensors={WEIGHT: tensors},
        progress=read_progress(state, arguments),
    )


def _step_folder(folder: Path) -> Path:
    pointer = folder / _POINTER
    if pointer.is_file():
        try:
            return folder / f"iter_{int(read_regular(pointer)):07d}"
        except (ValueError, OSError):
            return folder
    return folder


def to_deepspeed_names(arguments: Arguments) -> Arguments:
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
    if arguments.flag("openai_gelu"):
        # The models of megatron.core do not read it.
        arguments.require("bias_gelu_fusion", True)
    for name in ("window_size", "mtp_num_layers", "rotary_seq_len_interpolation_factor"):
        arguments.require(name)
    grouped = values.get("num_query_groups") if values.get("group_query_attention") else None
    renamed = {"num_key_value_heads": grouped, "rope_theta": values.get("rotary_base")}
    if values.get("norm_epsilon") is not None:
        renamed["layernorm_epsilon"] = values["norm_epsilon"]
    return Arguments({**values, **renamed}, arguments.origin)


def _named(files: DistributedFiles, name: str) -> dict[str, SourceTensor]:
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
