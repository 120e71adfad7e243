"""What every part of a plan starts from: the workload of a step, and the layers of each virtual pipeline stage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

from megads.api import (
    HEAD,
    Float8,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    Recompute,
    flash_in_ring,
    stage_bounds,
)
from megads.model.config import is_block, layer_costs
from megads.parallel.partition import block_modes

FP32 = 4


@dataclass(frozen=True)
class Workload:
    """Batch sizes and execution settings of a training step.

    Attributes:
        seq_len: tokens per sample.
        micro_batch_size: samples per micro-batch of one data-parallel rank.
        micro_batches: micro-batches of one data-parallel rank per step.
        weight_bytes: bytes per element of weights and activations: 2 for bf16, 4 for fp32.
        steps_loaded: number of steps whose micro-batches are in memory, prefetched ones included.
        cuda: whether ranks compute on GPUs.
        document_mask: whether attention is masked across packed documents.
        fused: whether megads' kernels compute attention, GELU and the loss.
        loss_chunk: value of ops.loss_chunk.
        mlp_chunk: value of ops.mlp_chunk.
        optim: optimizer config, which determines the optimizer's state and temporaries.
        cuda_graphs: whether passes are captured in CUDA graphs and replayed.
        save_every_steps: steps between asynchronous checkpoints; None: no checkpoints.
        float8: which linear layers multiply in FP8.
        worst_load: whether all tokens choose the experts of one rank, as far as it has enough; false: the same number
            of tokens chooses every expert. Only memory is planned with the worst load.
    """

    seq_len: int
    micro_batch_size: int
    micro_batches: int
    weight_bytes: int = 2
    steps_loaded: int = 1
    cuda: bool = False
    document_mask: bool = False
    fused: bool = False
    loss_chunk: int | None = None
    mlp_chunk: int | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    cuda_graphs: bool = False
    save_every_steps: int | None = None
    float8: Float8 = field(default_factory=Float8)
    worst_load: bool = False

    def flash_in_ring(self, model: ModelConfig, *, cuda: bool) -> bool:
        """Whether FlashAttention computes the blocks of ring attention on a device."""
        work = model.attention_work()
        return flash_in_ring(replace(work, bf16=self.weight_bytes < FP32, cuda=cuda, documents=self.document_mask))


def steady_period(parallel: ParallelConfig) -> int:
    """Micro-batches after which the actions of a pipeline repeat: as many as a virtual stage runs in a row."""
    return max(parallel.pp, parallel.contiguous_micro_batches or 0)


def shortened(parallel: ParallelConfig, micro_batches: int, rounds: int) -> int:
    """Number of micro-batches of a step with the same steady state, and therefore the same peak memory, that is at most
    `rounds` times as long as filling the pipeline takes."""
    period = steady_period(parallel)
    filled = rounds * max(parallel.num_stages, period if parallel.contiguous_micro_batches else 0)
    return micro_batches - max(0, micro_batches - filled) // period * period


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


def block_kinds(model: ModelConfig, layers: StageLayers) -> list[tuple[int, Recompute]]:
    """Index in model.layer_pattern (0 without one) and recomputation mode of each block of a stage."""
    return [(model.kind_of(block_index(name)), mode) for name, mode in layers.items() if is_block(name)]


def block_indices(layers: StageLayers) -> list[int]:
    """Index in the model of each block of a stage."""
    return [block_index(name) for name in layers if is_block(name)]


def leaving_blocks(model: ModelConfig, parallel: ParallelConfig, layers: Collection[str]) -> frozenset[str]:
    """Names of the blocks of a rank whose activations are offloaded, given the names of all its layers."""
    blocks = (name for name in layers if is_block(name))
    return frozenset(
        name for name in blocks if parallel.leaves_device(block_index(name), model.num_layers, with_head=HEAD in layers)
    )


def block_index(layer: str) -> int:
    """Index of a block in the model, by its name."""
    return int(layer.rpartition(".")[2])
