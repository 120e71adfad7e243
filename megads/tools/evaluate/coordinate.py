"""Many tasks on many checkpoints, by workers that take parts of them: plans, starts, waits, and writes the results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from megads.errors import EXIT_OK, ConfigError, RankKilled
from megads.evaluate.harness_tasks import LoadedTasks, join_results, metric_values, write_results
from megads.runtime.lease import claimed
from megads.runtime.metrics import EventWriter
from megads.runtime.progress import Progress, render_duration
from megads.runtime.run_dir import EVENTS_FILE, refuse_unwritable
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLauncher
from megads.tools.evaluate.coordinator_output import show_plan, write_table
from megads.tools.evaluate.evaluation_plan import (
    PLAN_FILE,
    EvaluationPlan,
    PlannedCheckpoint,
    evaluation_folder,
    find_checkpoints,
    identity_of,
    make_plan,
)
from megads.tools.evaluate.job import tasks_of
from megads.tools.evaluate.packing import WorkUnit
from megads.tools.evaluate.work_queue import (
    MODEL,
    QueueState,
    WorkQueue,
    can_go_on,
    is_over,
    job_id,
    open_units,
    read_note,
    unit_id,
)
from megads.tools.evaluate.worker_pool import WorkerJob, WorkerPool, gpus_of, workers_of
from megads.tools.generate import say

_POLL_S, _SLURM_POLL_S = 0.5, 2.0
_ASSUMED_GPUS = 8
"""Of a SLURM node, for the sizes of parts."""


def coordinate(config: EvaluateConfig) -> int:
    """Evaluates what the config, already checked, names with a coordinator; the same command again does what is
    missing."""
    workers, nodes = _workers(config), config.nodes
    checkpoints = find_checkpoints(config)
    tasks = tasks_of(config)
    assert tasks is not None
    unknown = sorted(config.priority.keys() - tasks.tasks.keys())
    if unknown:
        raise ConfigError(f"priority: {', '.join(unknown)} is not evaluated: want {', '.join(tasks.tasks)}")
    folder = evaluation_folder(config)
    on_gpus = config.device != "cpu" if config.launcher is EvaluationLauncher.slurm else bool(gpus_of(config))
    device = "cuda" if on_gpus else "cpu"
    state_folder = folder / "coordinator" / identity_of(config, checkpoints, tasks)
    if config.dry_run:
        plan = make_plan(config, checkpoints, tasks, nodes * workers, device, {})
        show_plan(plan, nodes, workers)
        return EXIT_OK
    for place in {folder, *(one.output for one in checkpoints)}:
        refuse_unwritable(place)
    with claimed(folder / "coordinator"):
        queue = WorkQueue(state_folder, config.attempts)
        job = WorkerJob(queue.folder)
        plan = planned(config, checkpoints, tasks, nodes * workers, device, queue, job)
        say(
            f"{len(checkpoints)} checkpoints, {len(tasks.tasks)} tasks in {len(plan.units)} units, "
            f"{nodes} x {workers} workers; {state_folder}"
        )
        _work(config, plan, queue, job)
        return conclude(config, plan, tasks, queue)


def planned(
    config: EvaluateConfig,
    checkpoints: Sequence[PlannedCheckpoint],
    tasks: LoadedTasks,
    workers: int,
    device: str,
    queue: WorkQueue,
    job: WorkerJob,
) -> EvaluationPlan:
    """The plan of workers that live or wait, or a new one that keeps the parts which are done."""
    state = queue.look()
    parts: dict[tuple[str, str], int] = {}
    if (queue.folder / PLAN_FILE).is_file():
        before = EvaluationPlan.read(queue.folder)
        # In a copy of a run the plan, the workers and the job are those of the original.
        if before.checkpoints == tuple(checkpoints) and (state.workers or job.is_queued()):
            return before
        parts = {unit.key: unit.parts for unit in before.units if unit_id(unit) in state.done}
    queue.forget_attempts()
    plan = make_plan(config, checkpoints, tasks, workers, device, parts)
    plan.write(queue.folder)
    return plan


def _workers(config: EvaluateConfig) -> int:
    """Of each node."""
    if config.launcher is EvaluationLauncher.local:
        return workers_of(config)
    # How many GPUs a node has is seen there.
    return config.workers or (1 if config.device == "cpu" else _ASSUMED_GPUS)


def _work(config: EvaluateConfig, plan: EvaluationPlan, queue: WorkQueue, job: WorkerJob) -> None:
    """Waits until every task has its metrics or failed, or no worker is left that could go on."""
    if config.launcher is EvaluationLauncher.slurm:
        _work_on_slurm(config, plan, queue, job)
        return
    with ExitStack() as stack:
        shown = stack.enter_context(Progress("evaluating"))
        state = queue.look()
        if is_over(plan.units, state):
            return
        pool = stack.enter_context(WorkerPool(queue.folder, config))
        while not is_over(plan.units, state):
            shown.update(note=_progress(plan, state))
            for line in pool.start_missing():
                say(line)
            if not can_go_on(plan.units, state, pool.roles):
                return
            time.sleep(_POLL_S)
            state = queue.look()


def _work_on_slurm(config: EvaluateConfig, plan: EvaluationPlan, queue: WorkQueue, job: WorkerJob) -> None:
    state = queue.look()
    if is_over(plan.units, state):
        return
    if job.is_queued():
        say(f"job {job.id} goes on")
    else:
        say(f"job {job.submit(config)}: {config.nodes} tasks")
    try:
        with Progress("evaluating") as shown:
            while not is_over(plan.units, state):
                shown.update(note=f"job {job.id}, {_progress(plan, state)}")
                # In this order: who leaves the queue has done what it did.
                queued = job.is_queued()
                state = queue.look()
                if not queued and not state.workers:
                    return
                time.sleep(_SLURM_POLL_S)
    except KeyboardInterrupt:
        say(f"job {job.id} goes on without this command, which may be given again; scancel {job.id} ends it")
        raise


def _progress(plan: EvaluationPlan, state: QueueState) -> str:
    done = sum(unit_id(unit) in state.done for unit in plan.units)
    keys = {unit.key for unit in plan.units}
    metrics = sum(job_id(*key) in state.done for key in keys)
    models = sum(worker.role == MODEL for worker in state.workers)
    left_s = sum(unit.cost_s for unit in open_units(plan.units, state)) / max(models, 1)
    at = ", ".join(sorted(worker.unit for worker in state.workers if worker.unit)[:2])
    return (
        f"{done} of {len(plan.units)} units, metrics of {metrics} of {len(keys)} tasks"
        + (f", about {render_duration(left_s)} left" if left_s > 1 else "")
        + (f"; {at}" if at else "")
    )


def conclude(config: EvaluateConfig, plan: EvaluationPlan, tasks: LoadedTasks, queue: WorkQueue) -> int:
    """Writes the results of every checkpoint, and says what failed."""
    state = queue.look()
    found: dict[str, dict[str, float]] = {}
    for checkpoint in plan.checkpoints:
        measured = {
            name: read_note(queue.metrics_path(checkpoint.id, name))
            for name in tasks.tasks
            if job_id(checkpoint.id, name) in state.done
        }
        if measured:
            found[checkpoint.id] = _results_of(config, checkpoint, tasks, measured, queue, plan.units)
    write_table(evaluation_folder(config), plan.checkpoints, found)
    failures = _failures(plan.units, state)
    for line, _ in failures:
        say(line)
    return failures[0][1] if failures else EXIT_OK


def _results_of(
    config: EvaluateConfig,
    checkpoint: PlannedCheckpoint,
    tasks: LoadedTasks,
    measured: dict[str, dict[str, Any]],
    queue: WorkQueue,
    units: Sequence[WorkUnit],
) -> dict[str, float]:
    """Writes a checkpoint's results and notes them in its run's events; returns the metrics."""
    there = {name: task for name, task in tasks.tasks.items() if name in measured}
    # A group is the mean of all its tasks.
    loaded = tasks if len(there) == len(tasks.tasks) else LoadedTasks(there, {}, {})
    own = [read_note(queue.part_path(unit)) for unit in units if unit.checkpoint == checkpoint.id]
    about = {"pretrained": str(checkpoint.folder), "dtype": next(part["dtype"] for part in own if part)}
    seconds = sum(part.get("seconds", 0.0) for part in own)
    how = {"batch_size": config.batch_size, "limit": config.limit, "bootstrap_iters": config.bootstrap_iters}
    path = write_results(
        join_results(loaded, measured), checkpoint.output, about, how, seconds, log_samples=config.log_samples
    )
    say(path)
    metrics = metric_values(json.loads(path.read_text(encoding="utf-8")))
    run_dir = checkpoint.folder.parent.parent
    if (run_dir / EVENTS_FILE).is_file():
        events = EventWriter(run_dir)
        events.write("evaluation", step=checkpoint.step, files=[str(path)], results=metrics)
        events.close()
    return metrics


def _failures(units: Sequence[WorkUnit], state: QueueState) -> list[tuple[str, int]]:
    """A line and an exit code for each unit and task that was given up, and for those that nobody came to."""
    lines = []
    for unit in units:
        if unit_id(unit) in state.failed:
            reason, code = state.failed[unit_id(unit)]
            lines.append((f"failed: {unit.name}: {reason}", code))
    failed = {unit.key for unit in units if unit_id(unit) in state.failed}
    for checkpoint, task in dict.fromkeys(unit.key for unit in units):
        name = job_id(checkpoint, task)
        if name in state.failed:
            reason, code = state.failed[name]
            lines.append((f"failed: metrics of {task} on {checkpoint}: {reason}", code))
        elif name not in state.done and (checkpoint, task) not in failed:
            lines.append(
                (f"missing: {task} on {checkpoint}: no worker is left; the same command goes on", RankKilled.exit_code)
            )
    return lines
