"""Reads DeepSpeed pipeline modules: the weights of each layer, and the ZeRO-1 optimizer state.

    latest                                                           global_step100
    global_step100/layer_03-model_00-model_states.pt                 layer 3 of the pipeline, tensor-parallel rank 0
    global_step100/mp_rank_00_model_states.pt                        other state that the trainer saved
    global_step100/bf16_zero_pp_rank_7_mp_rank_03_optim_states.pt    data-parallel rank 7 of model-parallel rank 3

Layer numbers include functions without weights, which differ between trainers. The kind of a layer is therefore
determined from its tensors.

The optimizer state has fp32 weights and moments in flat partitions; mp_rank_03_model_states.pt holds the shapes of the
parameters. Model parallel rank = stage * tensor parallel size + tensor parallel rank. A partition records the offset
and the number of elements of each of its parameters; the remaining elements are in the partitions of the next ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.api import CheckpointError
from megads.tools.convert.pickles import attributes, load_mapping
from megads.tools.convert.source import (
    MOMENTS,
    WEIGHT,
    SourceTensor,
    first_names_are,
    held,
    joined,
    replicated,
    split_rows,
)
from megads.tools.convert.weights import Names

UNIVERSAL_POINTERS = ("latest_universal", "latest")
"""Files that contain the name of the newest universal checkpoint in a folder."""
FIRST_STATE_FILE = "mp_rank_00_model_states.pt"
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_FINAL_NORM = {"weight", "bias", "scale", "norm.weight", "norm.bias", "norm.scale"}
_HEADS = {"lm_head.weight", "final_linear.weight"}
_COLUMN = re.compile(r"(word_embeddings|lm_head|query_key_value|dense_h_to_4h|mlp\.gate|mlp\.up)\.(weight|bias)$")
"""Column-parallel tensors, which tensor parallelism shards along the first dimension."""
_ROW = re.compile(r"(self_attention\.dense|dense_4h_to_h)\.weight$")
"""Row-parallel tensors, which tensor parallelism shards along the second dimension."""
_BUFFERS = ("._extra_state", ".inv_freq", ".rotary_emb.inv_freq")
NAMES = Names(
    outer={
        "embedding.word": "word_embeddings",
        "embedding.position": "position_embeddings",
        "embedding.norm": "word_embeddings.norm",
        "final_norm": "final_layernorm",
    },
    block={
        "input_norm": ("input_layernorm",),
        "attention.qkv": ("self_attention.query_key_value",),
        "attention.dense": ("self_attention.dense",),
        "post_attention_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.gate_up": ("mlp.gate", "mlp.up"),
        "mlp.down": ("mlp.dense_4h_to_h",),
    },
    prefix="layers.{}",
)
"""Megatron's names of an unsharded model, with separate gate and up projections, which are stacked in its files."""


@dataclass(frozen=True)
class StackedProjection:
    """A projection that, on each tensor-parallel rank, consists of the rows of several projections.

    Attributes:
        name: name of the stacked projection.
        parts: names of the projections in it, in row order.
        shares: relative numbers of rows of the projections.
    """

    name: str
    parts: tuple[str, ...]
    shares: tuple[int, ...]


class PipelinePart(StrEnum):
    """Part of the model that a pipeline layer is."""

    embedding = "embedding"
    block = "block"
    final_norm = "final norm"
    head = "head"


@dataclass(frozen=True)
class Layer:
    """A layer of the pipeline.

    Attributes:
        index: index in the pipeline.
        kind: kind of the layer.
        shards: tensor-parallel shards of each tensor, by the names in the files.
    """

    index: int
    kind: PipelinePart
    shards: Mapping[str, Sequence[SourceTensor]]


def latest_step_folder(folder: Path, pointers: Sequence[str] = ("latest",)) -> Path:
    """Returns the folder named by the first pointer file in `folder`, or `folder` itself if there is none."""
    for pointer in pointers:
        path = folder / pointer
        if path.is_file():
            name = path.read_text(errors="replace").strip()
            if name and Path(name).name == name and (folder / name).is_dir():
                return folder / name
    return folder


