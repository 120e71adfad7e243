"""Scheduling of evaluation units: pure functions, used by real evaluations and by the simulation of the dry run.

An evaluation of many checkpoints is a set of units, each a checkpoint, a task, and a part of the task's batches.
Workers, one per GPU, take units when they are free. The rules are those of Acme's evaluation coordinator (Hu et al.,
arXiv 2403.07648, section 6.2): longest first (Graham's LPT, 1969), by previously measured times; long tasks are split;
few model loads. A worker therefore keeps its checkpoint unless a unit of another one has become critical.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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

    @property
    def key(self) -> tuple[str, str]:
        """Checkpoint and task."""
        return self.checkpoint, self.task


@dataclass(frozen=True)
class WorkUnit:
    """Unit of work that a worker takes: one part of a task on a checkpoint, or the metrics of a task.

    Attributes:
        checkpoint: id of the checkpoint.
        task: name of the task.
        part: index of the part, from 0; None for the metrics, which need all parts.
        parts: number of parts of the task.
        cost_s: predicted time of the part, in seconds.
        priority: see TaskCost.
        tail_s: see TaskCost.
    """

    checkpoint: str
    task: str
    part: int | None
    parts: int
    cost_s: float
    priority: int = 0
    tail_s: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Checkpoint and task."""
        return self.checkpoint, self.task

    @property
    def id(self) -> str:
        """Unique id, for file names."""
        task = hashlib.sha256(f"{self.checkpoint}\n{self.task}".encode()).hexdigest()[:12]
        return task if self.part is None else f"{task}-{self.part}of{self.parts}"

    @property
    def name(self) -> str:
        """Readable name."""
        if self.part is None:
            return f"metrics of {self.task} on {self.checkpoint}"
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


def split(tasks: Sequence[TaskCost], workers: int) -> list[WorkUnit]:
    """Splits tasks into units; long tasks become several units.

    Args:
        tasks: tasks on all checkpoints.
        workers: number of workers on all nodes.

    Returns:
        The units, in the order of the tasks.
    """
    longest_s = math.inf
    if workers > 1:
        ideal_s = math.fsum(task.cost_s for task in tasks) / workers
        longest_s = max(ideal_s / PARTS_A_WORKER, LEAST_PART_S)
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

    def switch_s(checkpoint: str) -> float:
        """Time until the worker can compute on a checkpoint."""
        if checkpoint == worker.loaded:
            return 0.0
        return costs.load_s + (0.0 if checkpoint in cached else costs.stage_s)

    for priority in sorted({unit.priority for unit in waiting}, reverse=True):
        units = [unit for unit in waiting if unit.priority == priority]
        work_s: dict[str, float] = defaultdict(float)
        for unit in units:
            work_s[unit.checkpoint] += unit.cost_s
        for unit in _candidates(units, work_s, worker, workers, cached, switch_s):
            before_s = switch_s(unit.checkpoint)
            holders = sum(one.loaded == unit.checkpoint for one in workers)
            # Only if this worker can start before those that hold the checkpoint would finish its units.
            if before_s == 0.0 or holders == 0 or before_s < work_s[unit.checkpoint] / holders:
                return unit
    return None


def _candidates(
    units: Sequence[WorkUnit],
    work_s: Mapping[str, float],
    worker: WorkerView,
    workers: Sequence[WorkerView],
    cached: Collection[str],
    switch_s: Callable[[str], float],
) -> Iterator[WorkUnit]:
    """Candidate units of one priority for a worker, the best first; `work_s` is their work by checkpoint."""

    def longest_of(some: Iterable[WorkUnit]) -> WorkUnit:
        # Includes the time of the metrics; ties are broken in favor of the worker's checkpoint.
        return min(
            some,
            key=lambda unit: (
                *(-unit.cost_s - unit.tail_s, unit.checkpoint != worker.loaded),
                *(unit.checkpoint, unit.task, unit.part or 0),
            ),
        )

    total_s = math.fsum(work_s.values())
    longest = longest_of(units)
    if longest.cost_s + longest.tail_s + switch_s(longest.checkpoint) >= total_s / len(workers):
        yield longest
    own = [unit for unit in units if unit.checkpoint == worker.loaded]
    if own:
        yield longest_of(own)
    holders = Counter(one.loaded for one in workers if one.name != worker.name)
    lacking = {name: len(workers) * work / (total_s or 1.0) - holders[name] for name, work in work_s.items()}

    def need(name: str) -> tuple[bool, float, str]:
        # Reading on another node only pays if none of the node's cached checkpoints needs workers.
        return not (name in cached and lacking[name] > 0), -lacking[name], name

    for checkpoint in sorted(work_s, key=need):
        yield longest_of(unit for unit in units if unit.checkpoint == checkpoint)


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


@dataclass(frozen=True)
class Cluster:
    """Cluster of a simulated evaluation. The workers of a node read from the storage one after the other.

    Attributes:
        nodes: number of nodes.
        workers: number of model workers per node.
        metric_workers: number of processes per node that compute metrics.
        costs: costs of starting a process and of loading a checkpoint.
        unit_s: overhead of each unit in addition to its inference, such as building requests, in seconds.
    """

    nodes: int
    workers: int
    metric_workers: int
    costs: LoadCosts
    unit_s: float = 0.0


