"""What the parts of a rank's training process share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from megads.config.root import RootConfig
from megads.data.sampling.loader import StepBatch
from megads.data.sampling.runs import TrainSource
from megads.engine.interface import TrainEngine
from megads.parallel.grid import ParallelGrid
from megads.runtime.environment import RankEnvironment
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter


@dataclass(frozen=True)
class RunContext:
    """The run and its outlets, as this rank sees them.

    Attributes:
        config: config of the run, or of its training phase.
        run_dir: the run directory.
        digest: sha256 of the frozen config.
        environment: environment of this rank.
        device: device of this rank.
        grid: ranks of the layout.
        beats: heartbeat of this rank.
        metrics: metrics log, which rank 0 writes.
        events: event log, which rank 0 writes.
    """

    config: RootConfig
    run_dir: Path
    digest: str
    environment: RankEnvironment
    device: torch.device
    grid: ParallelGrid
    beats: Heartbeat
    metrics: MetricsWriter
    events: EventWriter


@dataclass
class StepPlace:
    """Where a rank is, to explain an unhandled exception.

    Attributes:
        config: config of the run, or of its training phase.
        run_dir: the run directory.
        state: counters of the training loop.
        engine: training engine; None until it is built.
        samples: training data; None until it is opened.
        batch: the last batch; None before the first step.
    """

    config: RootConfig
    run_dir: Path
    state: TrainState = field(default_factory=TrainState)
    engine: TrainEngine | None = None
    samples: TrainSource | None = None
    batch: StepBatch | None = None