def read_layers(folder: Path, tp: int | None) -> list[Layer]:
    """Returns the layers of a checkpoint, in order.

    Args:
        folder: folder of the files.
        tp: tensor-parallel size; None derives it from the files.

    Raises:
        CheckpointError: a file is missing, damaged, or not a layer of a decoder.
    """
    found: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        match = LAYER_FILE.fullmatch(path.name)
        if match:
            found[int(match[1])][int(match[2])] = path
    ranks = tp if tp is not None else 1 + max((rank for ranks in found.values() for rank in ranks), default=0)
    layers = []
    for index, files in sorted(found.items()):
        missing = [rank for rank in range(ranks) if rank not in files]
        if missing or len(files) > ranks:
            named = f"layer_{index:02d}-model_{missing[0] if missing else max(files):02d}-model_states.pt"
            raise CheckpointError(
                f"{folder / named} is {'missing' if missing else 'one too many'}: the model was trained with tensor "
                f"parallelism of {ranks}"
            )
        shards = _shards([files[rank] for rank in range(ranks)])
        layers.append(Layer(index, _kind(str(files[0]), set(shards)), shards))
    return _ordered(folder, layers)


def layers_of(folder: Path, tensors: Mapping[int, Mapping[str, Sequence[SourceTensor]]]) -> list[Layer]:
    """Groups tensors into layers, in order.

    Args:
        folder: folder for messages.
        tensors: shards of each tensor, by layer index in the pipeline and name.

    Raises:
        CheckpointError: the layers are not those of a decoder.
    """
    layers = [Layer(index, _kind(f"{folder}: layer {index}", set(of)), of) for index, of in sorted(tensors.items())]
    return _ordered(folder, layers)


GATES_FIRST = StackedProjection("mlp.dense_h_to_4h", ("mlp.gate", "mlp.up"), (1, 1))


def decoder_tensors(layers: Sequence[Layer], stacks: Sequence[StackedProjection] = ()) -> dict[str, SourceTensor]:
    """Returns the tensors of a decoder by the names of `NAMES`, joined over the tensor-parallel ranks.

    Args:
        layers: layers with Megatron-DeepSpeed's names.
        stacks: projections that are stacked in the files and separate in the result.

    Raises:
        CheckpointError: the shapes of the shards do not match.
    """
    found: dict[str, SourceTensor] = {}
    number = 0
    for layer in layers:
        for name, parts in layer.shards.items():
            found |= merged(_full_name(layer.kind, number, name), parts, stacks)
        number += layer.kind is PipelinePart.block
    return found


def merged(
    name: str, parts: Sequence[SourceTensor], stacks: Sequence[StackedProjection] = ()
) -> dict[str, SourceTensor]:
    """Joins the tensor-parallel shards of a Megatron tensor; returns the tensors by the names of `NAMES`.

    Args:
        name: name as in `NAMES`, or of a stack.
        parts: shards of the ranks.
        stacks: projections that are stacked in the files and separate in the result.

    Raises:
        CheckpointError: the shapes of the shards do not match.
    """
    for stack in stacks:
        if f".{stack.name}." in name:
            apart = split_rows(parts, stack.shares)
            return {name.replace(stack.name, of): part for of, part in zip(stack.parts, apart, strict=True)}
    if _COLUMN.search(name):
        return {name: joined(parts)}
    return {name: joined(parts, 1) if _ROW.search(name) else replicated(parts)}


def _full_name(kind: PipelinePart, number: int, name: str) -> str:
    if kind is PipelinePart.block:
        return f"layers.{number}.{name}"
    return f"final_layernorm.{name.removeprefix('norm.')}" if kind is PipelinePart.final_norm else name


