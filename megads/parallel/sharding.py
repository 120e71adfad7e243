"""Applies a sharding table to a stage: swaps layers, cuts heads, places parameters. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from megads.errors import ConfigError
from megads.ops.kernels import TORCH, Kernels
from megads.parallel.grid import Axis, padded_rows
from megads.parallel.region_linear import Region
from megads.parallel.table import Cut, ShardingTable
from megads.parallel.tensor import (
    ColumnParallelBranches,
    ColumnParallelLinear,
    PositionShardEmbedding,
    RowParallelBranches,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ParameterPlacement:
    """Where a rank's parameter lies in the unsharded one.

    Attributes:
        key: name of the unsharded parameter in the whole model.
        global_shape: its shape.
        dim: dim that is cut, None for a replicated parameter.
        start: first index along `dim` that this rank holds.
        length: indices along `dim` that are real; the rest of the local tensor is vocabulary padding.
        sequence_partial: a replicated parameter that meets only this rank's share of the sequence: its gradient is to
            be summed over tensor-parallel ranks.
    """

    key: str
    global_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    length: int = 0
    sequence_partial: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the real part of the local tensor."""
        return tuple(self.length if d == self.dim else size for d, size in enumerate(self.global_shape))


def _parallel_layer(layer: nn.Module, path: str, cut: Cut, region: Region) -> nn.Module:
    axis = region.axis
    if cut in (Cut.columns, Cut.rows):
        return ColumnParallelBranches(region) if cut is Cut.columns else RowParallelBranches(region)
    if cut in (Cut.column, Cut.row):
        assert isinstance(layer, nn.Linear)
        divided = layer.out_features if cut is Cut.column else layer.in_features
        if divided % axis.size:
            raise ConfigError(f"{path}: {divided} features cannot be cut over parallel.tp = {axis.size} ranks")
        make = ColumnParallelLinear if cut is Cut.column else RowParallelLinear
        return make(layer.in_features, layer.out_features, region, bias=layer.bias is not None)
    assert isinstance(layer.weight, Tensor)
    rows, hidden_size = layer.weight.shape
    if cut is Cut.sequence:
        return PositionShardEmbedding(rows, hidden_size, axis) if region.sequence_parallel else layer
    if cut is Cut.vocab:
        return VocabParallelEmbedding(rows, hidden_size, axis, region.sequence_parallel)
    return VocabParallelHead(rows, hidden_size, region)


def _placement(
    key: str, shape: tuple[int, ...], cut: Cut | None, axis: Axis, sequence_parallel: bool = False
) -> ParameterPlacement:
    dim = 1 if cut is Cut.row else 0
    if cut is None or cut is Cut.sequence or dim >= len(shape):  # the bias of a row-parallel layer is whole
        return ParameterPlacement(key, shape, sequence_partial=sequence_parallel)
    rows = padded_rows(shape[dim], axis.size)
    start = min(axis.rank * rows, shape[dim])
    return ParameterPlacement(key, shape, dim, start, max(0, min(rows, shape[dim] - axis.rank * rows)))


def _lookup(patterns: Mapping[str, T], path: str) -> T | None:
    """Value of the first pattern that matches a full module path."""
    return next((value for pattern, value in patterns.items() if fnmatchcase(path, pattern)), None)


def local_shape(key: str, shape: tuple[int, ...], table: ShardingTable, size: int) -> tuple[int, ...]:
    """Shape of one rank's tensor of a parameter, vocabulary padding included; nothing is built.

    Args:
        key: the parameter's name in the whole model.
        shape: its unsharded shape.
        table: how it may be cut.
        size: tensor-parallel ranks.
    """
    place = _placement(key, shape, _lookup(table.parameters, key.rpartition(".")[0]), Axis(0, tuple(range(size)), None))
    return tuple(padded_rows(rows, size) if dim == place.dim else rows for dim, rows in enumerate(shape))


