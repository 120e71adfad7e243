"""One worker of a coordinated evaluation: `python -m megads.tools.evaluate.worker <folder> model|metrics`.

A model worker loads a checkpoint and answers parts of tasks. A metrics worker joins the parts and computes metrics and
standard errors with lm-eval, so that model workers need not wait. Both take work from the queue until none is left.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from megads.errors import EXIT_BUG, EXIT_OK, MegadsError
from megads.runtime.environment import hide_progress_bars, use_passive_openmp_wait
from megads.tools.evaluate.work_queue import METRICS, MODEL

if TYPE_CHECKING:
    import torch

    from megads.runtime.claims import Presence
    from megads.tools.evaluate.evaluation_plan import EvaluationPlan, PlannedCheckpoint
    from megads.tools.evaluate.harness import HarnessModel
    from megads.tools.evaluate.harness_tasks import LoadedTasks
    from megads.tools.evaluate.packing import WorkUnit
    from megads.tools.evaluate.scoring import Scorer
    from megads.tools.evaluate.weights_cache import NodeWeightsCache
    from megads.tools.evaluate.work_queue import QueueState, WorkerRecord, WorkQueue

_POLL_S = 0.3


def main() -> NoReturn:
    """Runs a worker until no work is left."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.evaluate.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("role", choices=(MODEL, METRICS))
    given = parser.parse_args()
    begin = time.perf_counter()
    # Exits on SIGTERM, so that the worker releases its locks.
    signal.signal(signal.SIGTERM, _leave)
    # Before torch and tqdm are imported.
    use_passive_openmp_wait()
    hide_progress_bars()
    from megads.tools.evaluate.evaluation_plan import EvaluationPlan
    from megads.tools.evaluate.job import load_configured_tasks
    from megads.tools.evaluate.work_queue import WorkerRecord, WorkQueue

    plan = EvaluationPlan.read(given.folder)
    plan.config.resolve_plugins()
    queue = WorkQueue(given.folder, plan.config.attempts)
    record = WorkerRecord.of_this_process(role=given.role)
    with queue.joined(record) as presence:
        tasks = load_configured_tasks(plan.config)
        assert tasks is not None
        if given.role == MODEL:
            model_worker = ModelWorker(plan, queue, tasks, presence)
            try:
                model_worker.note_start(time.perf_counter() - begin)
                model_worker.work()
            finally:
                model_worker.close()
        else:
            MetricsWorker(plan, queue, tasks, presence).work()
    sys.exit(EXIT_OK)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


class _EvaluationWorker:
    """Base class of model and metrics workers.

    Args:
        plan: plan of the evaluation.
        queue: work queue.
        tasks: loaded tasks.
        presence: this worker's record in the queue.
    """

    def __init__(
        self, plan: EvaluationPlan, queue: WorkQueue, tasks: LoadedTasks, presence: Presence[WorkerRecord]
    ) -> None:
        self.plan, self.queue, self.tasks, self.presence = plan, queue, tasks, presence
        self.name = presence.participant.name
        self._requests: tuple[str, Mapping[str, list[Any]]] = "", {}

    def requests(self, task: str) -> Mapping[str, list[Any]]:
        """lm-eval's requests of a task, by kind; the requests of the last task are cached."""
        from megads.tools.evaluate.harness_tasks import requests_of

        if self._requests[0] != task:
            self._requests = task, requests_of(self.tasks, task, self.plan.config.limit)
        return self._requests[1]

    def harness(self, checkpoint: PlannedCheckpoint, dtype: str, scorer: Scorer, continuation: Any) -> HarnessModel:
        """lm-eval's model interface of a checkpoint, with its cached answers."""
        from megads.checkpoint.manifest import read_manifest
        from megads.checkpoint.read import CheckpointHandle
        from megads.tools.evaluate.harness import HarnessModel
        from megads.tools.evaluate.job import answer_cache
        from megads.tools.generate import checkpoint_tokenizer

        handle = CheckpointHandle(checkpoint.folder, read_manifest(checkpoint.folder))
        found = checkpoint_tokenizer(handle, self.plan.config.tokenizer)
        answers = answer_cache(handle, found, dtype, scorer.batching.max_length, checkpoint.output)
        return HarnessModel(scorer, found, continuation, answers)

    def attempt(self, name: str, state: QueueState, compute: Callable[[], None]) -> None:
        """Runs claimed work and records a failure.

        Raises:
            Exception: an unexpected error; the process may not be able to continue.
        """
        attempt = state.attempts.get(name, 0) + 1
        try:
            compute()
        except MegadsError as error:
            self.queue.fail(name, attempt, str(error), error.exit_code)
        except Exception as error:
            traceback.print_exc()
            self.queue.fail(name, attempt, f"{type(error).__name__}: {error}", EXIT_BUG)
            raise
        finally:
            self.presence.change(unit="")

    def note(self, line: Mapping[str, Any]) -> None:
        """Appends a measured time to the file of all evaluations."""
        from megads.runtime.metrics import JsonLinesWriter

        writer = JsonLinesWriter(self.plan.times)
        writer.write_line(line)
        writer.close()


