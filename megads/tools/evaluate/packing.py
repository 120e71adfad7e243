"""Scheduling of evaluation units: pure functions, used by simulations and real evaluations alike.

An evaluation of many checkpoints is a set of units, each a checkpoint, a task, and a part of the task's batches.
Workers, one per GPU, take units when they are free. The rules are those of Acme's evaluation coordinator (Hu et al.,
arXiv 2403.07648, section 6.2): longest first (Graham's LPT, 1969), by previously measured times; long tasks are split;
few model loads. A worker therefore keeps its checkpoint unless a unit of another one has become critical.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

PARTS_A_WORKER = 8
"""A task is split if it would take a worker longer than 1/8 of the ideal makespan of the whole evaluation."""
LEAST_PART_S = 5.0
"""Minimum duration of a part, because each part has to build the requests of the task."""


@dataclass(frozen=True)
class TaskCost:
    """A task on a checkpoint, before it is split.

    Attributes:
        checkpoint: id of the checkpoint.
        task: name of the task.
        cost_s: predicted time of one worker, in seconds.
        pieces: maximum number of parts, such as its number of documents.
        priority: priority of the task; higher priorities run first.
        parts: number of parts fixed by an earlier start; None for any number.
        tail_s: predicted time of the metrics, in seconds; they can only be computed after all parts.
    """

    checkpoint: str
    task: str
    cost_s: float
    pieces: int = 1
    priority: int = 0
    parts: int | None = None
    tail_s: float = 0.0


@dataclass(frozen=True)
class WorkUnit:
    """Unit of work that a worker takes: one part of a task on a checkpoint.

    Attributes:
        checkpoint: id of the checkpoint.
        task: name of the task.
        part: index of the part, from 0.
        parts: number of parts of the task.
        cost_s: predicted time of the part, in seconds.
        priority: see TaskCost.
        tail_s: see TaskCost.
    """

    checkpoint: str
    task: str
    part: int
    parts: int
    cost_s: float
    priority: int = 0
    tail_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Checkpoint and task."""
        return self.checkpoint, self.task

    @property
    def name(self) -> str:
        """Readable name."""
        share = f" ({self.part + 1} of {self.parts})" if self.parts > 1 else ""
        return f"{self.task} on {self.checkpoint}{share}"


@dataclass(frozen=True)
class LoadCosts:
    """Costs before a worker's first unit of a checkpoint, in seconds.

    Attributes:
        start_s: time to start a process: imports, tasks, tokenizer.
        stage_s: time to read a checkpoint into the node's memory and verify it.
        load_s: time to load a checkpoint from the node's memory to the worker's device.
    """

    start_s: float = 0.0
    stage_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """State of a worker for scheduling.

    Attributes:
        name: name of the worker.
        loaded: checkpoint that it holds; None before the first.
    """

    name: str
    loaded: str | None = None


def split(tasks: Sequence[TaskCost], workers: int, *, parts_a_worker: int | None = PARTS_A_WORKER) -> list[WorkUnit]:
    """Splits tasks into units; long tasks become several units.

    Args:
        tasks: tasks on all checkpoints.
        workers: number of workers on all nodes.
        parts_a_worker: units are at most the ideal makespan divided by this; None splits no task.

    Returns:
        The units, in the order of the tasks.
    """
    longest_s = math.inf
    if parts_a_worker is not None and workers > 1:
        ideal_s = math.fsum(task.cost_s for task in tasks) / workers
        longest_s = max(ideal_s / parts_a_worker, LEAST_PART_S)
    units = []
    for task in tasks:
        parts = task.parts or max(1, min(task.pieces, math.ceil(task.cost_s / longest_s)))
        units += [
            WorkUnit(task.checkpoint, task.task, part, parts, task.cost_s / parts, task.priority, task.tail_s)
            for part in range(parts)
        ]
    return units


def choose(
    waiting: Collection[WorkUnit],
    worker: WorkerView,
    others: Iterable[WorkerView],
    cached: Collection[str],
    costs: LoadCosts,
) -> WorkUnit | None:
    """Selects the unit that a free worker takes.

    Among waiting units of the highest priority, in this order: the longest unit if it is critical, that is, longer than
    the waiting work divided by the number of workers; the longest unit of the worker's own checkpoint; the longest unit
    of the checkpoint with too few workers for its work, checkpoints in the node's memory first.

    Args:
        waiting: units that no worker has taken.
        worker: the free worker.
        others: all other live workers.
        cached: checkpoints in the memory of the worker's node.
        costs: costs of loading another checkpoint.

    Returns:
        The unit; None if no unit waits, or other workers would finish the work before this one could start.
    """
    workers = [worker, *others]
    for priority in sorted({unit.priority for unit in waiting}, reverse=True):
        units = [unit for unit in waiting if unit.priority == priority]
        for unit in _candidates(units, worker, workers, cached, costs):
            if _helps(unit, units, worker, workers, cached, costs):
                return unit
    return None


