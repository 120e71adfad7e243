"""Format-independent view of another trainer's checkpoint: model, names and tensors, which are read lazily.

Joins tensor-parallel shards. A tensor takes no memory before it is read.

`Arguments` gives typed access to the training settings that are stored in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megads.api import CheckpointError, ConfigError, ModelConfig
from megads.tools.convert.weights import Names

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, as named in megads' checkpoints."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMED = 5


@dataclass(frozen=True)
class SourceTensor:
    """A tensor on disk.

    Attributes:
        shape: shape, known without reading the tensor.
        read: function that reads the tensor; raises CheckpointError.
        where: file and name, for messages.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    where: str


Tensors: TypeAlias = Mapping[str, SourceTensor]


@dataclass(frozen=True)
class TrainingProgress:
    """Training progress of a model.

    Attributes:
        step: training steps, including skipped ones.
        samples: number of consumed samples.
        tokens: number of consumed tokens.
        optimizer_steps: steps that the optimizer took, for its bias correction.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Source:
    """A checkpoint of another trainer.

    Attributes:
        title: description for the user: trainer, class and layout.
        told_by: source of the model's config, such as config.json.
        model: config of the model, with the vocabulary size as stored.
        names: module names of the tensors.
        tensors: tensors by kind (`WEIGHT`, and both `MOMENTS` or none) and by the names of `names`.
        unpadded: vocabulary size before padding, if the checkpoint contains it.
        end_of_document_id: id of the tokenizer's end-of-document token, if the checkpoint contains it; not validated.
        progress: training progress; meaningless without moments.
        notes: remarks for the user.
    """

    title: str
    told_by: str
    model: ModelConfig
    names: Names
    tensors: Mapping[str, Tensors]
    unpadded: int | None = None
    end_of_document_id: Any = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    notes: tuple[str, ...] = ()


def require_float(tensor: Tensor, where: str) -> Tensor:
    """Returns the tensor.

    Raises:
        CheckpointError: the dtype is not floating-point.
    """
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{where} is {tensor.dtype}: want float32, bfloat16 or float16")
    return tensor


def held(tensor: Tensor, where: str) -> SourceTensor:
    """Returns a `SourceTensor` for a tensor of a memory-mapped file."""
    return SourceTensor(tuple(tensor.shape), lambda: require_float(tensor, where), where)


def joined(parts: Sequence[SourceTensor], dim: int = 0) -> SourceTensor:
    """Concatenates tensor-parallel shards along a dimension.

    Args:
        parts: shards in rank order.
        dim: dimension along which the tensor is sharded.

    Raises:
        CheckpointError: the shapes of the shards do not match.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        if _without(part.shape, dim) != _without(first.shape, dim) or len(first.shape) <= dim:
            raise CheckpointError(
                f"{part.where} has shape {list(part.shape)}, which does not fit {first.where} with {list(first.shape)}"
            )
    extent = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], extent, *first.shape[dim + 1 :])
    return SourceTensor(shape, lambda: torch.cat([part.read() for part in parts], dim), first.where)


def replicated(parts: Sequence[SourceTensor]) -> SourceTensor:
    """Returns a tensor that is replicated on the tensor-parallel ranks: the mean if the copies differ.

    Raises:
        CheckpointError: the shapes differ.
    """
    first = _same_shape(parts)

    def read() -> Tensor:
        copies = [part.read() for part in parts]
        if all(torch.equal(copies[0], copy) for copy in copies[1:]):
            return copies[0]
        return torch.stack([copy.float() for copy in copies]).mean(0)

    return SourceTensor(first.shape, read, first.where)


def summed(parts: Sequence[SourceTensor]) -> SourceTensor:
    """Returns the sum of the tensor-parallel ranks' tensors, in fp32 if there are several.

    Raises:
        CheckpointError: the shapes differ.
    """
    first = _same_shape(parts)
    if len(parts) == 1:
        return first
    return SourceTensor(first.shape, lambda: torch.stack([part.read().float() for part in parts]).sum(0), first.where)


def rows(stored: SourceTensor, start: int, stop: int) -> SourceTensor:
    """Returns rows `start` to `stop` of a tensor."""
    shape = (stop - start, *stored.shape[1:])
    return SourceTensor(shape, lambda: stored.read()[start:stop], stored.where)


