"""lm-eval tasks during training: the hook that evaluates them, and its construction from the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megads.api import (
    ConfigError,
    DataError,
    EvaluationConfig,
    EventWriter,
    Heartbeat,
    RootConfig,
    TrainEngine,
    TrainState,
    ValidationSource,
    open_run_tokenizer,
    planned_steps,
    read_record,
)
from megads.evaluate.validation import PeriodicEvaluation
from megads.ops.config import Compile
from megads.runtime.heartbeat import VALIDATING
from megads.runtime.metrics import MetricsWriter
from megads.tools.evaluate.harness_tasks import (
    LoadedTasks,
    documents_per_task,
    lm_eval_results,
    load_tasks,
    metric_values,
)
from megads.tools.evaluate.scoring import Batching, Scorer

if TYPE_CHECKING:
    from megads.tools.evaluate.harness import HarnessModel

TASK_SHARE = 0.75
"""Tokens that all tasks together may read, as a share of those of a validation, as lm-eval adds its own overhead."""
_SHORTEST_ROWS = 16
"""Minimum length in tokens that rows of a task are padded to."""


def require_tasks(config: EvaluationConfig) -> None:
    """Raises MegadsError if a task to be evaluated during a run cannot be loaded on this machine."""
    folder = Path(config.tasks_folder) if config.tasks_folder is not None else None
    load_tasks(config.tasks, folder, config.tasks_fewshot)


@dataclass(frozen=True)
class TaskRequest:
    """Tasks that the first rank evaluates.

    Attributes:
        model: the model to evaluate.
        loaded: the tasks.
        documents: number of documents per task.
    """

    model: HarnessModel
    loaded: LoadedTasks
    documents: dict[str, int]


class TaskEvaluationHook(PeriodicEvaluation):
    """Evaluates tasks every evaluation.tasks_every_steps steps and after the last one.

    Register it after the validations' hooks.

    Args:
        scorer: scorer of this rank.
        open_tasks: loads the tasks; called once, on the first rank, before the first step.
        config: when to evaluate.
        total_steps: planned last step.
        metrics: writer of metrics.jsonl.
        events: writer of events.jsonl.
        beats: heartbeat of this rank; an evaluation takes longer than the hook does at other steps.
    """

    def __init__(
        self,
        scorer: Scorer,
        open_tasks: Callable[[], TaskRequest],
        config: EvaluationConfig,
        total_steps: int,
        metrics: MetricsWriter,
        events: EventWriter,
        beats: Heartbeat,
    ) -> None:
        super().__init__(scorer.grid, metrics, config.tasks_every_steps, total_steps if config.at_end else None)
        self._scorer, self._open_tasks = scorer, open_tasks
        self._events, self._beats = events, beats
        self._asked: TaskRequest | None = None
        self._first_key = ""

    def on_start(self, state: TrainState) -> None:
        def open_first() -> str:
            self._asked = self._open_tasks()
            return f"eval/{next(iter(self._asked.documents))}/documents"

        # All ranks raise if a task is invalid.
        self._first_key = self._grid.control.first_decides(open_first, str)
        super().on_start(state)

    @property
    def _key(self) -> str:
        return self._first_key

    def _record(self, step: int, samples: int, tokens: int) -> None:
        """Evaluates and writes the metrics line; collective."""
        self._beats.enter(f"{VALIDATING}, tasks")
        with self._scorer.served() as asks:
            if not asks:
                return
            asked = self._asked
            assert asked is not None
            chosen = {name: list(range(count)) for name, count in asked.documents.items()}
            values = metric_values(lm_eval_results(asked.model, asked.loaded, 0, samples=chosen))
            values |= {f"{task}/documents": count for task, count in asked.documents.items()}
        line = {f"eval/{key}": value for key, value in values.items()}
        self._metrics.write({"step": step, "samples": samples, "tokens": tokens, **line})
        self._events.write("tasks_evaluated", step=step, level="debug", results=values)


def task_hook(
    config: RootConfig,
    run_dir: Path,
    engine: TrainEngine,
    windows: Sequence[ValidationSource],
    metrics: MetricsWriter,
    events: EventWriter,
    beats: Heartbeat,
) -> TaskEvaluationHook:
    """Returns the hook that evaluates the tasks of a config.

    Args:
        config: config of the run.
        run_dir: the run directory.
        engine: engine of this rank.
        windows: what is validated; without evaluation.tasks_limit the tasks read a share of its tokens.
        metrics: writer of metrics.jsonl.
        events: writer of events.jsonl.
        beats: heartbeat of this rank.
    """
    evaluation, parallel, length = config.evaluation, config.parallel, config.train.seq_len
    # The few lengths that rows are padded to, each divisible as the layout requires.
    unit = (2 * parallel.cp if parallel.cp > 1 else 1) * (parallel.tp if parallel.sequence_parallel else 1)
    lengths = [length]
    # Compiled blocks are compiled for one length.
    while config.ops.compile is Compile.none and length >= 2 * _SHORTEST_ROWS and not length % (2 * unit):
        length //= 2
        lengths.insert(0, length)
    batching = Batching(config.train.micro_batch_size, config.train.seq_len, lengths=tuple(lengths))
    scorer = Scorer(engine, config.model, batching, engine.grid)

    def open_tasks() -> TaskRequest:
        # lm-eval is imported only where it is used, on the first rank.
        from megads.tools.evaluate.harness import HarnessModel

        data = read_record(run_dir)
        if data is None or data.tokenizer is None:
            raise DataError(
                f"evaluation.tasks = {', '.join(evaluation.tasks)}: tasks need the tokenizer of the run's data, which "
                "has none; prepare the data with `megads preprocess`, or set tokenizer.path"
            )
        found = open_run_tokenizer(run_dir, data.tokenizer, None, [Path(path) for path in config.data.paths])
        folder = Path(evaluation.tasks_folder) if evaluation.tasks_folder is not None else None
        loaded = load_tasks(evaluation.tasks, folder, evaluation.tasks_fewshot)

        def model(of: Scorer) -> HarnessModel:
            return HarnessModel(
                of,
                found,
                progress=lambda what, done, total: beats.enter(f"{VALIDATING}, {what}, {done:,} of {total:,}"),
            )

        if not windows and evaluation.tasks_limit is None:
            raise ConfigError(
                "evaluation.tasks_limit = null with evaluation.tasks: limits documents by the tokens of a validation, "
                "but there is no validation set; set a number, or data.valid or data.split"
            )
        most_tokens = int(TASK_SHARE * sum(len(valid) * valid.seq_len for valid in windows)) if windows else None
        alone, counter = scorer.counting()
        documents = documents_per_task(model(alone), counter, loaded, most_tokens, evaluation.tasks_limit)
        return TaskRequest(model(scorer), loaded, documents)

    return TaskEvaluationHook(scorer, open_tasks, evaluation, planned_steps(config), metrics, events, beats)
