"""A checkpoint of another trainer, as every format presents it: a model, its names, tensors that are read when asked.

Shards of tensor parallelism are joined here. Nothing of a tensor is in memory before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megads.errors import CheckpointError
from megads.model.config import ModelConfig
from megads.tools.hugging_face.weights import Names

WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
"""Kinds of tensors, as checkpoints of megads call them."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMED = 5


@dataclass(frozen=True)
class Stored:
    """A tensor on disk.

    Attributes:
        shape: its extents, known without reading it.
        read: reads it; raises CheckpointError.
        where: file and name, for messages.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    where: str


Tensors: TypeAlias = Mapping[str, Stored]


@dataclass(frozen=True)
class TrainedSoFar:
    """How far a model was trained.

    Attributes:
        step: optimizer steps, skipped ones included.
        samples: consumed.
        tokens: consumed.
        optimizer_steps: that the optimizer took, for its bias correction.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    optimizer_steps: int = 0


@dataclass(frozen=True)
class Source:
    """A checkpoint of another trainer.

    Attributes:
        title: what it is, for people: trainer, class and layout.
        told_by: what its shape was read from, such as config.json.
        model: that it holds, with the vocabulary as stored.
        names: that its tensors have.
        tensors: by kind (`WEIGHT`, and both `MOMENTS` or none), each by the names of `names`.
        unpadded: rows of the vocabulary before padding, where the checkpoint says so.
        end_of_document_id: token of its tokenizer, where it says so; nobody has looked at it.
        progress: of the training; of no meaning without moments.
        notes: what a user should know of what was read.
    """

    title: str
    told_by: str
    model: ModelConfig
    names: Names
    tensors: Mapping[str, Tensors]
    unpadded: int | None = None
    end_of_document_id: Any = None
    progress: TrainedSoFar = field(default_factory=TrainedSoFar)
    notes: tuple[str, ...] = ()


def require_float(tensor: Tensor, where: str) -> Tensor:
    """Returns the tensor.

    Raises:
        CheckpointError: it holds no floating-point numbers.
    """
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{where} is {tensor.dtype}: want float32, bfloat16 or float16")
    return tensor


def held(tensor: Tensor, where: str) -> Stored:
    """A tensor that a mapped file holds."""
    return Stored(tuple(tensor.shape), lambda: require_float(tensor, where), where)


def joined(parts: Sequence[Stored], dim: int = 0) -> Stored:
    """The tensor whose parts along a dimension lie with the ranks of tensor parallelism, in their order.

    Raises:
        CheckpointError: they do not fit together.
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
    return Stored(shape, lambda: torch.cat([part.read() for part in parts], dim), first.where)


def replicated(parts: Sequence[Stored]) -> Stored:
    """The tensor of which every rank of tensor parallelism has a copy: their mean, where copies have drifted apart.

    Raises:
        CheckpointError: their shapes differ.
    """
    first = _same_shape(parts)

    def read() -> Tensor:
        copies = [part.read() for part in parts]
        if all(torch.equal(copies[0], copy) for copy in copies[1:]):
            return copies[0]
        return torch.stack([copy.float() for copy in copies]).mean(0)

    return Stored(first.shape, read, first.where)


def summed(parts: Sequence[Stored]) -> Stored:
    """The tensor of which the ranks of tensor parallelism each add a term.

    Raises:
        CheckpointError: their shapes differ.
    """
    first = _same_shape(parts)
    if len(parts) == 1:
        return first
    return Stored(first.shape, lambda: torch.stack([part.read().float() for part in parts]).sum(0), first.where)


def rows(stored: Stored, start: int, stop: int) -> Stored:
    """Rows of a tensor."""
    shape = (stop - start, *stored.shape[1:])
    return Stored(shape, lambda: stored.read()[start:stop], stored.where)


def split_rows(parts: Sequence[Stored], shares: Sequence[int]) -> list[Stored]:
    """The tensors that are stacked in every part, such as gates above ups, each joined over the parts.

    Args:
        parts: of the ranks of tensor parallelism.
        shares: of the rows of every part, in proportion.

    Raises:
        CheckpointError: rows cannot be divided so.
    """
    total = sum(shares)
    for part in parts:
        if not part.shape or part.shape[0] % total:
            raise CheckpointError(f"{part.where} has shape {list(part.shape)}: its rows are no multiple of {total}")
    edges = list(accumulate(shares, initial=0))
    return [
        joined([rows(part, part.shape[0] // total * start, part.shape[0] // total * stop) for part in parts])
        for start, stop in pairwise(edges)
    ]


def reshaped(stored: Stored, shape: tuple[int, ...]) -> Stored:
    """The same elements in another shape.

    Raises:
        CheckpointError: there are not as many.
    """
    if prod(shape) != prod(stored.shape):
        raise CheckpointError(f"{stored.where} has shape {list(stored.shape)}: want the elements of {list(shape)}")
    return Stored(shape, lambda: stored.read().reshape(shape), stored.where)


def some(names: Sequence[str]) -> str:
    """The first few of many names, with a verb for all of them."""
    more = f" and {len(names) - _NAMED} more are" if len(names) > _NAMED else " is" if len(names) == 1 else " are"
    return f"{', '.join(names[:_NAMED])}{more}"


def _same_shape(parts: Sequence[Stored]) -> Stored:
    first = parts[0]
    for part in parts:
        if part.shape != first.shape:
            raise CheckpointError(
                f"{part.where} has shape {list(part.shape)}, but {first.where} has {list(first.shape)}"
            )
    return first


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]