def _shards(paths: Sequence[Path]) -> dict[str, Sequence[SourceTensor]]:
    """Returns the tensors of one layer, as shards of all tensor-parallel ranks."""
    held_by_rank: list[dict[str, Any]] = []
    for path in paths:
        content = {name: item for name, item in load_mapping(path).items() if not name.endswith(_BUFFERS)}
        other = [name for name, item in content.items() if not isinstance(item, Tensor)]
        if other:
            raise CheckpointError(f"{path}: {other[0]} is not a tensor")
        held_by_rank.append(content)
    names = held_by_rank[0].keys()
    for path, content in zip(paths, held_by_rank, strict=True):
        if content.keys() != names:
            wrong = sorted(content.keys() ^ names)
            raise CheckpointError(
                f"{path} and {paths[0].name} hold different tensors: {first_names_are(wrong)} in one of them only"
            )
    return {
        name: [held(content[name], f"{path}: {name}") for path, content in zip(paths, held_by_rank, strict=True)]
        for name in names
    }


def _kind(where: str, names: set[str]) -> PipelinePart:
    if "word_embeddings.weight" in names:
        return PipelinePart.embedding
    if any(name.startswith(("self_attention.", "attention.")) for name in names):
        return PipelinePart.block
    if names and names <= _FINAL_NORM:
        return PipelinePart.final_norm
    if names and names <= _HEADS:
        return PipelinePart.head
    raise CheckpointError(f"{where}: holds no layer of a decoder, but {', '.join(sorted(names)[:3]) or 'nothing'}")


def _ordered(folder: Path, layers: list[Layer]) -> list[Layer]:
    """Checks the order of the layers and returns them.

    Raises:
        CheckpointError: they are not an embedding, blocks without a gap, a norm and optionally a head.
    """
    kinds = [layer.kind for layer in layers]
    blocks = [layer.index for layer in layers if layer.kind is PipelinePart.block]
    middle = [PipelinePart.embedding, *[PipelinePart.block] * len(blocks), PipelinePart.final_norm]
    if not blocks or blocks != list(range(blocks[0], blocks[0] + len(blocks))) or kinds not in (
        middle, [*middle, PipelinePart.head],
    ):  # fmt: skip
        order = ", ".join(f"{layer.index} {layer.kind}" for layer in layers) or "none"
        raise CheckpointError(
            f"{folder}: the layers are not an embedding, blocks without a gap, a norm and at most a head: a "
            f"layer is missing or one too many (found: {order})"
        )
    return layers


_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PARAMETER = re.compile(r"(?:tied_modules\.\w+|(\d+))\.(.+)")
_REMEDY = "optimizer=false imports only the weights"


@dataclass(frozen=True)
class OptimizerState:
    """Optimizer state of all ranks.

    Attributes:
        layers: layers of the pipeline by kind of tensor.
        steps: number of steps that the optimizer took.
    """

    layers: Mapping[str, Sequence[Layer]]
    steps: int


def has_optimizer_state(folder: Path) -> bool:
    """Returns whether a folder has files of optimizer state."""
    return any(_OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir())


def read_optimizer_state(folder: Path, tp: int) -> OptimizerState:
    """Reads the optimizer state of a checkpoint.

    Args:
        folder: folder of the files.
        tp: tensor-parallel size.

    Raises:
        CheckpointError: a rank's file is missing, damaged or incomplete.
    """
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match:
            files[int(match[2])][int(match[1])] = path
    missing = sorted(set(range(max(files) + 1)) - files.keys())
    if missing or len(files) % tp:
        rank = missing[0] if missing else len(files)
        raise CheckpointError(
            f"{folder}: the optimizer's state of model parallel rank {rank} is missing (tensor parallelism of {tp}); "
            f"{_REMEDY}"
        )
    tensors: dict[str, dict[int, dict[str, list[SourceTensor]]]] = {
        kind: defaultdict(dict) for kind in (WEIGHT, *MOMENTS)
    }
    steps: set[int] = set()
    for first in range(0, len(files), tp):
        ranks = [_rank(folder, rank, files[rank], steps) for rank in range(first, first + tp)]
        for kind, by_layer in tensors.items():
            for name in ranks[0][kind]:
                index, inner = _place(folder, name)
                if any(name not in rank[kind] for rank in ranks):
                    raise CheckpointError(f"{folder}: {name} ({kind}) is missing on some tensor-parallel ranks")
                # A tied embedding is on the first and the last stage.
                by_layer[index].setdefault(inner, [rank[kind][name] for rank in ranks])
    if len(steps) != 1:
        raise CheckpointError(f"{folder}: the optimizers say different numbers of steps: {sorted(steps)}; {_REMEDY}")
    return OptimizerState({kind: layers_of(folder, by_layer) for kind, by_layer in tensors.items()}, steps.pop())


