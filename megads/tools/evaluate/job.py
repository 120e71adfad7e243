"""Evaluation in one process, or on every rank of a layout, where only the first rank has requests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megads.checkpoint.read import CheckpointHandle, load_unsharded, model_config_of, read_into
from megads.config import RootConfig, check_shape
from megads.data.indexed.sidecar import FoundTokenizer
from megads.engine.interface import EngineSpec
from megads.errors import ConfigError, DataError
from megads.evaluate.generation import Sampling, choose_device, choose_dtype
from megads.evaluate.harness_tasks import LoadedTasks, load_tasks, metric_values, run_harness
from megads.evaluate.scoring import (
    Batching,
    CachedContinuation,
    Continuation,
    ModelScoringEngine,
    RescoredContinuation,
    Scorer,
)
from megads.model.config import ModelConfig
from megads.optim.config import OptimConfig
from megads.parallel.grid import ParallelGrid
from megads.runtime.files import atomic_writer
from megads.runtime.lease import current_holder, in_use
from megads.runtime.metrics import EventWriter
from megads.runtime.run_dir import EVENTS_FILE
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.text_sets import VALID, SetResult, measure_texts, measure_validation
from megads.train_config import TrainConfig

if TYPE_CHECKING:
    from megads.evaluate.harness import Answers

Progress = Callable[[str, int, int], None]
MakeContinuation = Callable[[Sampling, Sequence[int]], Continuation]


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation.

    Attributes:
        harness_file: file with lm-eval's results; None without tasks.
        sets: results of the texts and validation sets, by name.
        sets_file: file with `sets`; None without sets.
        metrics: metrics of tasks and sets by name, for the events of the run.
        kept: tasks whose answers were cached by an earlier evaluation.
    """

    harness_file: str | None = None
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets_file: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedScorer:
    """A checkpoint that is ready to score.

    Attributes:
        scorer: computes log-likelihoods.
        continuation: creates generators that continue sequences.
        dtype: dtype of weights and activations.
        grid: parallel grid; None for one process.
    """

    scorer: Scorer
    continuation: MakeContinuation
    dtype: torch.dtype
    grid: ParallelGrid | None = None


def load_alone(config: EvaluateConfig, handle: CheckpointHandle) -> LoadedScorer:
    """Loads the unsharded model in this process."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.precision, device)
    model = load_unsharded(handle, device, dtype)
    shape = model_config_of(handle)
    scorer = Scorer(ModelScoringEngine(model), shape, Batching(config.batch_size, shape.max_seq_len))
    return LoadedScorer(scorer, partial(CachedContinuation, model), dtype)


def load_layout(
    config: EvaluateConfig, handle: CheckpointHandle, grid: ParallelGrid, device: torch.device
) -> LoadedScorer:
    """Loads this rank's shard of the model; collective over the world."""
    # Imported here, because the engine imports DeepSpeed, which evaluation in one process does not need.
    from megads.engine.scoring_engine import LayoutScoringEngine

    shape, dtype = model_config_of(handle), choose_dtype(config.precision, device)
    spec = EngineSpec(
        shape,
        config.layout.parallel,
        OptimConfig(),
        grid,
        precision=dtype,
        micro_batch_size=config.batch_size,
        seed=0,
        device=device,
        value=lambda _name, size: torch.empty(size),
    )
    engine = LayoutScoringEngine(spec)
    engine.load_weights(partial(read_into, handle))
    unit = 2 * grid.cp.size if grid.cp.size > 1 else 1
    scorer = Scorer(engine, shape, Batching(config.batch_size, shape.max_seq_len, unit), grid)
    return LoadedScorer(scorer, lambda sampling, _numbers: RescoredContinuation(scorer, sampling), dtype, grid)


def check_layout(config: EvaluateConfig, model: ModelConfig) -> None:
    """Raises ConfigError if the layout does not fit the model."""
    parallel = config.layout.parallel
    unit = 2 * parallel.cp
    train = TrainConfig(steps=1, micro_batch_size=1, global_batch_size=parallel.dp, seq_len=unit)
    try:
        check_shape(RootConfig(model=model, parallel=parallel, train=train))
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallel.", "layout.")) from error


def tasks_of(config: EvaluateConfig) -> LoadedTasks | None:
    """Loads the tasks of the config; None if there are none."""
    folder = None if config.tasks_folder is None else Path(config.tasks_folder)
    return load_tasks(config.tasks, folder, config.num_fewshot) if config.tasks else None


