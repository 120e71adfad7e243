"""Reads nanotron's Llama checkpoints: one file per parameter or per shard of it.

    latest.txt                       100
    100/checkpoint_metadata.json     versions, layout, progress
    100/model_config.json            the model, with keys like those of transformers
    100/model/model/decoder/0/pp_block/attn/qkv_proj/
        model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors, ...
    100/model/model/decoder/0/pp_block/input_layernorm/model_weight.safetensors

The header of a shard contains its slices of the unsharded parameter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megads.api import CheckpointError, ConfigError, ModelConfig, read_regular
from megads.checkpoint.rank_file import Rectangle, coverage_fault
from megads.tools.convert.families.llama import LLAMA
from megads.tools.convert.hugging_face import read_json_object
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.source import WEIGHT, Source, SourceTensor, require_float, rows

_POINTER, _CONFIG_FILE, _METADATA_FILE = "latest.txt", "model_config.json", "checkpoint_metadata.json"
_PART = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+))?\.safetensors")
_BLOCK = re.compile(r"model\.decoder\.(\d+)\.pp_block\.(.+)")
_OUTER = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": "model.embed_tokens.weight",
    "model.final_layer_norm.pp_block.weight": "model.norm.weight",
    "model.lm_head.pp_block.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class _Slice:
    """A rectangle of a file's tensor and its position in the unsharded parameter."""

    local: Rectangle
    whole: Rectangle


@dataclass(frozen=True)
class _File:
    path: Path
    slices: tuple[_Slice, ...]


def is_this_format(folder: Path) -> bool:
    """Returns whether a folder has the files of this format."""
    found = _step_folder(folder)
    return (found / _METADATA_FILE).is_file() and (found / "model").is_dir()


def open_source(folder: Path, _config: ImportConfig, _stack: ExitStack) -> Source:
    """Opens the checkpoint in a folder.

    Raises:
        ConfigError: model_config.json is missing, or describes a model that megads does not support.
        CheckpointError: a file is missing or damaged.
    """
    found = _step_folder(folder)
    content = read_json_object(found / _CONFIG_FILE, ConfigError)
    if content.get("is_llama_config") is not True:
        raise ConfigError(f"{found / _CONFIG_FILE}: is_llama_config is not true: of nanotron, megads reads Llama only")
    try:
        model = LLAMA.model_of(content)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json", _CONFIG_FILE, 1)) from error
    metadata = read_json_object(found / _METADATA_FILE, CheckpointError)
    # nanotron 0.4 has only interleaved rotation, and no key for it.
    interleaved = content.get("rope_interleaved", True)
    tensors: dict[str, SourceTensor] = {}
    for name, stored in _parameters(found / "model").items():
        tensors |= _named(name, stored, model, bool(interleaved))
    return Source(
        title=f"nanotron Llama, {found.name}, tensor parallel {metadata.get('tp')}",
        told_by=_CONFIG_FILE,
        model=model,
        names=LLAMA.names_of(model),
        tensors={WEIGHT: tensors},
    )


def _step_folder(folder: Path) -> Path:
    pointer = folder / _POINTER
    if pointer.is_file():
        try:
            return folder / str(int(read_regular(pointer)))
        except (ValueError, OSError):
            return folder
    return folder