class ModelWorker(_EvaluationWorker):
    """Runs inference for parts of tasks."""

    def __init__(
        self, plan: EvaluationPlan, queue: WorkQueue, tasks: LoadedTasks, presence: Presence[WorkerRecord]
    ) -> None:
        super().__init__(plan, queue, tasks, presence)
        from megads.evaluate.generation import choose_device, choose_dtype
        from megads.tools.evaluate.weights_cache import NodeWeightsCache

        config = plan.config
        self._device = choose_device(config.device)
        self._dtype: torch.dtype = choose_dtype(config.precision, self._device)
        most = None if config.staging_gib is None else int(config.staging_gib * 2**30)
        self._cache: NodeWeightsCache = NodeWeightsCache(Path(config.staging_folder), queue.folder, most)
        self._harness: HarnessModel | None = None
        self._loaded: str | None = None

    def note_start(self, seconds: float) -> None:
        """Records the startup time of the process."""
        self.note({"device": self._device.type, "start_s": seconds})

    def work(self) -> None:
        """Takes units until all are done or failed; units of a worker that dies become available again."""
        from megads.tools.evaluate.packing import choose
        from megads.tools.evaluate.weights_cache import cached_name
        from megads.tools.evaluate.work_queue import open_units, unit_id, views_of

        units = self.plan.units
        names = {cached_name(one.digest, self._dtype): one.id for one in self.plan.checkpoints}
        while True:
            state = self.queue.read_state()
            waiting = open_units(units, state)
            if not waiting and not any(unit_id(unit) in state.busy for unit in units):
                return
            me, others = views_of(state, self.name)
            cached = {names[name] for name in self._cache.cached() if name in names}
            unit = choose(waiting, me, others, cached, self.plan.costs)
            if unit is None:
                time.sleep(_POLL_S)
            elif self.queue.claim(unit_id(unit), state, self.name):
                self.presence.change(loaded=unit.checkpoint, unit=unit.name)
                self.attempt(unit_id(unit), state, partial(self._answer, unit))

    def close(self) -> None:
        """Releases the cached checkpoints."""
        self._cache.close()

    def _answer(self, unit: WorkUnit) -> None:
        from megads.runtime.files import atomic_writer
        from megads.tools.evaluate.harness import BatchShare

        checkpoint = self.plan.checkpoint(unit.checkpoint)
        model = self._load(checkpoint)
        begin, kinds, asked = time.perf_counter(), {}, False
        for kind, requests in self.requests(unit.task).items():
            values = None
            if model.answers.known(unit.task, kind, requests) is None:
                values = model.answer_share(unit.task, kind, requests, BatchShare(unit.part, unit.parts))
                asked = True
            kinds[kind] = {"requests": model.answers.digest(kind, requests), "values": values}
        seconds = time.perf_counter() - begin
        content = {"unit": asdict(unit), "worker": self.name, "seconds": seconds, "asked": asked, "kinds": kinds}
        content |= {"dtype": str(self._dtype).removeprefix("torch."), "device": self._device.type}
        with atomic_writer(self.queue.part_path(unit)) as file:
            file.write(json.dumps(content).encode())
        if asked:
            self.note(measured(self.tasks, unit.task, self.plan, checkpoint, self._device.type, seconds, unit.parts))

    def _load(self, checkpoint: PlannedCheckpoint) -> HarnessModel:
        if self._loaded == checkpoint.id and self._harness is not None:
            return self._harness
        from megads.tools.evaluate.scoring import Batching, CachedContinuation, ModelScoringEngine, Scorer
        from megads.tools.evaluate.weights_cache import cached_name

        # Releases the old model first, because memory may not fit two.
        self._loaded = self._harness = None
        begin = time.perf_counter()
        name = cached_name(checkpoint.digest, self._dtype)
        loaded = self._cache.load(checkpoint.folder, name, self._device, self._dtype)
        phase = "stage_s" if loaded.read else "load_s"
        self.note({"device": self._device.type, phase: time.perf_counter() - begin})
        print(f"{checkpoint.id}: {'read' if loaded.read else 'mapped'}", flush=True)
        model = loaded.model
        batching = Batching(self.plan.config.batch_size, model.config.max_seq_len)
        scorer = Scorer(ModelScoringEngine(model), model.config, batching)
        dtype = str(self._dtype).removeprefix("torch.")
        self._harness = self.harness(checkpoint, dtype, scorer, partial(CachedContinuation, model))
        self._loaded = checkpoint.id
        return self._harness


