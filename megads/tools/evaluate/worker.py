"""Workers of a coordinated evaluation, which take units from the queue until none is left; see `worker_pool`.

A model worker loads a checkpoint and answers parts of tasks. A metrics worker joins the parts and computes metrics and
standard errors with lm-eval, so that model workers need not wait.
"""

from __future__ import annotations

import json
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from lm_eval.utils import handle_non_serializable

from megads.api import (
    EXIT_BUG,
    CheckpointHandle,
    DataError,
    JsonLinesWriter,
    MegadsError,
    MicroBatch,
    atomic_writer,
    choose_device,
    choose_dtype,
    model_config_of,
    read_manifest,
)
from megads.parallel.token_scores import RowScores
from megads.runtime.claims import Presence
from megads.tools.evaluate.evaluation_plan import EvaluationPlan, PlannedCheckpoint
from megads.tools.evaluate.harness import BatchShare, HarnessModel, join_parts
from megads.tools.evaluate.harness_tasks import LoadedTasks, lm_eval_results, requests_of
from megads.tools.evaluate.job import load_configured_tasks, open_harness
from megads.tools.evaluate.packing import WorkerView, WorkUnit, choose
from megads.tools.evaluate.scoring import Batching, ModelScoringEngine, Scorer, ScoringEngine
from megads.tools.evaluate.weights_cache import NodeWeightsCache, cached_name
from megads.tools.evaluate.work_queue import METRICS, MODEL, QueueState, WorkerRecord, WorkQueue, read_json_note
from megads.tools.generate import checkpoint_tokenizer

_POLL_S = 0.3


def run_worker(plan: EvaluationPlan, queue: WorkQueue, role: str) -> None:
    """Makes this process a worker until no work is left."""
    plan.config.resolve_plugins()
    with queue.joined(WorkerRecord.of_this_process(role=role)) as presence:
        tasks = load_configured_tasks(plan.config)
        assert tasks is not None
        if role == METRICS:
            MetricsWorker(plan, queue, tasks, presence).work()
            return
        worker = ModelWorker(plan, queue, tasks, presence)
        try:
            worker.note(start_s=time.time() - psutil.Process().create_time())
            worker.work()
        finally:
            worker.close()