def _place(folder: Path, name: str) -> tuple[int, str]:
    """Returns the layer index of a parameter and its name in the layer."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{folder}: {name} is not a parameter of a pipeline module; {_REMEDY}")
    return int(match[1] or 0), match[2]


def _rank(folder: Path, rank: int, files: Mapping[int, Path], steps: set[int]) -> dict[str, dict[str, SourceTensor]]:
    """Returns the tensors of a model parallel rank by kind and name; adds its optimizers' step counts to `steps`."""
    shapes_file = folder / f"mp_rank_{rank:02d}_model_states.pt"
    groups = load_mapping(shapes_file).get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"{shapes_file}: holds no param_shapes; {_REMEDY}")
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items() if isinstance(shape, torch.Size)}
    fragments: dict[str, dict[str, list[Tensor]]] = {kind: defaultdict(list) for kind in (WEIGHT, *MOMENTS)}
    count = max(files) + 1
    for data_rank in range(count):
        if data_rank not in files:
            raise CheckpointError(
                f"{folder}: the optimizer's state of data parallel rank {data_rank} of {count}, model parallel rank "
                f"{rank}, is missing; {_REMEDY}"
            )
        size = _slices(files[data_rank], fragments, steps)
        if size not in (None, count):
            raise CheckpointError(
                f"{files[data_rank]}: says a data-parallel size of {size}, but there are {count} files; {_REMEDY}"
            )
    found: dict[str, dict[str, SourceTensor]] = {}
    for kind, by_name in fragments.items():
        found[kind] = {}
        for name, parts in by_name.items():
            shape, elements = shapes.get(name), sum(part.numel() for part in parts)
            if shape is None or prod(shape) != elements:
                raise CheckpointError(
                    f"{folder}: of {name} ({kind}), model parallel rank {rank} has {elements} elements, by "
                    f"param_shapes its shape is {shape and list(shape)}"
                )
            where = f"{folder}: {name} ({kind}) of model parallel rank {rank}"
            found[kind][name] = SourceTensor(shape, partial(_joined, parts, shape), where)
    return found


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]).reshape(shape)


def _slices(path: Path, fragments: Mapping[str, dict[str, list[Tensor]]], steps: set[int]) -> int | None:
    """Adds a file's slices of the parameters; returns the number of partitions, or None if the file does not say."""
    state = load_mapping(path).get("optimizer_state_dict")
    try:
        mappings, optimizer = state["param_slice_mappings"], state["base_optimizer_state"]  # type: ignore[index]
        states = optimizer["state"]
        for group, mapping in enumerate(mappings):
            flat = {WEIGHT: state["single_partition_of_fp32_groups"][group]}  # type: ignore[index]
            flat |= {kind: states[group][kind] for kind in MOMENTS}
            step = states[group].get("step", optimizer["param_groups"][group].get("step"))
            steps.add(int(step))
            for name, address in mapping.items():
                place = attributes(address)
                start, stop = place["start"], place["start"] + place["numel"]
                for kind, tensor in flat.items():
                    if not 0 <= start <= stop <= tensor.numel():
                        raise ValueError(f"{name} exceeds its partition")
                    fragments[kind][name].append(tensor[start:stop])
        counts = state.get("partition_count")  # type: ignore[union-attr]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: lacks the positions of parameters ({type(error).__name__}: {error}), which later versions of "
            f"DeepSpeed write; {_REMEDY}"
        ) from error
    first = counts[0] if isinstance(counts, list) and counts else counts
    return first if isinstance(first, int) else None
