"""Coordinator of many tasks on many checkpoints: plans units, runs workers that take them, and writes the results."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.errors import EXIT_OK, ConfigError, RankKilled
from megads.runtime.files import atomic_writer
from megads.runtime.lease import claimed
from megads.runtime.progress import Progress, render_duration
from megads.runtime.rich_console import VisibleConsole
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
from megads.tools.evaluate.job import load_configured_tasks, record_results, refuse_concurrent
from megads.tools.evaluate.packing import WorkUnit
from megads.tools.evaluate.packing_simulation import (
    ONE_JOB_A_TASK,
    SimulatedCluster,
    SimulatedTask,
    lower_bound_s,
    simulate,
)
from megads.tools.evaluate.work_queue import (
    MODEL,
    QueueState,
    WorkQueue,
    has_useful_workers,
    is_over,
    job_id,
    open_units,
    read_json_note,
    unit_id,
)
from megads.tools.evaluate.worker_pool import WorkerJob, WorkerPool, gpus_of, workers_of
from megads.tools.generate import print_line

_POLL_S, _SLURM_POLL_S = 0.5, 2.0
_ASSUMED_GPUS = 8
"""Assumed GPUs of a SLURM node, for splitting tasks."""
TABLE_FILE, CHART_FILE = "table.json", "table.png"
_LEAST_WIDTH = 100
_MOST_UNITS = 40
_MARKERS = "osD^v<>PX*"


def coordinate(config: EvaluateConfig) -> int:
    """Runs a coordinated evaluation of a config that has been checked; the same command resumes it."""
    workers, nodes = _workers(config), config.nodes
    checkpoints = find_checkpoints(config)
    tasks = load_configured_tasks(config)
    assert tasks is not None
    unknown = sorted(config.priority.keys() - tasks.tasks.keys())
    if unknown:
        raise ConfigError(f"priority: {', '.join(unknown)} is not evaluated: want {', '.join(tasks.tasks)}")
    folder = evaluation_folder(config)
    on_gpus = config.device != "cpu" if config.launcher is EvaluationLauncher.slurm else bool(gpus_of(config))
    device = "cuda" if on_gpus else "cpu"
    state_folder = folder / "coordinator" / plan_digest(config, checkpoints, tasks)
    if config.dry_run:
        plan = make_plan(config, checkpoints, tasks, nodes * workers, device, {})
        show_plan(plan, nodes, workers)
        return EXIT_OK
    for place in {folder, *(one.output for one in checkpoints)}:
        refuse_unwritable(place)
    refuse_concurrent(folder / "coordinator")
    with claimed(folder / "coordinator"):
        queue = WorkQueue(state_folder, config.attempts)
        job = WorkerJob(queue.folder)
        plan = planned(config, checkpoints, tasks, nodes * workers, device, queue, job)
        print_line(
            f"{len(checkpoints)} checkpoints, {len(tasks.tasks)} tasks in {len(plan.units)} units, "
            f"{nodes} x {workers} workers; {state_folder}"
        )
        _work(config, plan, queue, job)
        return write_all_results(config, plan, tasks, queue)


def planned(
    config: EvaluateConfig,
    checkpoints: Sequence[PlannedCheckpoint],
    tasks: LoadedTasks,
    workers: int,
    device: str,
    queue: WorkQueue,
    job: WorkerJob,
) -> EvaluationPlan:
    """The current plan if its workers are running or queued, else a new plan that keeps the completed parts."""
    state = queue.read_state()
    parts: dict[tuple[str, str], int] = {}
    if (queue.folder / PLAN_FILE).is_file():
        before = EvaluationPlan.read(queue.folder)
        # In a copied run directory, the plan, workers and job belong to the original.
        if before.checkpoints == tuple(checkpoints) and (state.workers or job.is_queued()):
            return before
        parts = {unit.key: unit.parts for unit in before.units if unit_id(unit) in state.done}
    queue.forget_attempts()
    plan = make_plan(config, checkpoints, tasks, workers, device, parts)
    plan.write(queue.folder)
    return plan


def _workers(config: EvaluateConfig) -> int:
    """Number of model workers per node."""
    if config.launcher is EvaluationLauncher.local:
        return workers_of(config)
    # The number of GPUs is only known on the node.
    return config.workers or (1 if config.device == "cpu" else _ASSUMED_GPUS)


def _work(config: EvaluateConfig, plan: EvaluationPlan, queue: WorkQueue, job: WorkerJob) -> None:
    """Runs workers until every task has its metrics or has failed, or no worker is left to continue."""
    if config.launcher is EvaluationLauncher.slurm:
        _work_on_slurm(config, plan, queue, job)
        return
    with ExitStack() as stack:
        shown = stack.enter_context(Progress("evaluating"))
        state = queue.read_state()
        if is_over(plan.units, state):
            return
        pool = stack.enter_context(WorkerPool(queue.folder, config))
        while not is_over(plan.units, state):
            shown.update(note=_progress(plan, state))
            for line in pool.start_missing():
                print_line(line)
            if not has_useful_workers(plan.units, state, pool.roles):
                return
            time.sleep(_POLL_S)
            state = queue.read_state()


def _work_on_slurm(config: EvaluateConfig, plan: EvaluationPlan, queue: WorkQueue, job: WorkerJob) -> None:
    state = queue.read_state()
    if is_over(plan.units, state):
        return
    if job.is_queued():
        print_line(f"job {job.id} goes on")
    else:
        print_line(f"job {job.submit(config)}: {config.nodes} tasks")
    try:
        with Progress("evaluating") as shown:
            while not is_over(plan.units, state):
                shown.update(note=f"job {job.id}, {_progress(plan, state)}")
                # In this order, so that the results of a job that left the queue are seen.
                queued = job.is_queued()
                state = queue.read_state()
                if not queued and not state.workers:
                    return
                time.sleep(_SLURM_POLL_S)
    except KeyboardInterrupt:
        print_line(f"job {job.id} continues without this command; run it again to follow it, scancel {job.id} ends it")
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


def write_all_results(config: EvaluateConfig, plan: EvaluationPlan, tasks: LoadedTasks, queue: WorkQueue) -> int:
    """Writes the results of every checkpoint and reports failures; returns the exit code."""
    state = queue.read_state()
    found: dict[str, dict[str, float]] = {}
    for checkpoint in plan.checkpoints:
        measured = {
            name: read_json_note(queue.metrics_path(checkpoint.id, name))
            for name in tasks.tasks
            if job_id(checkpoint.id, name) in state.done
        }
        if measured:
            found[checkpoint.id] = _results_of(config, checkpoint, tasks, measured, queue, plan.units)
    write_table(evaluation_folder(config), plan.checkpoints, found)
    failures = _failures(plan.units, state)
    for line, _ in failures:
        print_line(line)
    return failures[0][1] if failures else EXIT_OK


def _results_of(
    config: EvaluateConfig,
    checkpoint: PlannedCheckpoint,
    tasks: LoadedTasks,
    measured: dict[str, dict[str, Any]],
    queue: WorkQueue,
    units: Sequence[WorkUnit],
) -> dict[str, float]:
    """Writes the results of a checkpoint and records them in the events of its run; returns the metrics."""
    there = {name: task for name, task in tasks.tasks.items() if name in measured}
    # A group is the mean of all its tasks, so it is omitted if one is missing.
    loaded = tasks if len(there) == len(tasks.tasks) else LoadedTasks(there, {}, {})
    own = [read_json_note(queue.part_path(unit)) for unit in units if unit.checkpoint == checkpoint.id]
    about = {"pretrained": str(checkpoint.folder), "dtype": next(part["dtype"] for part in own if part)}
    seconds = sum(part.get("seconds", 0.0) for part in own)
    how = {"batch_size": config.batch_size, "limit": config.limit, "bootstrap_iters": config.bootstrap_iters}
    path = write_results(
        join_results(loaded, measured), checkpoint.output, about, how, seconds, log_samples=config.log_samples
    )
    print_line(path)
    metrics = metric_values(json.loads(path.read_text(encoding="utf-8")))
    record_results(checkpoint.folder, checkpoint.step, [str(path)], metrics)
    return metrics


def _failures(units: Sequence[WorkUnit], state: QueueState) -> list[tuple[str, int]]:
    """A message and an exit code for each failed unit and task, and for each task that no worker completed."""
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
                (f"missing: {task} on {checkpoint}: no worker is left; run the command again", RankKilled.exit_code)
            )
    return lines


def show_plan(plan: EvaluationPlan, nodes: int, workers: int) -> None:
    """Prints the units in the order in which a single worker would take them, and the predicted makespans.

    Args:
        plan: plan of the evaluation.
        nodes: number of nodes.
        workers: number of model workers per node.
    """
    console = VisibleConsole(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "task", "part", "priority", "seconds"):
        table.add_column(header, justify="left" if header in ("checkpoint", "task") else "right", no_wrap=True)
    ordered = sorted(plan.units, key=lambda unit: (-unit.priority, -unit.cost_s - unit.tail_s, unit.checkpoint))
    for unit in ordered[:_MOST_UNITS]:
        part = f"{unit.part + 1} of {unit.parts}" if unit.parts > 1 else ""
        table.add_row(unit.checkpoint, unit.task, part, str(unit.priority or ""), f"{unit.cost_s:.1f}")
    console.print(table)
    if len(ordered) > _MOST_UNITS:
        console.print(f"and {len(ordered) - _MOST_UNITS} shorter units")
    ours, theirs, bound = predicted_s(plan, nodes, workers)
    console.print(
        f"{len(plan.checkpoints)} checkpoints, {len(plan.units)} units on {nodes} x {workers} workers: about "
        f"{render_duration(ours)}; one job per task would take {render_duration(theirs)}; lower bound "
        f"{render_duration(bound)}"
    )


def predicted_s(plan: EvaluationPlan, nodes: int, workers: int) -> tuple[float, float, float]:
    """Predicted makespans in seconds: the coordinator, one job per task, and the lower bound of any schedule."""
    cost_s: dict[tuple[str, str], float] = {}
    first: dict[tuple[str, str], WorkUnit] = {}
    for unit in plan.units:
        cost_s[unit.key] = cost_s.get(unit.key, 0.0) + unit.cost_s
        first.setdefault(unit.key, unit)
    tasks = [
        SimulatedTask(*key, cost, first[key].tail_s, cost, first[key].parts, first[key].priority, first[key].tail_s)
        for key, cost in cost_s.items()
    ]
    costs = plan.costs
    cluster = SimulatedCluster(nodes, workers, plan.config.metric_workers, costs.start_s, costs.stage_s, costs.load_s)
    seconds = (simulate(tasks, cluster, rules).seconds for rules in (None, ONE_JOB_A_TASK))
    return next(seconds), next(seconds), lower_bound_s(tasks, cluster)


def write_table(
    folder: Path, checkpoints: Sequence[PlannedCheckpoint], found: Mapping[str, Mapping[str, float]]
) -> None:
    """Prints the task metrics of all checkpoints, and writes them to table.json and, as curves over steps, table.png.

    Args:
        folder: folder of the files.
        checkpoints: checkpoints in order.
        found: metrics by checkpoint id.
    """
    there = [one for one in checkpoints if one.id in found]
    names = list(dict.fromkeys(name for one in there for name in found[one.id]))
    shown = [name for name in names if "_stderr" not in name and not name.endswith("/sample_len")]
    if not there:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for one in there:
        table.add_column(one.id, justify="right")
    for name in shown:
        table.add_row(name, *(_cell(found[one.id].get(name)) for one in there))
    console = VisibleConsole(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    content = {
        "checkpoints": [
            {"id": one.id, "run": one.run, "step": one.step, "folder": str(one.folder), "metrics": found[one.id]}
            for one in there
        ]
    }
    with atomic_writer(folder / TABLE_FILE) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    print_line(folder / TABLE_FILE)
    if len({one.step for one in there}) > 1:
        _draw(folder / CHART_FILE, there, shown, found)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _draw(
    path: Path,
    checkpoints: Sequence[PlannedCheckpoint],
    names: Sequence[str],
    found: Mapping[str, Mapping[str, float]],
) -> None:
    """Draws each metric over steps, one line per run."""
    try:
        from megads.tools.report.style import close_panel, count_axis, house_style, open_panel, png
    except ModuleNotFoundError as error:
        print_line(f"no picture, as {error.name} is not installed: pip install 'megads[report]'")
        return
    with house_style():
        figure, axes = open_panel("Tasks", wide=True)
        runs = list(dict.fromkeys(one.run for one in checkpoints))
        for (run, name), marker in zip(((run, name) for run in runs for name in names), cycle(_MARKERS), strict=False):
            points = [
                (one.step, found[one.id][name]) for one in checkpoints if one.run == run and name in found[one.id]
            ]
            if points:
                label = f"{run} {name}" if len(runs) > 1 else name
                axes.plot(*zip(*sorted(points), strict=True), marker=marker, markersize=4, linewidth=1, label=label)
        count_axis(axes)
        close_panel(axes, "step", "")
        with atomic_writer(path) as file:
            file.write(png(figure))
    print_line(path)