class _EvaluationWorker(ABC):
    """Base class of workers, which take units of their role and compute them.

    Args:
        plan: plan of the evaluation.
        queue: work queue.
        tasks: loaded tasks.
        presence: this worker's record in the queue.
    """

    role: str
    device: torch.device

    def __init__(
        self, plan: EvaluationPlan, queue: WorkQueue, tasks: LoadedTasks, presence: Presence[WorkerRecord]
    ) -> None:
        self.plan, self.queue, self.tasks, self.presence = plan, queue, tasks, presence
        self.name = presence.participant.name
        self._requests: tuple[str, Mapping[str, list[Any]]] = "", {}

    def work(self) -> None:
        """Takes units until all are done or failed; units of a worker that dies become available again."""
        while (state := self.queue.read_state()).unfinished(self.role):
            unit = self.choose(state)
            if unit is None:
                time.sleep(_POLL_S)
            elif self.queue.claim(unit.id, state, self.name):
                self.presence.change(unit=unit.name, loaded=unit.checkpoint if self.role == MODEL else None)
                self._attempt(unit, state.attempts)

    def _attempt(self, unit: WorkUnit, attempts: Mapping[str, int]) -> None:
        """Computes a claimed unit and records a failure; raises unexpected ones, which may have broken the process."""
        try:
            content, seconds = self.compute(unit, attempts)
            with atomic_writer(self.queue.path(unit)) as file:
                file.write(content.encode("utf-8", "surrogatepass"))
            if seconds is not None:
                self._note_time(unit, seconds)
        except MegadsError as error:
            self.queue.fail(unit.id, attempts.get(unit.id, 0) + 1, str(error), error.exit_code)
        except Exception as error:
            traceback.print_exc()
            self.queue.fail(unit.id, attempts.get(unit.id, 0) + 1, f"{type(error).__name__}: {error}", EXIT_BUG)
            raise
        finally:
            self.presence.change(unit="")

    @abstractmethod
    def choose(self, state: QueueState) -> WorkUnit | None:
        """Selects the next unit; None if there is none now."""

    @abstractmethod
    def compute(self, unit: WorkUnit, attempts: Mapping[str, int]) -> tuple[str, float | None]:
        """Returns the result of a unit as JSON, and its time in seconds; None if all answers were known."""

    def requests(self, task: str) -> Mapping[str, list[Any]]:
        """lm-eval's requests of a task, by kind; the requests of the last task are cached."""
        if self._requests[0] != task:
            self._requests = task, requests_of(self.tasks, task, self.plan.config.limit)
        return self._requests[1]

    def harness(self, checkpoint: PlannedCheckpoint, dtype: str, engine: ScoringEngine) -> HarnessModel:
        """lm-eval's model interface of a checkpoint, with its cached answers."""
        handle = CheckpointHandle(checkpoint.folder, read_manifest(checkpoint.folder))
        found, shape = checkpoint_tokenizer(handle, self.plan.config.tokenizer), model_config_of(handle)
        scorer = Scorer(engine, shape, Batching(self.plan.config.batch_size, shape.max_seq_len))
        return open_harness(scorer, handle, found, dtype, checkpoint.output)

    def note(self, **times: Any) -> None:
        """Appends measured times to the file of all evaluations, see `packing.MeasuredTime` and `LoadCosts`."""
        writer = JsonLinesWriter(self.plan.times)
        writer.write_line({"device": self.device.type, **times})
        writer.close()

    def _note_time(self, unit: WorkUnit, seconds: float) -> None:
        task, metrics = self.tasks.tasks[unit.task], unit.part is None
        documents = min(len(task.eval_docs), self.plan.config.limit or len(task.eval_docs))
        self.note(
            task=unit.task,
            kind=task.OUTPUT_TYPE,
            documents=0.0 if metrics else documents / unit.parts,
            seconds=0.0 if metrics else seconds,
            metric_s=seconds if metrics else 0.0,
            parameters=self.plan.checkpoint(unit.checkpoint).parameters,
            fewshot=int(task.get_config("num_fewshot") or 0),
        )


class ModelWorker(_EvaluationWorker):
    """Runs inference for parts of tasks."""

    role = MODEL

    def __init__(
        self, plan: EvaluationPlan, queue: WorkQueue, tasks: LoadedTasks, presence: Presence[WorkerRecord]
    ) -> None:
        super().__init__(plan, queue, tasks, presence)
        config = plan.config
        self.device = choose_device(config.device)
        self._dtype = choose_dtype(config.precision, self.device)
        most = None if config.staging_gib is None else int(config.staging_gib * 2**30)
        self._cache = NodeWeightsCache(Path(config.staging_folder), queue.folder, most)
        self._loaded: tuple[str, HarnessModel] | None = None

    def choose(self, state: QueueState) -> WorkUnit | None:
        """See `packing.choose`."""
        views = {one.name: WorkerView(one.name, one.loaded) for one in state.workers if one.role == MODEL}
        me = views.pop(self.name, WorkerView(self.name))
        names = self._cache.cached()
        cached = {one.id for one in self.plan.checkpoints if cached_name(one.digest, self._dtype) in names}
        return choose(state.open_units(MODEL), me, views.values(), cached, self.plan.costs)

    def compute(self, unit: WorkUnit, attempts: Mapping[str, int]) -> tuple[str, float | None]:
        """Answers the requests of a part of a task that are not in the cache of answers."""
        assert unit.part is not None
        model = self._load(self.plan.checkpoint(unit.checkpoint))
        begin, kinds, asked = time.perf_counter(), {}, False
        for kind, requests in self.requests(unit.task).items():
            values = None
            if model.answers.known(unit.task, kind, requests) is None:
                values = model.answer_share(unit.task, kind, requests, BatchShare(unit.part, unit.parts))
                asked = True
            kinds[kind] = {"requests": model.answers.digest(kind, requests), "values": values}
        seconds = time.perf_counter() - begin
        content = {"unit": asdict(unit), "worker": self.name, "seconds": seconds, "asked": asked, "kinds": kinds}
        content |= {"dtype": str(self._dtype).removeprefix("torch."), "device": self.device.type}
        return json.dumps(content), seconds if asked else None

    def _load(self, checkpoint: PlannedCheckpoint) -> HarnessModel:
        if self._loaded is not None and self._loaded[0] == checkpoint.id:
            return self._loaded[1]
        # Releases the old model first, because memory may not fit two.
        self._loaded = None
        begin = time.perf_counter()
        name = cached_name(checkpoint.digest, self._dtype)
        model, read = self._cache.load(checkpoint.folder, name, self.device, self._dtype)
        self.note(**{"stage_s" if read else "load_s": time.perf_counter() - begin})
        print(f"{checkpoint.id}: {'read' if read else 'mapped'}", flush=True)
        dtype = str(self._dtype).removeprefix("torch.")
        harness = self.harness(checkpoint, dtype, ModelScoringEngine(model))
        self._loaded = checkpoint.id, harness
        return harness

    def close(self) -> None:
        """Releases the cached checkpoints."""
        self._cache.close()