@dataclass
class Makespan:
    """Makespan of a simulated evaluation.

    Attributes:
        inference_s: inference time summed over all workers, in seconds.
        reads: number of times a checkpoint was read from storage.
        priority_s: time until the last metric of each priority is available, in seconds.
    """

    inference_s: float = 0.0
    reads: int = 0
    priority_s: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time until the last metric is available."""
        return max(self.priority_s.values())


Actual = Mapping[tuple[str, str], tuple[float, float]]
"""True inference and metric times in seconds, by checkpoint and task, where they differ from the predicted ones."""


def simulate(tasks: Sequence[TaskCost], cluster: Cluster, actual: Actual | None = None) -> Makespan:
    """Simulates an evaluation by `choose`, with the metrics in processes of their own.

    Args:
        tasks: tasks on all checkpoints.
        cluster: cluster of the evaluation.
        actual: true times; None for the predicted ones.
    """
    actual, costs, found = _actual(tasks, actual), cluster.costs, Makespan()
    units = split(tasks, cluster.nodes * cluster.workers)
    left, ended_s = Counter(unit.key for unit in units), defaultdict[tuple[str, str], float](float)
    free = [(costs.start_s, f"{node:04d}.{place:02d}", node) for place in range(cluster.workers)
            for node in range(cluster.nodes)]  # fmt: skip
    heapq.heapify(free)
    loaded: dict[str, str | None] = {name: None for _, name, _ in free}
    link_free_s = [0.0] * cluster.nodes
    cached_s: list[dict[str, float]] = [{} for _ in range(cluster.nodes)]
    idle: list[tuple[str, int]] = []
    measurable: list[tuple[float, TaskCost]] = []
    by_key = {task.key: task for task in tasks}
    while units:
        now, name, node = heapq.heappop(free)
        others = [WorkerView(other, checkpoint) for other, checkpoint in loaded.items() if other != name]
        unit = choose(units, WorkerView(name, loaded[name]), others, cached_s[node], costs)
        if unit is None:
            idle.append((name, node))
            continue
        units.remove(unit)
        ready_s = now
        if loaded[name] != unit.checkpoint:
            if unit.checkpoint not in cached_s[node]:
                found.reads += 1
                link_free_s[node] = cached_s[node][unit.checkpoint] = max(now, link_free_s[node]) + costs.stage_s
            ready_s = max(now, cached_s[node][unit.checkpoint]) + costs.load_s
        loaded[name] = unit.checkpoint
        inference_s = actual[unit.key][0] / unit.parts
        found.inference_s += inference_s
        end_s = ready_s + inference_s + cluster.unit_s
        ended_s[unit.key] = max(ended_s[unit.key], end_s)
        left[unit.key] -= 1
        if not left[unit.key]:
            measurable.append((ended_s[unit.key], by_key[unit.key]))
        # An idle worker chooses again after another has taken a unit.
        for other, place in [(name, node), *idle]:
            heapq.heappush(free, (end_s if other == name else now, other, place))
        idle.clear()
    metric_workers = [0.0] * (cluster.nodes * cluster.metric_workers)
    while measurable:
        now = max(heapq.heappop(metric_workers), min(ready_s for ready_s, _ in measurable))
        ready = [one for one in measurable if one[0] <= now]
        best = max(ready, key=lambda one: (one[1].priority, actual[one[1].key][1]))
        measurable.remove(best)
        task = best[1]
        end_s = now + actual[task.key][1]
        heapq.heappush(metric_workers, end_s)
        found.priority_s[task.priority] = max(end_s, found.priority_s.get(task.priority, 0.0))
    return found


def simulate_jobs(tasks: Sequence[TaskCost], cluster: Cluster, actual: Actual | None = None) -> Makespan:
    """Simulates one job per task, in the given order: each loads its checkpoint and computes its metrics itself."""
    actual, found = _actual(tasks, actual), Makespan(reads=len(tasks))
    free = [(0.0, node) for node in range(cluster.nodes) for _ in range(cluster.workers)]
    link_free_s = [0.0] * cluster.nodes
    for task in tasks:
        now, node = heapq.heappop(free)
        inference_s, metric_s = actual[task.key]
        link_free_s[node] = max(now + cluster.costs.start_s, link_free_s[node]) + cluster.costs.stage_s
        end_s = link_free_s[node] + cluster.costs.load_s + inference_s + cluster.unit_s + metric_s
        found.inference_s += inference_s
        found.priority_s[task.priority] = max(end_s, found.priority_s.get(task.priority, 0.0))
        heapq.heappush(free, (end_s, node))
    return found


def lower_bound_s(tasks: Sequence[TaskCost], cluster: Cluster, actual: Actual | None = None) -> float:
    """Lower bound of the makespan of any schedule: every worker starts and loads once, all end at the same time, and
    the metrics of a task start as soon as all workers together could have computed it."""
    workers, times = cluster.nodes * cluster.workers, _actual(tasks, actual).values()
    last_s = max(math.fsum(inference_s for inference_s, _ in times) / workers, *(i / workers + m for i, m in times))
    return cluster.costs.start_s + cluster.costs.stage_s + cluster.costs.load_s + cluster.unit_s + last_s


def _actual(tasks: Sequence[TaskCost], actual: Actual | None) -> Actual:
    return actual or {task.key: (task.cost_s, task.tail_s) for task in tasks}
