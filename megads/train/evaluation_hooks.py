"""Hooks for validation and lm-eval tasks during training, built from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from megads.batch import MicroBatch
from megads.config.root import RootConfig, planned_steps
from megads.data.sampling.loader import LoaderShare, Packing, num_validation_batches, validation_batches
from megads.data.sampling.runs import ValidationSource
from megads.data.sampling.samples import WindowSubset, unigram_entropy
from megads.engine.interface import TrainEngine
from megads.evaluate.validation import ValidationHook
from megads.parallel.grid import ParallelGrid
from megads.runtime.hooks import Hook
from megads.runtime.optional_tools import require_tool
from megads.train.run_context import RunContext

VALIDATION_MICRO_BATCHES = 8
"""Micro-batches per evaluation call: enough to fill a pipeline, few enough to hold in memory."""


def packing(config: RootConfig) -> Packing:
    """Returns how batches treat document boundaries."""
    data = config.data
    return Packing(data.document_mask, data.reset_positions, data.mask_eod, data.balance_documents)


def loader_share(config: RootConfig, grid: ParallelGrid) -> LoaderShare:
    """Returns what this rank reads of every batch; ranks without the first or last stage only get BatchInfo."""
    needs_tokens = grid.pp.rank in config.parallel.placement.ends
    sizes = (config.train.micro_batch_size, grid.dp.rank, grid.dp.size, config.model.vocabulary)
    return LoaderShare(*sizes, needs_tokens, packing(config))


def evaluation_hooks(run: RunContext, engine: TrainEngine, valid_sets: Mapping[str, ValidationSource]) -> list[Hook]:
    """Returns the hooks for validation on every set, followed by that for lm-eval tasks."""
    hooks: list[Hook] = [validation_hook(run, engine, name, valid) for name, valid in valid_sets.items()]
    if run.config.evaluation.tasks:
        tool = require_tool("evaluate.task_hook", "evaluation.tasks")
        windows = [validated(run.config, valid) for valid in valid_sets.values()]
        outlets = (run.metrics, run.events, run.beats)
        hooks.append(tool.task_hook(run.config, run.run_dir, engine, windows, *outlets))
    return hooks


def validation_hook(run: RunContext, engine: TrainEngine, name: str, valid: ValidationSource) -> ValidationHook:
    """Returns the hook for validation on one set, or a fixed part of it."""
    config, grid = run.config, run.grid
    shown = validated(config, valid)
    batches = partial(validation_micro_batches, run, shown)
    unigram, train, steps = partial(unigram_entropy, shown), config.train, planned_steps(config)
    num_batches = num_validation_batches(len(shown), train.micro_batch_size, grid.dp.size, VALIDATION_MICRO_BATCHES)
    return ValidationHook(
        engine, batches, name, unigram, config.evaluation, steps, run.metrics, num_batches, run.beats, train.seq_len
    )


def validation_micro_batches(run: RunContext, shown: ValidationSource) -> Iterator[list[MicroBatch]]:
    """Yields this rank's micro-batches of each call of a validation of a set, see `validated`."""
    share = loader_share(run.config, run.grid)
    share = replace(share, packing=replace(share.packing, mask_eod=False))
    return validation_batches(shown, share, VALIDATION_MICRO_BATCHES)


def validated(config: RootConfig, valid: ValidationSource) -> ValidationSource:
    """Returns the part of a set that a validation reads."""
    most = config.evaluation.max_tokens
    return valid if most is None else WindowSubset(valid, most)
