"""lm-eval's tasks in mid-run, on the ranks that train: the first rank asks, all compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megads.evaluate.config import EvaluationConfig
from megads.evaluate.harness_tasks import LoadedTasks, run_tasks
from megads.evaluate.scoring import Scorer
from megads.parallel.grid import ParallelGrid
from megads.runtime.heartbeat import VALIDATING, Heartbeat
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter

if TYPE_CHECKING:
    from megads.evaluate.harness import HarnessModel


@dataclass(frozen=True)
class AskedTasks:
    """What the first rank asks.

    Attributes:
        model: what is asked.
        loaded: the tasks.
        documents: how many of each task's.
    """

    model: HarnessModel
    loaded: LoadedTasks
    documents: dict[str, int]


class TaskEvaluationHook:
    """Evaluates tasks every evaluation.tasks_every_steps steps and after the last one.

    As with validations, a resumed run's metrics equal those of an uninterrupted one. Register it after the validations'
    hooks.

    Args:
        scorer: of this rank.
        grid: the ranks.
        open_tasks: called once, on the first rank, before the first step.
        config: when.
        total_steps: the planned end.
        metrics: where the line goes.
        events: where the event goes.
        beats: of this rank; an evaluation takes longer than what the hook does at other steps.
    """

    def __init__(
        self,
        scorer: Scorer,
        grid: ParallelGrid,
        open_tasks: Callable[[], AskedTasks],
        config: EvaluationConfig,
        total_steps: int,
        metrics: MetricsWriter,
        events: EventWriter,
        beats: Heartbeat,
    ) -> None:
        self._scorer, self._grid, self._open_tasks = scorer, grid, open_tasks
        self._config, self._total_steps = config, total_steps
        self._metrics, self._events, self._beats = metrics, events, beats
        self._asked: AskedTasks | None = None
        self._first_key = ""

    def on_start(self, state: TrainState) -> None:
        def open_first() -> str:
            self._asked = self._open_tasks()
            return f"eval/{next(iter(self._asked.documents))}/documents"

        # All ranks hear of what is wrong with a task.
        self._first_key = self._grid.control.first_decides(open_first, str)
        # A checkpoint is saved before its step is evaluated: a kill in between left the evaluation owing.
        if state.step == 0 or not self._due(state.step):
            return
        if self._grid.control.any(self._metrics.lacks(state.step, self._first_key)):
            self._record(state.step, state.samples, state.tokens)

    def on_step(self, info: StepInfo) -> None:
        # After the last step of a training stage the next one evaluates, as it does after a kill in between.
        if self._due(info.step) and not info.ends_stage:
            self._record(info.step, info.samples, info.tokens)

    def on_end(self, state: TrainState) -> None:
        pass

    def _due(self, step: int) -> bool:
        every = self._config.tasks_every_steps
        return (every > 0 and step % every == 0) or (self._config.at_end and step >= self._total_steps)

    def _record(self, step: int, samples: int, tokens: int) -> None:
        """Evaluates and writes the line; collective."""
        self._beats.enter(f"{VALIDATING}, tasks")
        with self._scorer.served() as asks:
            if not asks:
                return
            asked = self._asked
            assert asked is not None
            values = run_tasks(asked.model, asked.loaded, asked.documents)
            values |= {f"{task}/documents": count for task, count in asked.documents.items()}
        line = {f"eval/{key}": value for key, value in values.items()}
        self._metrics.write({"step": step, "samples": samples, "tokens": tokens, **line})
        self._events.write("tasks_evaluated", step=step, level="debug", results=values)
