"""Discrete-event simulation of an evaluation, scheduled by `packing` or with one job per task.

Workers are processes on nodes. Those of a node share its bandwidth to the storage evenly. Metrics are computed by the
worker itself or by separate processes on the CPUs of the nodes. Used by the dry run and by a benchmark of the rules.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count

from megads.tools.evaluate.packing import PARTS_A_WORKER, LoadCosts, TaskCost, WorkerView, WorkUnit, choose, split


@dataclass(frozen=True)
class SimulatedTask:
    """A task on a checkpoint, with its true and predicted times.

    Attributes:
        checkpoint: id of the checkpoint.
        task: name of the task.
        inference_s: inference time of one worker, in seconds.
        metric_s: time of the metrics on a CPU process, in seconds.
        predicted_s: the coordinator's prediction of `inference_s`.
        pieces: maximum number of parts.
        priority: see TaskCost.
        predicted_metric_s: the coordinator's prediction of `metric_s`.
    """

    checkpoint: str
    task: str
    inference_s: float
    metric_s: float
    predicted_s: float
    pieces: int = 1
    priority: int = 0
    predicted_metric_s: float = 0.0


@dataclass(frozen=True)
class SimulatedCluster:
    """Cluster of a simulated evaluation.

    Attributes:
        nodes: number of nodes.
        workers: number of model workers per node.
        metric_workers: number of processes per node that compute metrics.
        start_s: time to start a process, in seconds.
        read_s: time to read a checkpoint from storage if no other process of the node reads, in seconds.
        load_s: time to load a checkpoint from a node's memory to a device, in seconds.
        unit_s: overhead of each unit in addition to its inference, such as building requests, in seconds.
    """

    nodes: int
    workers: int
    metric_workers: int
    start_s: float
    read_s: float
    load_s: float
    unit_s: float = 0.0

    @property
    def num_workers(self) -> int:
        """Number of model workers on all nodes."""
        return self.nodes * self.workers


@dataclass(frozen=True)
class PackingRules:
    """Scheduling rules that are enabled; without any, every task is one job, in the given order.

    Attributes:
        cached: whether one process per node reads a checkpoint into memory, and workers persist between units.
        decoupled: whether metrics are computed by CPU processes.
        ordered: whether units are ordered by `packing.choose` instead of the given order.
        split: whether long tasks are split; requires `ordered`.
    """

    cached: bool = True
    decoupled: bool = True
    ordered: bool = True
    split: bool = True


@dataclass
class Makespan:
    """Makespan of a simulated evaluation and its components.

    Attributes:
        seconds: time until the last metric is available.
        inference_s: inference time summed over all workers, in seconds.
        loading_s: loading time summed over all workers, including process starts, in seconds.
        reads: number of times a checkpoint was read from storage.
        priority_s: time until the last metric of each priority is available, in seconds.
    """

    seconds: float = 0.0
    inference_s: float = 0.0
    loading_s: float = 0.0
    reads: int = 0
    priority_s: dict[int, float] = field(default_factory=dict)


def lower_bound_s(tasks: Sequence[SimulatedTask], cluster: SimulatedCluster) -> float:
    """Lower bound of the makespan of any schedule: every worker starts and loads once, all end at the same time, and
    the metrics of a task start as soon as all workers together could have computed it."""
    workers = cluster.num_workers
    inference_s = math.fsum(task.inference_s for task in tasks) / workers
    last_s = max(inference_s, *(task.inference_s / workers + task.metric_s for task in tasks))
    return cluster.start_s + cluster.read_s + cluster.load_s + cluster.unit_s + last_s


Step = tuple[str, float, int]
"""Step that a process waits for: ("wait", seconds, 0), ("read", seconds without contention, node), ("event", 0, 0)."""
Process = Generator[Step, None, None]


class _Events:
    """Event loop that runs processes until all have ended; `wake` resumes processes that wait for an event."""

    def __init__(self, nodes: int) -> None:
        self.now = 0.0
        self._numbers = count()
        self._heap: list[tuple[float, int, Process]] = []
        self._reads: list[dict[int, tuple[float, Process]]] = [{} for _ in range(nodes)]
        self._sleeping: deque[Process] = deque()

    def add(self, process: Process) -> None:
        """Adds a process that starts now."""
        self._schedule(0.0, process)

    def wake(self) -> None:
        """Resumes all processes that wait for an event."""
        while self._sleeping:
            self._schedule(0.0, self._sleeping.popleft())

    def run(self) -> None:
        while True:
            read_s, node, number = self._next_read()
            timed_s = self._heap[0][0] - self.now if self._heap else math.inf
            step_s = min(read_s, timed_s)
            if step_s == math.inf:
                return
            self._advance(step_s)
            if timed_s <= read_s:
                self._go_on(heapq.heappop(self._heap)[2])
            else:
                self._go_on(self._reads[node].pop(number)[1])

    def _schedule(self, seconds: float, process: Process) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._numbers), process))

    def _next_read(self) -> tuple[float, int, int]:
        ends = [
            (left * len(reads), node, number)
            for node, reads in enumerate(self._reads)
            for number, (left, _) in reads.items()
        ]
        return min(ends, default=(math.inf, 0, 0))

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for reads in self._reads:
            for number, (left, process) in reads.items():
                reads[number] = left - seconds / len(reads), process

    def _go_on(self, process: Process) -> None:
        step = next(process, None)
        if step is None:
            return
        kind, seconds, node = step
        if kind == "wait":
            self._schedule(seconds, process)
        elif kind == "read":
            self._reads[node][next(self._numbers)] = seconds, process
        else:
            self._sleeping.append(process)


class _Evaluation:
    """State of a simulated evaluation."""

    def __init__(self, tasks: Sequence[SimulatedTask], cluster: SimulatedCluster, rules: PackingRules) -> None:
        self.cluster, self.rules, self.clock = cluster, rules, _Events(cluster.nodes)
        self.found = Makespan()
        self._tasks = {(task.checkpoint, task.task): task for task in tasks}
        costs = [
            TaskCost(
                task.checkpoint, task.task, task.predicted_s, task.pieces, task.priority, tail_s=task.predicted_metric_s
            )
            for task in tasks
        ]
        parts = PARTS_A_WORKER if rules.split and rules.ordered else None
        self._waiting = split(costs, cluster.num_workers, parts_a_worker=parts)
        self._left = dict.fromkeys(self._tasks, 0)
        for unit in self._waiting:
            self._left[unit.key] += 1
        self._open_metrics = len(self._tasks)
        self._metrics: list[SimulatedTask] = []
        self._loaded: dict[str, str | None] = {}
        self._held: dict[str, str] = {}
        self._cached: list[dict[str, bool]] = [{} for _ in range(cluster.nodes)]
        self._costs = LoadCosts(cluster.start_s, cluster.read_s, cluster.load_s)

    def worker(self, node: int, name: str) -> Process:
        """Process of a model worker on a node."""
        self._loaded[name] = None
        started = False
        while self._waiting:
            if not started:
                started = True
                self.found.loading_s += self.cluster.start_s
                yield ("wait", self.cluster.start_s, 0)
                continue
            unit = self._take(node, name)
            if unit is None:
                yield ("event", 0.0, 0)
                continue
            # Without the cache, each unit is a new process.
            started = self.rules.cached
            yield from self._load(node, name, unit.checkpoint)
            task = self._tasks[unit.key]
            inference_s = task.inference_s / unit.parts
            self.found.inference_s += inference_s
            yield ("wait", inference_s + self.cluster.unit_s, 0)
            self._left[unit.key] -= 1
            if not self._left[unit.key]:
                if self.rules.decoupled:
                    self._metrics.append(task)
                else:
                    yield ("wait", task.metric_s, 0)
                    self._end(task)
            self.clock.wake()
        del self._loaded[name]
        self.clock.wake()

    def metric_worker(self) -> Process:
        """Process that computes metrics on the CPUs of a node."""
        while self._open_metrics:
            if not self._metrics:
                yield ("event", 0.0, 0)
                continue
            task = max(self._metrics, key=lambda task: (task.priority, task.metric_s))
            self._metrics.remove(task)
            yield ("wait", task.metric_s, 0)
            self._end(task)
            self.clock.wake()

    def _end(self, task: SimulatedTask) -> None:
        self._open_metrics -= 1
        self.found.seconds = self.found.priority_s[task.priority] = self.clock.now

    def _take(self, node: int, name: str) -> WorkUnit | None:
        if not self.rules.ordered:
            return self._waiting.pop(0)
        others = [WorkerView(other, loaded) for other, loaded in self._loaded.items() if other != name]
        unit = choose(self._waiting, WorkerView(name, self._loaded[name]), others, self._cached[node], self._costs)
        if unit is not None:
            self._waiting.remove(unit)
            self._loaded[name] = unit.checkpoint if self.rules.cached else None
        return unit

    def _load(self, node: int, name: str, checkpoint: str) -> Process:
        """Loads the checkpoint of a unit; `_loaded` already names the checkpoint that the worker will hold."""
        if self.rules.cached and self._held.get(name) == checkpoint:
            return
        before = self.clock.now
        cached = self._cached[node]
        if not self.rules.cached or checkpoint not in cached:
            cached[checkpoint] = False
            self.found.reads += 1
            yield ("read", self.cluster.read_s, node)
            cached[checkpoint] = True
            self.clock.wake()
        while self.rules.cached and not cached[checkpoint]:
            yield ("event", 0.0, 0)
        yield ("wait", self.cluster.load_s, 0)
        self.found.loading_s += self.clock.now - before
        self._held[name] = checkpoint


def simulate(tasks: Sequence[SimulatedTask], cluster: SimulatedCluster, rules: PackingRules | None = None) -> Makespan:
    """Simulates an evaluation.

    Args:
        tasks: tasks on all checkpoints, in the order in which jobs would be submitted.
        cluster: cluster of the evaluation.
        rules: enabled rules; None for all of them.
    """
    evaluation = _Evaluation(tasks, cluster, rules or PackingRules())
    for worker in range(cluster.workers):
        for node in range(cluster.nodes):
            evaluation.clock.add(evaluation.worker(node, f"{node:04d}.{worker:02d}"))
    if evaluation.rules.decoupled:
        for _ in range(cluster.nodes * cluster.metric_workers):
            evaluation.clock.add(evaluation.metric_worker())
    evaluation.clock.run()
    return evaluation.found


ONE_JOB_A_TASK = PackingRules(cached=False, decoupled=False, ordered=False, split=False)
"""Rules of one job per task: every job loads the model and computes its metrics on the worker."""
