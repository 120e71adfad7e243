"""Hooks for validation and lm-eval tasks during training, built from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from megads.batch import MicroBatch
from megads.config.root import RootConfig, planned_steps
from megads.data.indexed.recorded import read_record
from megads.data.indexed.run_tokenizer import open_run_tokenizer
from megads.data.indexed.sidecar import FoundTokenizer
from megads.data.sampling.loader import Packing, num_validation_batches, validation_batches
from megads.data.sampling.runs import ValidationSource
from megads.data.sampling.samples import WindowSubset, unigram_entropy
from megads.engine.interface import TrainEngine
from megads.errors import ConfigError, DataError
from megads.evaluate.harness_tasks import documents_per_task, load_tasks
from megads.evaluate.scoring import Batching, RescoredContinuation, Scorer
from megads.evaluate.validation import TaskEvaluationHook, TaskRequest, ValidationHook
from megads.ops.config import Compile
from megads.parallel.grid import ParallelGrid
from megads.runtime.heartbeat import VALIDATING, Heartbeat
from megads.runtime.hooks import Hook
from megads.runtime.metrics import EventWriter, MetricsWriter

VALIDATION_MICRO_BATCHES = 8
"""Micro-batches per evaluation call: enough to fill a pipeline, few enough to hold in memory."""
TASK_SHARE = 0.75
"""Tokens that all tasks together may read, as a share of those of a validation, as lm-eval adds its own overhead."""
_SHORTEST_ROWS = 16
"""Minimum length in tokens that rows of a task are padded to."""


def needs_tokens(config: RootConfig, grid: ParallelGrid) -> bool:
    """Whether this rank reads tokens and labels; ranks without the first or last stage only get BatchInfo."""
    return grid.pp.rank in config.parallel.placement.ends


def packing(config: RootConfig) -> Packing:
    """Returns how batches treat document boundaries."""
    return Packing(config.data.document_mask, config.data.reset_positions, config.data.mask_eod)


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
    validations = [
        validation_hook(config, engine.grid, engine, name, valid, metrics, beats) for name, valid in valid_sets.items()
    ]
    return [*validations, *task_hooks(config, run_dir, engine, valid_sets, metrics, events, beats)]


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


def task_hooks(
    config: RootConfig,
    run_dir: Path,
    engine: TrainEngine,
    valid_sets: Mapping[str, ValidationSource],
    metrics: MetricsWriter,
    events: EventWriter,
    beats: Heartbeat,
) -> list[Hook]:
    """Returns the hook that evaluates lm-eval tasks, if any are configured."""
    evaluation, grid = config.evaluation, engine.grid
    if not evaluation.tasks:
        return []
    lengths = task_row_lengths(config)
    batching = Batching(config.train.micro_batch_size, config.train.seq_len, lengths=lengths)
    scorer = Scorer(engine, config.model, batching, grid)

    def open_tasks() -> TaskRequest:
        # lm-eval is imported only where it is used, on the first rank.
        from megads.evaluate.harness import HarnessModel

        found = run_tokenizer(run_dir, config)
        folder = Path(evaluation.tasks_folder) if evaluation.tasks_folder is not None else None
        loaded = load_tasks(evaluation.tasks, folder, evaluation.tasks_fewshot)

        def model(of: Scorer) -> HarnessModel:
            return HarnessModel(
                of,
                found,
                lambda sampling, _numbers: RescoredContinuation(of, sampling),
                progress=lambda what, done, total: beats.enter(f"{VALIDATING}, {what}, {done:,} of {total:,}"),
            )

        windows = [validated(config, valid) for valid in valid_sets.values()]
        if not windows and evaluation.tasks_limit is None:
            raise ConfigError(
                "evaluation.tasks_limit = null with evaluation.tasks: limits documents by the tokens of a validation, "
                "but there is no validation set; set a number, or data.valid or data.split"
            )
        most_tokens = int(TASK_SHARE * sum(len(valid) * valid.seq_len for valid in windows)) if windows else None
        alone, counter = scorer.counting()
        documents = documents_per_task(model(alone), counter, loaded, most_tokens, evaluation.tasks_limit)
        return TaskRequest(model(scorer), loaded, documents)

    return [TaskEvaluationHook(scorer, grid, open_tasks, evaluation, planned_steps(config), metrics, events, beats)]


def task_row_lengths(config: RootConfig) -> tuple[int, ...]:
    """Returns the few lengths that rows of a task are padded to, each divisible as the layout requires."""
    parallel, length = config.parallel, config.train.seq_len
    unit = (2 * parallel.cp if parallel.cp > 1 else 1) * (parallel.tp if parallel.sequence_parallel else 1)
    found = [length]
    # Compiled blocks are compiled for one length.
    while config.ops.compile is Compile.none and length >= 2 * _SHORTEST_ROWS and not length % (2 * unit):
        length //= 2
        found.append(length)
    return tuple(reversed(found))


def run_tokenizer(run_dir: Path, config: RootConfig) -> FoundTokenizer:
    """Returns the tokenizer of the run; raises DataError if it is unknown."""
    data = read_record(run_dir)
    if data is None or data.tokenizer is None:
        raise DataError(
            f"evaluation.tasks = {', '.join(config.evaluation.tasks)}: tasks need the tokenizer of the run's data, "
            "which has none; prepare the data with `megads preprocess`, or set tokenizer.path"
        )
    return open_run_tokenizer(run_dir, data.tokenizer, None, [Path(path) for path in config.data.paths])