def _candidates(
    units: Sequence[WorkUnit],
    worker: WorkerView,
    workers: Sequence[WorkerView],
    cached: Collection[str],
    costs: LoadCosts,
) -> Iterator[WorkUnit]:
    """Candidate units of one priority for a worker, the best first."""

    def longest_of(some: Iterable[WorkUnit]) -> WorkUnit:
        # Includes the time of the metrics; ties are broken in favor of the worker's checkpoint.
        return min(some, key=lambda unit: (-unit.cost_s - unit.tail_s, unit.checkpoint != worker.loaded, *_name(unit)))

    share_s = math.fsum(unit.cost_s for unit in units) / len(workers)
    longest = longest_of(units)
    if longest.cost_s + longest.tail_s + switch_s(longest.checkpoint, worker, cached, costs) >= share_s:
        yield longest
    own = [unit for unit in units if unit.checkpoint == worker.loaded]
    if own:
        yield longest_of(own)
    for checkpoint in _by_need(units, worker, workers, cached):
        yield longest_of(unit for unit in units if unit.checkpoint == checkpoint)


def switch_s(checkpoint: str, worker: WorkerView, cached: Collection[str], costs: LoadCosts) -> float:
    """Time until a worker can compute on a checkpoint, in seconds."""
    if checkpoint == worker.loaded:
        return 0.0
    return costs.load_s + (0.0 if checkpoint in cached else costs.stage_s)


def _name(unit: WorkUnit) -> tuple[str, str, int]:
    return unit.checkpoint, unit.task, unit.part


def _helps(
    unit: WorkUnit,
    units: Sequence[WorkUnit],
    worker: WorkerView,
    workers: Sequence[WorkerView],
    cached: Collection[str],
    costs: LoadCosts,
) -> bool:
    """Whether this worker can start a unit before the workers that hold its checkpoint would finish their queue."""
    before_s = switch_s(unit.checkpoint, worker, cached, costs)
    holders = sum(one.loaded == unit.checkpoint for one in workers)
    if before_s == 0.0 or holders == 0:
        return True
    queue_s = math.fsum(other.cost_s for other in units if other.checkpoint == unit.checkpoint)
    return before_s < queue_s / holders


def _by_need(
    units: Sequence[WorkUnit], worker: WorkerView, workers: Sequence[WorkerView], cached: Collection[str]
) -> list[str]:
    """Checkpoints in the order in which they need another worker."""
    work_s: dict[str, float] = defaultdict(float)
    for unit in units:
        work_s[unit.checkpoint] += unit.cost_s
    total_s = math.fsum(work_s.values()) or 1.0
    holders = Counter(one.loaded for one in workers if one.name != worker.name)
    lacking = {name: len(workers) * work_s[name] / total_s - holders[name] for name in work_s}

    def order(name: str) -> tuple[bool, float, str]:
        # Reading on another node only pays if none of the node's cached checkpoints needs workers.
        return not (name in cached and lacking[name] > 0), -lacking[name], name

    return sorted(work_s, key=order)


@dataclass(frozen=True)
class MeasuredTime:
    """Times of a task, or a part of one, measured by an earlier evaluation.

    Attributes:
        task: name of the task.
        kind: lm-eval's output type, such as multiple_choice.
        documents: number of documents; for a part, its share of them.
        seconds: time of one worker.
        metric_s: time of the metrics in seconds; 0 if not known.
        parameters: number of parameters of the model.
        device: cpu or cuda.
        fewshot: number of few-shot examples.
    """

    task: str
    kind: str
    documents: float
    seconds: float
    metric_s: float
    parameters: int
    device: str
    fewshot: int


_ASSUMED_S = {"multiple_choice": 4e-12, "loglikelihood": 1e-12, "loglikelihood_rolling": 4e-12, "generate_until": 1e-10}
"""Assumed seconds per document and parameter without measurements; only their ratios affect the order."""


def predict_s(
    task: str, kind: str, documents: int, fewshot: int, parameters: int, history: Sequence[MeasuredTime]
) -> float:
    """Predicts the time of a task in seconds: measured for the same task, else for its kind, else assumed.

    Args:
        task: name of the task.
        kind: lm-eval's output type.
        documents: number of documents.
        fewshot: number of few-shot examples.
        parameters: number of parameters of the model.
        history: measurements on the same type of device, the latest last.
    """
    same = [line for line in history if line.task == task and line.fewshot == fewshot]
    alike = [line for line in history if line.kind == kind]
    for lines in (same, alike):
        total = math.fsum(line.documents for line in lines)
        if total > 0:
            # The time per document is proportional to the number of parameters.
            spent = math.fsum(line.seconds * parameters / max(line.parameters, 1) for line in lines)
            return documents * spent / total
    return documents * parameters * _ASSUMED_S.get(kind, _ASSUMED_S["multiple_choice"])


def predict_metric_s(task: str, history: Sequence[MeasuredTime]) -> float:
    """Last measured time of a task's metrics in seconds; 0 if it was never measured."""
    return next((line.metric_s for line in reversed(history) if line.task == task and line.metric_s > 0), 0.0)
