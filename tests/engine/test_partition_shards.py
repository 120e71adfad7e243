"""Flat ranges of a parameter as rectangles of the global tensor."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor

from megads.engine.train_engine import parameter_shards, rectangles
from megads.parallel.sharding import ParameterPlacement


@pytest.mark.parametrize("seed", range(60))
def test_rectangles_tile_any_range(seed: int) -> None:
    """Catches a row that is lost, covered twice or split at the wrong column where ZeRO partitions in mid-row."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(rng.choice((1, 2))))
    start, stop = sorted(rng.randint(0, prod(shape)) for _ in range(2))
    flat, covered = torch.arange(prod(shape)), torch.zeros(shape, dtype=torch.int64)
    parts = list(rectangles(shape, start, stop))
    assert len(parts) <= 3
    position = start
    for part in parts:
        assert part.start == position and part.stop - part.start == prod(part.shape)
        where = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        covered[where] += 1
        assert torch.equal(flat.view(shape)[where], flat[part.start : part.stop].view(part.shape))
        position = part.stop
    assert position == stop
    assert torch.equal(covered.flatten().nonzero().flatten(), torch.arange(start, stop))
    assert covered.max() <= 1


def shares(shape: tuple[int, ...], dim: int | None, size: int) -> list[tuple[ParameterPlacement, tuple[int, ...]]]:
    """Placement and padded local shape of every tensor-parallel rank."""
    if dim is None:
        return [(ParameterPlacement("w", shape), shape)]
    rows = -(-shape[dim] // size)
    local = tuple(rows if d == dim else n for d, n in enumerate(shape))
    lengths = [max(0, min(rows, shape[dim] - rank * rows)) for rank in range(size)]
    starts = [min(rank * rows, shape[dim]) for rank in range(size)]
    return [
        (ParameterPlacement("w", shape, dim, (range(start, start + length),)), local)
        for start, length in zip(starts, lengths, strict=True)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_shards_of_all_ranks_tile_the_global_tensor(seed: int) -> None:
    """Catches padding rows that reach a checkpoint, offsets along the wrong dim, and copies in place of views."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 8) for _ in range(rng.choice((1, 2))))
    dim, size = rng.choice([None, *range(len(shape))]), rng.randint(1, 4)
    if dim == 1:
        size = rng.choice([n for n in range(1, 5) if shape[1] % n == 0])  # only vocabulary rows are padded
    whole = torch.arange(1.0, prod(shape) + 1).view(shape)
    rebuilt = torch.zeros(shape)
    for place, local_shape in shares(shape, dim, size):
        local = torch.full(local_shape, -1.0)
        real = local if place.dim is None else local.narrow(place.dim, 0, place.length)
        real.copy_(place.part_of(whole))
        flat = local.flatten()
        cuts = sorted({0, flat.numel(), *(rng.randint(0, flat.numel()) for _ in range(3))})
        for first, end in pairwise(cuts):
            for shard in parameter_shards("weight", place, local_shape, first, flat[first:end]):
                assert shard.key == "weight/w" and shard.global_shape == shape
                add(rebuilt, shard.offset, shard.tensor)
                shard.tensor.zero_()
        assert not flat[flat > 0].any(), "a real element is in no shard, or its shard is a copy"
        assert (flat == -1).sum() == flat.numel() - prod(place.local_shape)
    assert torch.equal(rebuilt, whole)


def add(target: Tensor, offset: tuple[int, ...], values: Tensor) -> None:
    where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
    target[where] += values
