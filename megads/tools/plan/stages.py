"""Layers of a pipeline's virtual stages, with the recomputation of each: what every part of the plan starts from."""

from __future__ import annotations

from itertools import pairwise

from megads.model.config import ModelConfig, is_block, layer_costs
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.partition import block_modes, stage_bounds

StageLayers = dict[str, Recompute]
"""Layers of a virtual stage by name, in forward order; the recomputation mode of layers other than blocks is none."""


def layer_names(model: ModelConfig, parallel: ParallelConfig) -> list[list[str]]:
    """Names of the layers of every virtual stage; parallel.partition must be resolved (not auto).

    Raises:
        ConfigError: there are more pipeline stages than layers.
    """
    costs = layer_costs(model)
    names, bounds = list(costs), stage_bounds(list(costs.values()), parallel)
    return [names[start:end] for start, end in pairwise(bounds)]


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[StageLayers]:
    """Layers of every virtual stage; parallel.partition and parallel.recompute must be resolved (not auto).

    Raises:
        ConfigError: there are more pipeline stages than layers, or more recomputed blocks than blocks.
    """
    names, modes = layer_names(model, parallel), StageLayers()
    for rank in range(parallel.pp):
        blocks = [name for stage in parallel.placement.stages_of(rank) for name in names[stage] if is_block(name)]
        modes |= zip(blocks, block_modes(parallel, rank, len(blocks)), strict=True)
    return [{name: modes.get(name, Recompute.none) for name in stage} for stage in names]


def block_recompute(layers: StageLayers) -> list[Recompute]:
    """Recomputation mode of each block of a stage."""
    return [mode for name, mode in layers.items() if is_block(name)]
