"""Coordinator of many tasks on many checkpoints: plans units, runs workers that take them, and writes the results."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megads.api import EXIT_OK, ConfigError, Progress, RankKilled, atomic_writer, render_duration
from megads.runtime.run_dir import refuse_unwritable
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLauncher
from megads.tools.evaluate.evaluation_plan import (
    PLAN_FILE,
    EvaluationPlan,
    PlannedCheckpoint,
    evaluation_folder,
    find_checkpoints,
    make_plan,
    plan_digest,
)
from megads.tools.evaluate.harness_tasks import LoadedTasks, join_results, metric_values, write_results
from megads.tools.evaluate.job import load_configured_tasks, record_results
from megads.tools.evaluate.results import show_plan, write_table
from megads.tools.evaluate.work_queue import METRICS, MODEL, QueueState, WorkQueue, read_json_note
from megads.tools.evaluate.worker_pool import model_shares, run_workers
from megads.tools.generate import print_line
from megads.tools.jobs import ended_jobs, exclusive, submit_job

_SLURM_POLL_S = 2.0
_ASSUMED_GPUS = 8
"""Assumed GPUs of a SLURM node, for splitting tasks; the number is only known on the node."""
_JOB_FILE = "job.json"


def coordinate(config: EvaluateConfig) -> int:
    """Runs a coordinated evaluation of a config that has been checked; the same command resumes it."""
    if config.launcher is EvaluationLauncher.slurm:
        on_gpus = config.device != "cpu"
        workers = config.workers or (_ASSUMED_GPUS if on_gpus else 1)
    else:
        shares = model_shares(config)
        # GPUs are hidden from workers that compute on the CPU.
        workers, on_gpus = len(shares), shares[0].variables.get("CUDA_VISIBLE_DEVICES") != ""
    checkpoints = find_checkpoints(config)
    tasks = load_configured_tasks(config)
    assert tasks is not None
    unknown = sorted(config.priority.keys() - tasks.tasks.keys())
    if unknown:
        raise ConfigError(f"priority: {', '.join(unknown)} is not evaluated: want {', '.join(tasks.tasks)}")
    folder, device = evaluation_folder(config), "cuda" if on_gpus else "cpu"
    plan_new = partial(make_plan, config, checkpoints, tasks, config.nodes * workers, device)
    if config.dry_run:
        show_plan(plan_new({}), config.nodes, workers)
        return EXIT_OK
    for place in {folder, *(one.output for one in checkpoints)}:
        refuse_unwritable(place)
    state_folder = folder / "coordinator" / plan_digest(config, checkpoints, tasks)
    with exclusive(folder / "coordinator", "output"):
        plan, queue = current_plan(state_folder, config, checkpoints, plan_new)
        print_line(
            f"{len(checkpoints)} checkpoints, {len(tasks.tasks)} tasks in {len(plan.units)} units, "
            f"{config.nodes} x {workers} workers; {state_folder}"
        )
        if not queue.read_state().is_over():
            if config.launcher is EvaluationLauncher.slurm:
                _work_on_slurm(config, queue)
            else:
                with Progress("evaluating") as shown:
                    run_workers(config, queue, show=lambda state: shown.update(note=_progress(state)))
        return write_all_results(config, plan, tasks, queue)


def current_plan(
    folder: Path,
    config: EvaluateConfig,
    checkpoints: Sequence[PlannedCheckpoint],
    plan_new: Callable[[dict[tuple[str, str], int]], EvaluationPlan],
) -> tuple[EvaluationPlan, WorkQueue]:
    """The current plan if its workers are running or queued, else a new plan that keeps the completed parts.

    Args:
        folder: folder of the queue.
        config: config of the user.
        checkpoints: checkpoints to evaluate.
        plan_new: makes a plan, given the number of parts of tasks that have completed parts.
    """
    parts: dict[tuple[str, str], int] = {}
    if (folder / PLAN_FILE).is_file():
        before = EvaluationPlan.read(folder)
        queue = WorkQueue(folder, before.units, config.attempts)
        state = queue.read_state()
        # In a copied run directory, the plan, workers and job belong to the original.
        if before.checkpoints == tuple(checkpoints) and (state.workers or _active_job(folder)):
            return before, queue
        parts = {unit.key: unit.parts for unit in before.units if unit.id in state.done}
    plan = plan_new(parts)
    queue = WorkQueue(folder, plan.units, config.attempts)
    queue.forget_attempts()
    plan.write(folder)
    return plan, queue


def _active_job(folder: Path) -> str:
    """Id of the SLURM job that an earlier command submitted; empty if there is none or it has ended."""
    job = str(read_json_note(folder / _JOB_FILE).get("job", ""))
    return "" if not job or job in ended_jobs([job]) else job


def _work_on_slurm(config: EvaluateConfig, queue: WorkQueue) -> None:
    """Submits a job array whose tasks run workers, or finds it, and waits until its work or the job has ended."""
    if job := _active_job(queue.folder):
        print_line(f"job {job} goes on")
    else:
        folder = queue.folder.absolute()
        options = [f"--array=0-{config.nodes - 1}", *shlex.split(config.sbatch_options)]
        name, output = f"evaluate-{folder.name[:8]}", folder / "logs" / "job-%A_%a.out"
        job = submit_job(Path(config.sbatch).absolute(), [str(folder)], name, output, options)
        with atomic_writer(folder / _JOB_FILE) as file:
            file.write(json.dumps({"job": job}).encode())
        print_line(f"job {job}: {config.nodes} tasks")
    try:
        with Progress("evaluating") as shown:
            state = queue.read_state()
            while not state.is_over():
                shown.update(note=f"job {job}, {_progress(state)}")
                # In this order, so that the results of a job that left the queue are seen.
                ended = job in ended_jobs([job])
                state = queue.read_state()
                if ended and not state.workers:
                    return
                time.sleep(_SLURM_POLL_S)
    except KeyboardInterrupt:
        print_line(f"job {job} continues without this command; run it again to follow it, scancel {job} ends it")
        raise


def _progress(state: QueueState) -> str:
    parts, tasks = (f"{sum(unit.id in state.done for unit in state.units[role])} of {len(state.units[role])}"
                    for role in (MODEL, METRICS))  # fmt: skip
    models = sum(worker.role == MODEL for worker in state.workers)
    left_s = sum(unit.cost_s for unit in state.open_units(MODEL)) / max(models, 1)
    at = ", ".join(sorted(worker.unit for worker in state.workers if worker.unit)[:2])
    return (
        f"{parts} units, metrics of {tasks} tasks"
        + (f", about {render_duration(left_s)} left" if left_s > 1 else "")
        + (f"; {at}" if at else "")
    )


def write_all_results(config: EvaluateConfig, plan: EvaluationPlan, tasks: LoadedTasks, queue: WorkQueue) -> int:
    """Writes the results of every checkpoint and reports failures; returns the exit code."""
    state = queue.read_state()
    found: dict[str, dict[str, float]] = {}
    for checkpoint in plan.checkpoints:
        units = [unit for unit in queue.units[METRICS] if unit.checkpoint == checkpoint.id and unit.id in state.done]
        measured = {unit.task: read_json_note(queue.path(unit)) for unit in units}
        if not measured:
            continue
        there = {name: task for name, task in tasks.tasks.items() if name in measured}
        # A group is the mean of all its tasks, so it is omitted if one is missing.
        loaded = tasks if len(there) == len(tasks.tasks) else LoadedTasks(there, {}, {})
        parts = [read_json_note(queue.path(unit)) for unit in plan.units if unit.checkpoint == checkpoint.id]
        about = {"pretrained": str(checkpoint.folder), "dtype": next(part["dtype"] for part in parts if part)}
        seconds = sum(part.get("seconds", 0.0) for part in parts)
        path = write_results(join_results(loaded, measured), checkpoint.output, about, config, seconds)
        print_line(path)
        found[checkpoint.id] = metric_values(json.loads(path.read_text(encoding="utf-8")))
        record_results(checkpoint.folder, checkpoint.step, [str(path)], found[checkpoint.id])
    write_table(evaluation_folder(config), plan.checkpoints, found)
    codes = []
    for unit in (*plan.units, *queue.units[METRICS]):
        if unit.id in state.failed:
            reason, code = state.failed[unit.id]
            print_line(f"failed: {unit.name}: {reason}")
            codes.append(code)
    for unit in state.unfinished(METRICS):
        print_line(f"missing: {unit.task} on {unit.checkpoint}: no worker is left; run the command again")
        codes.append(RankKilled.exit_code)
    return next(iter(codes), EXIT_OK)
