"""Which engine trains a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megads.engine.interface import TrainEngine
from megads.engine.sharded_training import ShardedTrainEngine
from megads.engine.training import PipelineTrainEngine
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue
from megads.ops.choice import TORCH, Kernels
from megads.optim.config import OptimConfig
from megads.parallel.config import GRADIENT_STAGES, ParallelConfig
from megads.parallel.grid import ParallelGrid


def build_train_engine(
    model: ModelConfig,
    parallel: ParallelConfig,
    optim: OptimConfig,
    grid: ParallelGrid,
    *,
    precision: torch.dtype,
    micro_batch_size: int,
    seed: int,
    device: torch.device,
    value: InitialValue | None = None,
    ops: Kernels = TORCH,
    deepspeed: Mapping[str, Any] | None = None,
) -> TrainEngine:
    """The engine of a layout, with its initial weights; collective over the world.

    Args:
        model: the model's shape.
        parallel: the layout, checked.
        optim: the optimizer.
        grid: the ranks of the layout.
        precision: dtype of weights and activations.
        micro_batch_size: samples in one forward pass.
        seed: of initial weights and dropout.
        device: where this rank computes.
        value: initial weights; None is `megads.model.initialise.initial_value`.
        ops: whose operators compute, as `megads.ops.choice.load` has made them ready.
        deepspeed: extra DeepSpeed settings of ZeRO-2 and ZeRO-3, checked.

    Raises:
        ConfigError: the model cannot be cut this way, or DeepSpeed is too old.
    """
    make: Callable[..., TrainEngine] = PipelineTrainEngine
    if parallel.zero_stage in GRADIENT_STAGES:
        make = partial(ShardedTrainEngine, deepspeed=deepspeed or {})
    return make(
        model,
        parallel,
        optim,
        grid,
        precision=precision,
        micro_batch_size=micro_batch_size,
        seed=seed,
        device=device,
        value=value,
        ops=ops,
    )