def attention_cores(stage: nn.Module, name: str, table: ShardingTable) -> list[nn.Module]:
    """The modules of a stage that the table names as attention cores.

    Args:
        stage: the stage, cut or not.
        name: its prefix in the whole model.
        table: the patterns.
    """
    paths = ((f"{name}.{path}", module) for path, module in stage.named_modules())
    return [m for path, m in paths if any(fnmatchcase(path, pattern) for pattern in table.attention_cores)]


def shard_stage(
    stage: nn.Module,
    name: str,
    table: ShardingTable,
    axis: Axis,
    *,
    sequence_parallel: bool,
    chunks: int = 1,
    kernels: Kernels = TORCH,
) -> tuple[nn.Module, dict[str, ParameterPlacement]]:
    """Cuts a stage built on the meta device down to this rank's share.

    Args:
        stage: the unsharded stage, on the meta device.
        name: its prefix in the whole model.
        table: how it may be cut.
        axis: the tensor-parallel axis; size 1 runs the same layers without their collectives.
        sequence_parallel: outside of the regions each rank holds its share of dim 1 of the activations; of no effect
            on one rank.
        chunks: parts in which messages travel beside products; see `megads.parallel.region_linear.Region`.
        kernels: whose kernel multiplies.

    Returns:
        The stage (its root may have been replaced) and the placement of every parameter by its path in the stage.

    Raises:
        ConfigError: a size does not divide.
    """
    sequence_parallel = sequence_parallel and axis.size > 1
    region = Region(axis, sequence_parallel, chunks, kernels)
    placements = {}
    for path, parameter in stage.named_parameters():
        key = f"{name}.{path}"
        cut = _lookup(table.parameters, key.rpartition(".")[0])
        placements[path] = _placement(key, tuple(parameter.shape), cut, axis, sequence_parallel)

    for core in attention_cores(stage, name, table):
        core.narrow(axis.rank, axis.size)  # type: ignore[operator]
    for path, module in list(stage.named_modules()):
        full_path = f"{name}.{path}".rstrip(".")
        if sequence_parallel and any(fnmatchcase(full_path, pattern) for pattern in table.dropouts):
            module.shard = (axis.rank, axis.size)
        cut = _lookup(table.parameters, full_path)
        if cut is None:
            continue
        with torch.device("meta"):
            layer = _parallel_layer(module, full_path, cut, region)
        if path:
            stage.set_submodule(path, layer)
        else:
            stage = layer
    return stage, placements


def materialise(
    stage: nn.Module,
    placements: dict[str, ParameterPlacement],
    value: Callable[[str, tuple[int, ...]], Tensor],
    device: torch.device,
) -> nn.Module:
    """Allocates a stage's parameters and gives each its slice of the full initial value, one full tensor at a time.

    Sharded parameters are marked `tensor_model_parallel`, which is what the gradient norm goes by; those whose
    gradients must be summed over tensor-parallel ranks are marked `sequence_partial`.
    """
    _allocate(stage, device)
    for path, parameter in stage.named_parameters():
        place = placements[path]
        full = value(place.key, place.global_shape)
        with torch.no_grad():
            if place.dim is None:
                parameter.copy_(full)
            else:
                parameter.zero_()
                parameter.narrow(place.dim, 0, place.length).copy_(full.narrow(place.dim, place.start, place.length))
        parameter.tensor_model_parallel = place.dim is not None  # type: ignore[attr-defined]
        parameter.sequence_partial = place.sequence_partial  # type: ignore[attr-defined]
        del full  # before the next one is drawn
    return stage


def _allocate(stage: nn.Module, device: torch.device) -> None:
    """Moves parameters off the meta device, their values undefined.

    `Module.to_empty` does the same by way of torch's symbolic shapes, which load sympy: 0.4 s of each rank's start.
    """
    assert not list(stage.buffers()), "a buffer would stay on the meta device"
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