def evaluate_checkpoint(
    config: EvaluateConfig,
    handle: CheckpointHandle,
    found: FoundTokenizer,
    loaded: LoadedScorer,
    tasks: LoadedTasks | None,
    output: Path,
    progress: Progress,
) -> Evaluated | None:
    """Runs all tasks and sets of the config on a checkpoint; collective over the world.

    Args:
        config: config of the user.
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        loaded: scorer of the checkpoint.
        tasks: tasks of the config, only on the first rank.
        output: folder of the results.
        progress: callback for progress.

    Returns:
        The results; None on ranks other than the first.
    """
    require_tokenizer_of(model_config_of(handle), found)
    sets: list[SetResult] = []
    given = config.data or ([] if config.tasks else [VALID])
    if VALID in given:
        sets += measure_validation(handle.folder.parent.parent, loaded.scorer, loaded.grid, found, config.limit)
    with loaded.scorer.served() as asks:
        if not asks:
            return None
        for name in given:
            if name != VALID:
                sets.append(measure_texts(loaded.scorer, found, name, config.text_field, config.limit, progress))
        result = _harness(config, handle, found, loaded, tasks, output, progress) if tasks is not None else Evaluated()
    by_name = {one.name: one.as_json() for one in sets}
    metrics = {f"{name}/{key}": values[key] for name, values in by_name.items() for key in ("loss", "bits_per_byte")}
    sets_file = _write_sets(handle, by_name, output) if by_name else None
    return Evaluated(result.harness_file, by_name, sets_file, result.metrics | metrics, result.kept)


def require_tokenizer_of(model: ModelConfig, found: FoundTokenizer) -> None:
    """Raises DataError if the tokenizer has more tokens than the model."""
    if found.vocab_size > model.vocabulary:
        raise DataError(
            f"{found.path} has {found.vocab_size} tokens and the model {model.vocabulary}: it is the tokenizer of "
            "another model; give tokenizer=<file> with the right one"
        )


def _harness(
    config: EvaluateConfig,
    handle: CheckpointHandle,
    found: FoundTokenizer,
    loaded: LoadedScorer,
    tasks: LoadedTasks,
    output: Path,
    progress: Progress,
) -> Evaluated:
    # lm-eval is installed, because the tasks are loaded.
    from megads.evaluate.harness import HarnessModel

    dtype = str(loaded.dtype).removeprefix("torch.")
    answers = answers_of(handle, found, dtype, loaded.scorer.batching.max_length, output)
    model = HarnessModel(loaded.scorer, found, loaded.continuation, answers, progress)
    sizes = config.layout.parallel.sizes
    layout = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    named = {"pretrained": str(handle.folder), "dtype": dtype, **({"layout": layout} if layout else {})}
    path = run_harness(
        model, tasks, output, named, config.limit, config.batch_size, config.log_samples, config.bootstrap_iters
    )
    metrics = metric_values(json.loads(path.read_text(encoding="utf-8")))
    return Evaluated(str(path), metrics=metrics, kept=sorted(answers.kept))


def answers_of(handle: CheckpointHandle, found: FoundTokenizer, dtype: str, max_length: int, output: Path) -> Answers:
    """Cache of a checkpoint's answers.

    Args:
        handle: the checkpoint.
        found: tokenizer of the checkpoint.
        dtype: dtype of the computation.
        max_length: maximum number of input tokens.
        output: folder of the results.
    """
    from megads.evaluate.harness import Answers

    about = f"{handle.manifest.digest()} {dtype} {max_length} {found.path.read_bytes().hex()}"
    return Answers((output / "answers").absolute(), about)


def _write_sets(handle: CheckpointHandle, sets: dict[str, dict[str, Any]], output: Path) -> str:
    path = output / f"perplexity_{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    output.mkdir(parents=True, exist_ok=True)
    content = {"checkpoint": str(handle.folder), "step": handle.state["step"], "sets": sets}
    with atomic_writer(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    return str(path)


def refuse_concurrent(folder: Path) -> None:
    """Raises ConfigError if another evaluation holds a folder of ranks or of a coordinator."""
    holder = current_holder(folder)
    if holder is not None and in_use(folder):
        raise ConfigError(
            f"{folder.parent}: {holder} evaluates there already: wait for it, stop it ({holder.remedy}), or give "
            "another folder of results with output=<folder>"
        )


def note_results(checkpoint: Path, step: int, files: Sequence[str], metrics: dict[str, float]) -> None:
    """Writes an event to the run that contains a checkpoint, if there is one.

    Args:
        checkpoint: checkpoint folder.
        step: step at which it was saved.
        files: files with the results.
        metrics: metrics of tasks and sets by name.
    """
    run_dir = checkpoint.parent.parent
    if not (run_dir / EVENTS_FILE).is_file():
        return
    events = EventWriter(run_dir)
    events.write("evaluation", step=step, files=list(files), results=metrics)
    events.close()


def as_plain(result: Evaluated) -> str:
    """Converts results to JSON for the process that started the ranks."""
    return json.dumps(asdict(result))
