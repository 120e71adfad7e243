"""Hooks for validation and lm-eval tasks during training, built from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from megads.batch import MicroBatch
from megads.config.root import RootConfig, planned_steps
from megads.data.sampling.loader import Packing, num_validation_batches, validation_batches
from megads.data.sampling.runs import ValidationSource
from megads.data.sampling.samples import WindowSubset, unigram_entropy
from megads.engine.interface import TrainEngine
from megads.evaluate.validation import ValidationHook
from megads.parallel.grid import ParallelGrid
from megads.runtime.heartbeat import Heartbeat
from megads.runtime.hooks import Hook
from megads.runtime.metrics import EventWriter, MetricsWriter
from megads.runtime.optional_tools import require_tool

VALIDATION_MICRO_BATCHES = 8
"""Micro-batches per evaluation call: enough to fill a pipeline, few enough to hold in memory."""


def needs_tokens(config: RootConfig, grid: ParallelGrid) -> bool:
    """Whether this rank reads tokens and labels; ranks without the first or last stage only get BatchInfo."""
    return grid.pp.rank in config.parallel.placement.ends


def packing(config: RootConfig) -> Packing:
    """Returns how batches treat document boundaries."""
    data = config.data
    return Packing(data.document_mask, data.reset_positions, data.mask_eod, data.balance_documents)


def evaluation_hooks(
    config: RootConfig,
    run_dir: Path,
    engine: TrainEngine,
    valid_sets: Mapping[str, ValidationSource],
    metrics: MetricsWriter,
    events: EventWriter,
    beats: Heartbeat,
) -> list[Hook]:
    """Returns the hooks for validation on every set, followed by that for lm-eval tasks."""
    validations: list[Hook] = [
        validation_hook(config, engine.grid, engine, name, valid, metrics, beats) for name, valid in valid_sets.items()
    ]
    if not config.evaluation.tasks:
        return validations
    tool = require_tool("evaluate.task_hook", "evaluation.tasks")
    windows = [validated(config, valid) for valid in valid_sets.values()]
    return [*validations, tool.task_hook(config, run_dir, engine, windows, metrics, events, beats)]


def validation_hook(
    config: RootConfig,
    grid: ParallelGrid,
    engine: TrainEngine,
    name: str,
    valid: ValidationSource,
    metrics: MetricsWriter,
    beats: Heartbeat,
) -> ValidationHook:
    """Returns the hook for validation on one set, or a fixed part of it."""
    shown = validated(config, valid)
    batches = partial(validation_micro_batches, config, grid, shown)
    unigram, train, steps = partial(unigram_entropy, shown), config.train, planned_steps(config)
    num_batches = num_validation_batches(len(shown), train.micro_batch_size, grid.dp.size, VALIDATION_MICRO_BATCHES)
    return ValidationHook(
        engine, batches, name, unigram, config.evaluation, steps, metrics, num_batches, beats, train.seq_len
    )


def validation_micro_batches(
    config: RootConfig, grid: ParallelGrid, shown: ValidationSource
) -> Iterator[list[MicroBatch]]:
    """Yields this rank's micro-batches of each call of a validation.

    Args:
        config: config of the run.
        grid: ranks of the layout.
        shown: the set, see `validated`.
    """
    return validation_batches(
        shown,
        config.train.micro_batch_size,
        grid.dp.rank,
        grid.dp.size,
        config.model.vocabulary,
        needs_tokens(config, grid),
        VALIDATION_MICRO_BATCHES,
        replace(packing(config), mask_eod=False),
    )


def validated(config: RootConfig, valid: ValidationSource) -> ValidationSource:
    """Returns the part of a set that a validation reads."""
    most = config.evaluation.max_tokens
    return valid if most is None else WindowSubset(valid, most)
