"""Which rank holds what: pure arithmetic over the grid, the partition and the sharding table's shares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

from megads.model.config import ModelConfig
from megads.model.stages import EMBEDDING, HEAD, stage_specs
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Place, axis_lines, place_of
from megads.parallel.partition import stage_bounds
from megads.parallel.vocabulary import padded_rows


@dataclass(frozen=True)
class RankPlace:
    """What one rank holds.

    Attributes:
        rank: global rank.
        place: its coordinates; place.pp is its pipeline stage.
        node: number of its node; None where ranks per node are not known.
        layers: names of the model's stages it holds a share of.
        heads: its attention heads, of every block it holds; empty without a block.
        vocabulary: its rows of the vocabulary, padding left out; empty without embedding and head, None where the size
            of the vocabulary is not known.
    """

    rank: int
    place: Place
    node: int | None
    layers: tuple[str, ...]
    heads: range
    vocabulary: range | None


def rank_places(model: ModelConfig, parallel: ParallelConfig, ranks_per_node: int | None = None) -> list[RankPlace]:
    """Every rank of a layout, in order.

    Args:
        model: the model's shape; its vocabulary may still be the tokenizer's.
        parallel: the layout.
        ranks_per_node: how many neighbouring ranks share a node; None where that is not known.

    Raises:
        ConfigError: more pipeline stages than layers.
    """
    specs = stage_specs(model, seed=0)
    bounds = stage_bounds([spec.weight for spec in specs], parallel)
    stages = [tuple(spec.name for spec in specs[start:end]) for start, end in pairwise(bounds)]
    share, placement = model.num_heads // parallel.tp, parallel.placement
    found = []
    for rank in range(parallel.world_size):
        place = place_of(rank, parallel)
        layers = tuple(chain.from_iterable(stages[stage] for stage in placement.stages_of(place.pp)))
        has_blocks = any(layer.startswith("blocks.") for layer in layers)
        heads = range(place.tp * share, (place.tp + 1) * share) if has_blocks else range(0)
        node = None if ranks_per_node is None else rank // ranks_per_node
        found.append(RankPlace(rank, place, node, layers, heads, _vocabulary(model, parallel, place, layers)))
    return found


def _vocabulary(model: ModelConfig, parallel: ParallelConfig, place: Place, layers: tuple[str, ...]) -> range | None:
    if EMBEDDING not in layers and HEAD not in layers:
        return range(0)
    size = model.vocab_size
    if size is None:
        return None
    rows = padded_rows(size, parallel.tp)
    return range(min(place.tp * rows, size), min((place.tp + 1) * rows, size))


def replicas(places: list[RankPlace]) -> list[list[RankPlace]]:
    """Ranks that hold the same weights, together: those that differ in their context and data coordinates only."""
    groups: dict[tuple[int, int], list[RankPlace]] = {}
    for held in places:
        groups.setdefault((held.place.pp, held.place.tp), []).append(held)
    return [groups[key] for key in sorted(groups)]


def axes_across_nodes(parallel: ParallelConfig, ranks_per_node: int) -> list[str]:
    """Axes along which some ranks have to talk over the network, innermost first."""
    return [
        axis
        for axis in parallel.rank_order
        if any(len({rank // ranks_per_node for rank in line}) > 1 for line in axis_lines(axis, parallel))
    ]