def split_rows(parts: Sequence[SourceTensor], shares: Sequence[int]) -> list[SourceTensor]:
    """Splits tensors that are stacked in every shard, such as gate above up, and joins each over the shards.

    Args:
        parts: shards of the tensor-parallel ranks.
        shares: relative numbers of rows of the stacked tensors.

    Raises:
        CheckpointError: the number of rows is not divisible by the sum of `shares`.
    """
    total = sum(shares)
    for part in parts:
        if not part.shape or part.shape[0] % total:
            raise CheckpointError(f"{part.where} has shape {list(part.shape)}: its rows are not a multiple of {total}")
    edges = list(accumulate(shares, initial=0))
    return [
        joined([rows(part, part.shape[0] // total * start, part.shape[0] // total * stop) for part in parts])
        for start, stop in pairwise(edges)
    ]


def reshaped(stored: SourceTensor, shape: tuple[int, ...]) -> SourceTensor:
    """Returns a tensor reshaped.

    Raises:
        CheckpointError: the number of elements differs.
    """
    if prod(shape) != prod(stored.shape):
        raise CheckpointError(f"{stored.where} has shape {list(stored.shape)}: want the elements of {list(shape)}")
    return SourceTensor(shape, lambda: stored.read().reshape(shape), stored.where)


def separate_experts(stored: Tensors, names: Names) -> dict[str, SourceTensor]:
    """Returns the tensors of a model of transformers under the names of the hub, with a tensor for each expert.

    transformers 5 holds the experts of a layer as experts.gate_up_proj, [experts, gates then ups, hidden size], and
    experts.down_proj, [experts, hidden size, width], in a module `mlp`. Its save_pretrained writes the hub's names,
    unless it is called with save_original_format=False.

    Args:
        stored: tensors by their names in the files.
        names: module names of the architecture on the hub.
    """
    if "mlp.router" not in names.block:
        return dict(stored)
    module = names.block["mlp.router"][0].partition(".")[0]
    found: dict[str, SourceTensor] = {}
    for name, tensor in stored.items():
        prefix, _, kind = name.rpartition(".experts.")
        layer = prefix.removesuffix(".mlp")
        if layer == prefix or kind not in _STACKED or len(tensor.shape) != 3:
            found[name.replace(".mlp.", f".{module}.")] = tensor
            continue
        parts = names.block[_STACKED[kind]]
        experts, rows_ = tensor.shape[0], tensor.shape[1] // len(parts)
        for expert in range(experts):
            for number, part in enumerate(parts):
                found[f"{layer}.{part.format(expert)}.weight"] = _of_expert(tensor, expert, number * rows_, rows_)
    return found


_STACKED = {"gate_up_proj": "mlp.experts.gate_up", "down_proj": "mlp.experts.down"}


def _of_expert(stacked: SourceTensor, expert: int, start: int, count: int) -> SourceTensor:
    """Some rows of an expert; files are memory-mapped, so that only these are read."""
    return SourceTensor((count, stacked.shape[2]), lambda: stacked.read()[expert, start : start + count], stacked.where)


def first_names_are(names: Sequence[str]) -> str:
    """Returns the first few names followed by "is" or "are"."""
    more = f" and {len(names) - _NAMED} more are" if len(names) > _NAMED else " is" if len(names) == 1 else " are"
    return f"{', '.join(names[:_NAMED])}{more}"


def _same_shape(parts: Sequence[SourceTensor]) -> SourceTensor:
    first = parts[0]
    for part in parts:
        if part.shape != first.shape:
            raise CheckpointError(
                f"{part.where} has shape {list(part.shape)}, but {first.where} has {list(first.shape)}"
            )
    return first


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


_REQUIRED = object()


class Arguments:
    """Settings by name.

    Args:
        values: settings as stored in the checkpoint.
        origin: description for messages, such as `args of mp_rank_00_model_states.pt`.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = values, origin

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns an integer setting, or the default if the setting is absent or None.

        Raises:
            ConfigError: the value has another type, or is absent and has no default.
        """
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want an integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns a numeric setting as a float; see `integer`."""
        value = self._value(name, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want a number")
        return value if value is default else float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a Boolean setting; see `integer`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.origin}: {name} = {value!r}: want true or false")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Raises if a setting has a value that megads does not support.

        Args:
            name: name of the setting; an absent setting is accepted.
            allowed: supported values.

        Raises:
            ConfigError: the setting has another value.
        """
        value = self.values.get(name)
        if value is not None and value not in allowed:
            computed = " or ".join(repr(item) for item in allowed)
            told = f"megads computes {computed} only" if computed else "megads computes no model with it"
            raise ConfigError(f"{self.origin}: {name} = {value!r}: {told}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.origin}: {name} is missing")
            return default
        return value
