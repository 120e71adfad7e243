"""The root schema of `megads train`: composes every room's config, checks what spans rooms, freezes the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.checkpoint.config import CheckpointConfig
from megads.data.config import DataConfig
from megads.errors import ConfigError
from megads.evaluate.config import EvaluationConfig
from megads.model.config import ModelConfig
from megads.optim.config import OptimConfig, ScheduleConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.config import ClusterConfig, LoggingConfig, RunConfig


class Precision(StrEnum):
    """Dtype of weights and activations; gradients accumulate and reduce in fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"


@dataclass
class BatchRampConfig:
    """Grows the global batch from `start` by `increment` in equal shares of `samples` up to train.global_batch_size."""

    start: int = 0
    """Global batch size at the first step; 0 switches the ramp off."""
    increment: int = 1
    """Samples added at each rise."""
    samples: int = 0
    """Samples over which the batch grows."""


@dataclass
class TrainConfig:
    """How long and on what batches a run trains. Exactly one of steps, samples and tokens is set."""

    global_batch_size: int = 8
    """Samples a step, over all ranks."""
    micro_batch_size: int = 1
    """Samples in one forward pass of one data-parallel rank."""
    seq_len: int = 128
    """Tokens a sample."""
    steps: int | None = None
    """Length of training in steps."""
    samples: int | None = None
    """Length of training in samples."""
    tokens: int | None = None
    """Length of training in tokens, padding included."""
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the global batch size."""
    precision: Precision = Precision.bf16
    """bf16 or fp32."""
    seed: int = 1234
    """Seed of weights, data order and dropout."""
    max_nonfinite_steps: int = 5
    """Non-finite steps in a row after which the run gives up (exit 7)."""


@dataclass
class RootConfig:
    """Everything `megads train` can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model's shape."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over processes."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and batches."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    run: RunConfig = field(default_factory=RunConfig)
    """Name and place."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Console."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The machine."""