def measured(
    tasks: LoadedTasks,
    name: str,
    plan: EvaluationPlan,
    checkpoint: PlannedCheckpoint,
    device: str,
    seconds: float,
    parts: int,
    metric_s: float = 0.0,
) -> dict[str, Any]:
    """A line of the file of measured times, see `packing.MeasuredTime`."""
    task = tasks.tasks[name]
    documents = min(len(task.eval_docs), plan.config.limit or len(task.eval_docs))
    return {
        "task": name,
        "kind": task.OUTPUT_TYPE,
        "documents": 0.0 if metric_s else documents / parts,
        "seconds": seconds,
        "metric_s": metric_s,
        "parameters": checkpoint.parameters,
        "device": device,
        "fewshot": int(task.get_config("num_fewshot") or 0),
    }


class MetricsWorker(_EvaluationWorker):
    """Joins the parts of tasks and computes metrics."""

    def work(self) -> None:
        """Takes tasks whose parts are done, until every task has its metrics or has failed."""
        from megads.tools.evaluate.work_queue import is_over, job_id, ready_jobs

        units = self.plan.units
        tails = {unit.key: (unit.priority, unit.tail_s) for unit in units}
        while True:
            state = self.queue.read_state()
            ready = ready_jobs(units, state)
            if not ready:
                if is_over(units, state):
                    return
                time.sleep(_POLL_S)
                continue
            key = max(ready, key=lambda key: tails[key])
            if self.queue.claim(job_id(*key), state, self.name):
                self.presence.change(unit=f"metrics of {key[1]} on {key[0]}")
                self.attempt(job_id(*key), state, partial(self._measure, *key, state.attempts))

    def _measure(self, checkpoint_id: str, task: str, attempts: Mapping[str, int]) -> None:
        from megads.runtime.files import atomic_writer
        from megads.tools.evaluate.harness import join_parts
        from megads.tools.evaluate.harness_tasks import measure_task
        from megads.tools.evaluate.work_queue import read_json_note

        checkpoint = self.plan.checkpoint(checkpoint_id)
        units = [unit for unit in self.plan.units if unit.key == (checkpoint_id, task)]
        parts = [read_json_note(self.queue.part_path(unit)) for unit in units]
        if not all(parts):
            self._reject(task, "a part of its answers is damaged", units, attempts)
        begin, dtype = time.perf_counter(), parts[0]["dtype"]
        model = self.harness(checkpoint, dtype, without_model(checkpoint, self.plan.config.batch_size), None)
        for kind, requests in self.requests(task).items():
            if model.answers.known(task, kind, requests) is not None:
                continue
            digest, own = model.answers.digest(kind, requests), [part["kinds"].get(kind, {}) for part in parts]
            if any(one.get("requests") != digest or one.get("values") is None for one in own):
                self._reject(task, "its requests changed during the evaluation", units, attempts)
            model.answers.keep(task, kind, requests, join_parts(kind, [one["values"] for one in own]))
        config = self.plan.config
        text = measure_task(model, self.tasks, task, config.limit, config.bootstrap_iters)
        with atomic_writer(self.queue.metrics_path(checkpoint_id, task)) as file:
            file.write(text.encode("utf-8", "surrogatepass"))
        seconds = time.perf_counter() - begin
        self.note(measured(self.tasks, task, self.plan, checkpoint, parts[0]["device"], 0.0, 1, metric_s=seconds))

    def _reject(self, task: str, why: str, units: Sequence[WorkUnit], attempts: Mapping[str, int]) -> NoReturn:
        """Removes the parts of a task; each is computed again if it has attempts left."""
        from megads.errors import DataError
        from megads.tools.evaluate.work_queue import unit_id

        error = DataError(f"task {task}: {why}; run the command again to compute it anew")
        for unit in units:
            # Before the removal: a unit neither done nor failed would count as in progress at the worker that made it.
            if unit_id(unit) in attempts:
                self.queue.fail(unit_id(unit), attempts[unit_id(unit)], str(error), error.exit_code)
            self.queue.part_path(unit).unlink(missing_ok=True)
        raise error


class _NoModel:
    """Placeholder for an engine if every answer is cached."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def evaluate(self, micro_batches: Any) -> Any:
        raise AssertionError("an answer is missing")

    score = evaluate


def without_model(checkpoint: PlannedCheckpoint, batch_size: int) -> Scorer:
    """A scorer with the shape of a model, which cannot score."""
    from megads.checkpoint.manifest import read_manifest
    from megads.checkpoint.read import CheckpointHandle, model_config_of
    from megads.tools.evaluate.scoring import Batching, Scorer

    shape = model_config_of(CheckpointHandle(checkpoint.folder, read_manifest(checkpoint.folder)))
    return Scorer(_NoModel(), shape, Batching(batch_size, shape.max_seq_len))  # type: ignore[arg-type]


if __name__ == "__main__":
    try:
        main()
    except MegadsError as error:
        print(f"megads: {error}", file=sys.stderr)
        sys.exit(error.exit_code or EXIT_BUG)
