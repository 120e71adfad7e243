"""Reads the ZeRO-1 optimizer state of DeepSpeed pipeline modules: fp32 weights and moments in flat partitions.

    global_step100/bf16_zero_pp_rank_7_mp_rank_03_optim_states.pt    data parallel rank 7 of model parallel rank 3
    global_step100/mp_rank_03_model_states.pt                        shapes of the parameters of that rank

Model parallel rank = stage * tensor parallel size + tensor parallel rank. A partition records the offset and the number
of elements of each of its parameters; the remaining elements are in the partitions of the next ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megads.errors import CheckpointError
from megads.tools.exchange.layer_files import Layer, layers_of
from megads.tools.exchange.pickles import attributes, load_mapping
from megads.tools.exchange.source import MOMENTS, WEIGHT, Stored

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
    tensors: dict[str, dict[int, dict[str, list[Stored]]]] = {kind: defaultdict(dict) for kind in (WEIGHT, *MOMENTS)}
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


def _rank(folder: Path, rank: int, files: Mapping[int, Path], steps: set[int]) -> dict[str, dict[str, Stored]]:
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
    found: dict[str, dict[str, Stored]] = {}
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
            found[kind][name] = Stored(shape, partial(_joined, parts, shape), where)
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