class MetricsWorker(_EvaluationWorker):
    """Joins the parts of tasks and computes metrics."""

    role = METRICS

    def choose(self, state: QueueState) -> WorkUnit | None:
        """Selects the task whose metrics take longest, of the highest priority."""
        return max(state.open_units(METRICS), key=lambda unit: (unit.priority, unit.tail_s), default=None)

    def compute(self, unit: WorkUnit, attempts: Mapping[str, int]) -> tuple[str, float | None]:
        """Computes the metrics and their error estimates of a task, as JSON for `join_results`."""
        checkpoint, task, config = self.plan.checkpoint(unit.checkpoint), unit.task, self.plan.config
        units = [one for one in self.plan.units if one.key == unit.key]
        parts = [read_json_note(self.queue.path(one)) for one in units]
        if not all(parts):
            self._reject(task, "a part of its answers is damaged", units, attempts)
        begin, self.device = time.perf_counter(), torch.device(parts[0]["device"])
        model = self.harness(checkpoint, parts[0]["dtype"], _NoModel())
        for kind, requests in self.requests(task).items():
            if model.answers.known(task, kind, requests) is not None:
                continue
            digest, own = model.answers.digest(kind, requests), [part["kinds"].get(kind, {}) for part in parts]
            if any(one.get("requests") != digest or one.get("values") is None for one in own):
                self._reject(task, "its requests changed during the evaluation", units, attempts)
            model.answers.keep(task, kind, requests, join_parts(kind, [one["values"] for one in own]))
        alone = LoadedTasks({task: self.tasks.tasks[task]}, {}, {})
        results = lm_eval_results(model, alone, config.bootstrap_iters, limit=config.limit, log_samples=True)
        text = json.dumps(results, default=handle_non_serializable, ensure_ascii=False)
        return text, time.perf_counter() - begin

    def _reject(self, task: str, why: str, units: Sequence[WorkUnit], attempts: Mapping[str, int]) -> NoReturn:
        """Removes the parts of a task; each is computed again if it has attempts left."""
        error = DataError(f"task {task}: {why}; run the command again to compute it anew")
        for unit in units:
            # Before the removal: a unit neither done nor failed would count as in progress at the worker that made it.
            if unit.id in attempts:
                self.queue.fail(unit.id, attempts[unit.id], str(error), error.exit_code)
            self.queue.path(unit).unlink(missing_ok=True)
        raise error


class _NoModel:
    """Engine of a metrics worker, for which all answers are cached."""

    device = torch.device("cpu")

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> torch.Tensor:
        raise AssertionError("an answer is missing")

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        raise AssertionError("an answer is missing")