def _parameters(folder: Path) -> dict[str, SourceTensor]:
    """Returns the unsharded parameters by nanotron's names.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    parts: dict[str, dict[int, Path]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("model_*.safetensors")):
        match = _PART.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path}: is not a file name of nanotron")
        name = ".".join((*path.relative_to(folder).parent.parts, match[1]))
        rank, size = int(match[2] or 0), int(match[3] or 1)
        if rank in parts[name] or sizes.setdefault(name, size) != size:
            raise CheckpointError(f"{path} and {next(iter(parts[name].values())).name} have different layouts")
        parts[name][rank] = path
    for name, found in parts.items():
        missing = sorted(set(range(sizes[name])) - found.keys())
        if missing:
            raise CheckpointError(
                f"{folder}: of {name}, the part of tensor parallel rank {missing[0]} of {sizes[name]} is missing"
            )
    return {name: _whole(name, [found[rank] for rank in sorted(found)]) for name, found in parts.items()}


def _whole(name: str, paths: Sequence[Path]) -> SourceTensor:
    """Returns a parameter whose shards are in several files."""
    shapes, files = set(), []
    for path in paths:
        metadata, shape = _header(path)
        if "unsharded_shape" not in metadata:
            if len(paths) > 1:
                raise CheckpointError(f"{path}: does not say which shard of {name} it holds")
            return SourceTensor(shape, partial(_load, path), f"{path}")
        try:
            extents = metadata["unsharded_shape"].strip("()").split(",")
            whole = tuple(int(extent) for extent in extents if extent.strip())
            pairs = metadata["local_global_slices_pairs"].split(";")
            slices = tuple(_slice(pair, shape, whole) for pair in pairs)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: has wrong slices of {name}: {error}") from error
        shapes.add(whole)
        files.append(_File(path, slices))
    if len(shapes) != 1:
        raise CheckpointError(f"{paths[0].parent}: shards of {name} say different shapes: {sorted(shapes)}")
    (shape,) = shapes
    fault = coverage_fault(shape, (piece.whole for file in files for piece in file.slices))
    if fault:
        raise CheckpointError(f"{paths[0].parent}: {name} of shape {list(shape)} is not stored exactly once: {fault}")
    return SourceTensor(shape, partial(_joined, shape, files), f"{paths[0]}")


def _joined(shape: tuple[int, ...], files: Sequence[_File]) -> Tensor:
    found: Tensor | None = None
    for file in files:
        tensor = _load(file.path)
        if found is None:
            found = torch.empty(shape, dtype=tensor.dtype)
        for piece in file.slices:
            origin = Rectangle((0,) * tensor.dim(), tuple(tensor.shape))
            found[piece.whole.within(Rectangle((0,) * len(shape), shape))] = tensor[piece.local.within(origin)]
    assert found is not None
    return found


def _slice(text: str, local: tuple[int, ...], whole: tuple[int, ...]) -> _Slice:
    """Parses `0,10,None|None,None,None#0,20,None|None,None,None`: slices of the shard # slices of the parameter."""
    here, there = text.split("#")
    found = _Slice(_rectangle(here, local), _rectangle(there, whole))
    if found.local.shape != found.whole.shape:
        raise ValueError(f"{text} are slices of different sizes")
    return found


def _rectangle(text: str, shape: tuple[int, ...]) -> Rectangle:
    offset, extent = [], []
    for part, size in zip(text.split("|"), shape, strict=True):
        bounds = slice(*(None if item.strip() == "None" else int(item) for item in part.split(",")))
        start, stop, step = bounds.indices(size)
        if step != 1 or stop < start:
            raise ValueError(f"{part} is not a contiguous slice")
        offset.append(start)
        extent.append(stop - start)
    return Rectangle(tuple(offset), tuple(extent))


def _header(path: Path) -> tuple[dict[str, str], tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.metadata() or {}, tuple(file.get_slice("data").get_shape())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _load(path: Path) -> Tensor:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor("data")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return require_float(tensor, str(path))


def _named(name: str, stored: SourceTensor, model: ModelConfig, interleaved: bool) -> dict[str, SourceTensor]:
    """Returns a parameter under transformers' names, with stacked projections split."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return {_OUTER.get(name, name): stored}
    of, inner = f"model.layers.{match[1]}.", match[2]
    if inner == "attn.qkv_proj.weight":
        sizes = [heads * model.head_dim for heads in (model.num_heads, model.kv_heads, model.kv_heads)]
        query, key, value = _cut(stored, sizes)
        if interleaved:
            query, key = (_pairs_apart(part, model.head_dim) for part in (query, key))
        parts = zip("qkv", (query, key, value), strict=True)
        return {f"{of}self_attn.{kind}_proj.weight": part for kind, part in parts}
    if inner == "mlp.gate_up_proj.weight":
        gate, up = _cut(stored, [model.ffn_width, model.ffn_width])
        return {f"{of}mlp.gate_proj.weight": gate, f"{of}mlp.up_proj.weight": up}
    return {of + inner.replace("attn.", "self_attn."): stored}


def _cut(stored: SourceTensor, sizes: Sequence[int]) -> list[SourceTensor]:
    """Splits stacked projections by rows.

    Args:
        stored: the stacked projection.
        sizes: number of rows of each projection.

    Raises:
        CheckpointError: the number of rows differs from the sum of `sizes`.
    """
    if not stored.shape or stored.shape[0] != sum(sizes):
        raise CheckpointError(
            f"{stored.where} has shape {list(stored.shape)}, by {_CONFIG_FILE} it has {sum(sizes)} rows"
        )
    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return [rows(stored, edges[index], edges[index + 1]) for index in range(len(sizes))]


def _pairs_apart(stored: SourceTensor, head_dim: int) -> SourceTensor:
    """Reorders features from interleaved rotary pairs (neighbours) to pairs of one feature from each half."""

    def read() -> Tensor:
        heads = stored.read().reshape(-1, head_dim // 2, 2, *stored.shape[1:])
        return heads.transpose(1, 2).reshape(stored.shape)

    return SourceTensor(stored.shape, read, stored.where)
