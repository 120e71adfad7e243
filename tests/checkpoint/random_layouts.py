"""Global tensors sharded into random rectangles over any number of ranks, as in the engine's layouts."""

from __future__ import annotations

import random
from math import prod

import torch
from torch import Tensor

from megads.checkpoint.manifest import Rectangle, RunRecord
from megads.engine.interface import Shard

SHAPES = {"weight/a": (17, 12), "exp_avg/a": (17, 12), "weight/b": (40,), "weight/c": (5, 6, 7), "weight/d": (1, 1)}
MODEL = {"num_layers": 2, "hidden_size": 8, "ffn_size": None, "position": "alibi", "max_seq_len": 64, "init_std": None}


def global_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def random_cuts(draw: random.Random, whole: Rectangle, depth: int) -> list[Rectangle]:
    """Recursively cuts a rectangle in two along a random dim."""
    dims = [dim for dim, extent in enumerate(whole.shape) if extent > 1]
    if depth == 0 or not dims:
        return [whole]
    dim = draw.choice(dims)
    first = draw.randint(1, whole.shape[dim] - 1)
    parts = []
    for start, extent in ((0, first), (first, whole.shape[dim] - first)):
        offset, shape = list(whole.offset), list(whole.shape)
        offset[dim] += start
        shape[dim] = extent
        parts += random_cuts(
            draw, Rectangle(tuple(offset), tuple(shape)), depth - draw.randint(1, 2) if depth > 1 else 0
        )
    return parts


def random_layout(seed: int, num_ranks: int) -> list[list[tuple[str, Rectangle]]]:
    """The rectangles that each rank owns; together they cover every tensor once."""
    draw = random.Random(seed)
    ranks: list[list[tuple[str, Rectangle]]] = [[] for _ in range(num_ranks)]
    for key, shape in SHAPES.items():
        for part in random_cuts(draw, Rectangle((0,) * len(shape), shape), depth=5):
            draw.choice(ranks).append((key, part))
    return ranks


def shards_of(layout: list[tuple[str, Rectangle]], tensors: dict[str, Tensor] | None = None) -> list[Shard]:
    """One rank's shards, views of one flat buffer as in the engine; NaN if no tensors are given."""
    flat = torch.full((sum(part.elements for _, part in layout),), float("nan"))
    shards, start = [], 0
    for key, part in layout:
        view = flat[start : start + prod(part.shape)].view(part.shape)
        start += view.numel()
        if tensors is not None:
            view.copy_(tensors[key][part.within(Rectangle((0,) * len(part.shape), SHAPES[key]))])
        shards.append(Shard(key, SHAPES[key], part.offset, view))
    return shards


def all_equal(shards: list[Shard], tensors: dict[str, Tensor]) -> bool:
    """Whether every shard is bit-identical to its part of the tensors."""
    for shard in shards:
        part = Rectangle(shard.offset, tuple(shard.tensor.shape))
        whole = Rectangle((0,) * len(part.shape), shard.global_shape)
        if not torch.equal(shard.tensor, tensors[shard.key][part.within(whole)]):
            return False
    return True


def run_record(step: int) -> RunRecord:
    state = {"step": step, "samples": 8 * step, "tokens": 100 * step}
    return RunRecord(state, step, "digest", dict(MODEL), {"tp": 1, "pp": 1, "dp": 1})
