"""A rank's flat optimizer partition as rectangles of global tensors.

ZeRO-1 cuts a flat buffer of all parameters at arbitrary elements. A range of a matrix that starts or ends in mid-row is
up to three rectangles: the rest of a row, whole rows, the start of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megads.engine.interface import Shard
from megads.parallel.sharding import Placement


@dataclass(frozen=True)
class Rectangle:
    """Part of a local matrix or vector: where it lies and which elements of the flattened local tensor it takes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cuts elements [start, stop) of a flattened local tensor of one or two dims into rectangles, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Rectangle((start,), (stop - start,), start, stop)
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            rows = (stop - start) // width
            end = start + rows * width
            yield Rectangle((row, 0), (rows, width), start, end)
        else:
            end = min(stop, (row + 1) * width)
            yield Rectangle((row, column), (1, end - start), start, end)
        start = end


def parameter_shards(
    kind: str, place: Placement, local_shape: tuple[int, ...], first: int, flat: Tensor
) -> list[Shard]:
    """Rectangles of one parameter that `flat`, holding its flattened elements from `first` on, covers.

    Args:
        kind: first part of the shards' keys.
        place: where the local parameter lies in the global one; padding rows at its end are left out.
        local_shape: shape of the local parameter, padding included.
        first: index in the flattened local parameter of flat[0].
        flat: the values, a view.
    """
    real = place.length * (local_shape[1] if len(local_shape) == 2 else 1) if place.dim == 0 else None
    stop = first + flat.numel() if real is None else min(first + flat.numel(), real)
    shards = []
    for part in rectangles(local_shape, first, stop):
        offset = tuple(o + (place.start if d == place.dim else 0) for d, o in enumerate(part.offset))
        tensor = flat[part.start - first : part.stop - first].view(part.shape)
        shards.append(Shard(f"{kind}/{place.key}", place.global_shape, offset, tensor))
    return shards
