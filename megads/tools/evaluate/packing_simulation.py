"""An evaluation on a clock: what `packing` makes of known times, and what one job a task would take.

Workers are processes on nodes. Those of a node share its link to the storage evenly; metrics are computed by the worker
itself, or by processes of their own on the nodes' CPUs. A dry run predicts by it, and a benchmark measures the rules.
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
    """A task on a checkpoint, with its true times.

    Attributes:
        checkpoint: its id.
        task: its name.
        inference_s: seconds of a worker.
        metric_s: seconds of a CPU process.
        predicted_s: what the coordinator takes `inference_s` for.
        pieces: most parts that it can be split into.
        priority: see TaskCost.
        predicted_metric_s: what it takes `metric_s` for.
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
    """Where it runs.

    Attributes:
        nodes: how many.
        workers: of each node.
        metric_workers: processes of each node that compute metrics.
        start_s: of a process.
        read_s: to read a checkpoint from storage, by one process of a node alone.
        load_s: from a node's memory to a device.
        unit_s: of each unit beside its inference, such as the making of requests.
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
        """Of all nodes."""
        return self.nodes * self.workers


@dataclass(frozen=True)
class PackingRules:
    """Which of the rules are in force; with none it is one job a task, in the order given.

    Attributes:
        staged: one process of a node reads a checkpoint into memory, and workers outlive a unit.
        decoupled: metrics are computed by CPU processes.
        ordered: by `packing.choose`, else in the order given.
        split: long tasks are split; needs `ordered`.
    """

    staged: bool = True
    decoupled: bool = True
    ordered: bool = True
    split: bool = True


@dataclass
class Makespan:
    """How long a simulated evaluation takes, and why.

    Attributes:
        seconds: until the last metric is there.
        inference_s: of all workers together.
        loading_s: of all workers together, starts of processes included.
        stagings: checkpoints read from storage.
        priority_s: by priority, until the last metric of it is there.
    """

    seconds: float = 0.0
    inference_s: float = 0.0
    loading_s: float = 0.0
    stagings: int = 0
    priority_s: dict[int, float] = field(default_factory=dict)


def lower_bound_s(tasks: Sequence[SimulatedTask], cluster: SimulatedCluster) -> float:
    """What no schedule undercuts: every worker starts and loads once, all of them end at the same time, and metrics
    begin as soon as all workers together could have computed their task."""
    workers = cluster.num_workers
    inference_s = math.fsum(task.inference_s for task in tasks) / workers
    last_s = max(inference_s, *(task.inference_s / workers + task.metric_s for task in tasks))
    return cluster.start_s + cluster.read_s + cluster.load_s + cluster.unit_s + last_s


Step = tuple[str, float, int]
"""What a process waits for: ("wait", seconds, 0), ("read", seconds alone, node), ("event", 0, 0)."""
Process = Generator[Step, None, None]


class _Events:
    """Runs processes until all of them have ended; those that wait for an event go on when any other one acts."""

    def __init__(self, nodes: int) -> None:
        self.now = 0.0
        self._numbers = count()
        self._heap: list[tuple[float, int, Process]] = []
        self._reads: list[dict[int, tuple[float, Process]]] = [{} for _ in range(nodes)]
        self._sleeping: deque[Process] = deque()

    def add(self, process: Process) -> None:
        """Starts a process now."""
        self._schedule(0.0, process)

    def wake(self) -> None:
        """Lets those that wait for an event look again."""
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
        self._staged: list[dict[str, bool]] = [{} for _ in range(cluster.nodes)]
        self._costs = LoadCosts(cluster.start_s, cluster.read_s, cluster.load_s)

    def worker(self, node: int, name: str) -> Process:
        """A GPU of a node."""
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
            # A job is a process of its own.
            started = self.rules.staged
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
        """A process on a node's CPUs."""
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
        unit = choose(self._waiting, WorkerView(name, self._loaded[name]), others, self._staged[node], self._costs)
        if unit is not None:
            self._waiting.remove(unit)
            self._loaded[name] = unit.checkpoint if self.rules.staged else None
        return unit

    def _load(self, node: int, name: str, checkpoint: str) -> Process:
        """What a worker needs before its unit; `_loaded` says already what it will hold."""
        if self.rules.staged and self._held.get(name) == checkpoint:
            return
        before = self.clock.now
        staged = self._staged[node]
        if not self.rules.staged or checkpoint not in staged:
            staged[checkpoint] = False
            self.found.stagings += 1
            yield ("read", self.cluster.read_s, node)
            staged[checkpoint] = True
            self.clock.wake()
        while self.rules.staged and not staged[checkpoint]:
            yield ("event", 0.0, 0)
        yield ("wait", self.cluster.load_s, 0)
        self.found.loading_s += self.clock.now - before
        self._held[name] = checkpoint


def simulate(tasks: Sequence[SimulatedTask], cluster: SimulatedCluster, rules: PackingRules | None = None) -> Makespan:
    """Runs an evaluation on a clock.

    Args:
        tasks: on all checkpoints, in the order in which jobs would be submitted.
        cluster: where.
        rules: those in force; None for all of them.
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


ONE_JOB_A_TASK = PackingRules(staged=False, decoupled=False, ordered=False, split=False)
"""Every task loads the model for itself and computes its metrics on the worker."""
