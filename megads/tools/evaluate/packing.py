"""Which part of an evaluation a worker computes next: pure functions, the same in a simulation and in a real one.

An evaluation of many checkpoints is a set of units: a checkpoint, a task, and a part of the task's batches. Workers,
one a GPU, take units whenever they are free. The rules are those of Acme's evaluation coordinator (Hu et al., arXiv
2403.07648, section 6.2): the longest first (Graham's LPT, 1969), by times measured before; long tasks split; few loads
of a model. A worker therefore stays with its checkpoint unless a unit of another one has become critical.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

PARTS_A_WORKER = 8
"""A task is split where it would take a worker longer than this share of the whole evaluation (1/8)."""
LEAST_PART_S = 5.0
"""Parts are not made shorter: each costs the making of the task's requests."""


@dataclass(frozen=True)
class TaskCost:
    """A task on a checkpoint before it is split.

    Attributes:
        checkpoint: its id.
        task: its name.
        cost_s: predicted seconds of one worker.
        pieces: most parts that it can be split into, such as its documents.
        priority: tasks of a higher one come first.
        parts: into which an earlier start split it; None for any number.
        tail_s: predicted seconds of the metrics, which can only be computed after all parts.
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
    """What a worker takes at once.

    Attributes:
        checkpoint: its id.
        task: name.
        part: of the task's batches, from 0.
        parts: of the task.
        cost_s: predicted seconds.
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
        """For people."""
        share = f" ({self.part + 1} of {self.parts})" if self.parts > 1 else ""
        return f"{self.task} on {self.checkpoint}{share}"


@dataclass(frozen=True)
class LoadCosts:
    """What stands before a worker's first unit of a checkpoint, in seconds.

    Attributes:
        start_s: of a process: imports, tasks, tokenizer.
        stage_s: to read and verify a checkpoint into the node's memory.
        load_s: from the node's memory to the worker's device.
    """

    start_s: float = 0.0
    stage_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class WorkerView:
    """What is known of a worker.

    Attributes:
        name: of the worker.
        loaded: the checkpoint that it holds; None before the first.
    """

    name: str
    loaded: str | None = None


def split(tasks: Sequence[TaskCost], workers: int, *, parts_a_worker: int | None = PARTS_A_WORKER) -> list[WorkUnit]:
    """Makes units of tasks: those that would keep one worker busy for too much of the evaluation become several.

    Args:
        tasks: on all checkpoints.
        workers: on all nodes.
        parts_a_worker: no unit is longer than the ideal makespan over this; None splits nothing.

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
    staged: Collection[str],
    costs: LoadCosts,
) -> WorkUnit | None:
    """The unit that a free worker takes.

    Of the highest priority that waits: the longest unit where it is critical, as it takes longer than the share of each
    worker in all that waits; else the longest of the worker's own checkpoint; else the longest of the checkpoint that
    has too few workers for its work, those in the node's memory first.

    Args:
        waiting: units that nobody has taken.
        worker: the free one.
        others: that live.
        staged: checkpoints in the memory of the worker's node.
        costs: of another checkpoint.

    Returns:
        None where nothing waits, or others come to the end of it sooner than this worker could begin.
    """
    workers = [worker, *others]
    for priority in sorted({unit.priority for unit in waiting}, reverse=True):
        units = [unit for unit in waiting if unit.priority == priority]
        for unit in _candidates(units, worker, workers, staged, costs):
            if _helps(unit, units, worker, workers, staged, costs):
                return unit
    return None


def _candidates(
    units: Sequence[WorkUnit],
    worker: WorkerView,
    workers: Sequence[WorkerView],
    staged: Collection[str],
    costs: LoadCosts,
) -> Iterator[WorkUnit]:
    """Units of one priority that a worker might take, the best first."""

    def longest_of(some: Iterable[WorkUnit]) -> WorkUnit:
        # What comes after a unit counts as well; of equally long ones that of the worker's checkpoint comes first.
        return min(some, key=lambda unit: (-unit.cost_s - unit.tail_s, unit.checkpoint != worker.loaded, *_name(unit)))

    share_s = math.fsum(unit.cost_s for unit in units) / len(workers)
    longest = longest_of(units)
    if longest.cost_s + longest.tail_s + switch_s(longest.checkpoint, worker, staged, costs) >= share_s:
        yield longest
    own = [unit for unit in units if unit.checkpoint == worker.loaded]
    if own:
        yield longest_of(own)
    for checkpoint in _by_need(units, worker, workers, staged):
        yield longest_of(unit for unit in units if unit.checkpoint == checkpoint)


def switch_s(checkpoint: str, worker: WorkerView, staged: Collection[str], costs: LoadCosts) -> float:
    """Seconds before a worker can compute on a checkpoint."""
    if checkpoint == worker.loaded:
        return 0.0
    return costs.load_s + (0.0 if checkpoint in staged else costs.stage_s)


def _name(unit: WorkUnit) -> tuple[str, str, int]:
    return unit.checkpoint, unit.task, unit.part


def _helps(
    unit: WorkUnit,
    units: Sequence[WorkUnit],
    worker: WorkerView,
    workers: Sequence[WorkerView],
    staged: Collection[str],
    costs: LoadCosts,
) -> bool:
    """Whether a unit ends sooner here than behind all that waits of its checkpoint, at the workers that hold it."""
    before_s = switch_s(unit.checkpoint, worker, staged, costs)
    holders = sum(one.loaded == unit.checkpoint for one in workers)
    if before_s == 0.0 or holders == 0:
        return True
    queue_s = math.fsum(other.cost_s for other in units if other.checkpoint == unit.checkpoint)
    return before_s < queue_s / holders


def _by_need(
    units: Sequence[WorkUnit], worker: WorkerView, workers: Sequence[WorkerView], staged: Collection[str]
) -> list[str]:
    """Checkpoints in the order in which they want another worker."""
    work_s: dict[str, float] = defaultdict(float)
    for unit in units:
        work_s[unit.checkpoint] += unit.cost_s
    total_s = math.fsum(work_s.values()) or 1.0
    holders = Counter(one.loaded for one in workers if one.name != worker.name)
    lacking = {name: len(workers) * work_s[name] / total_s - holders[name] for name in work_s}

    def order(name: str) -> tuple[bool, float, str]:
        # To read a checkpoint into one more node's memory pays only where the node has none that wants workers.
        return not (name in staged and lacking[name] > 0), -lacking[name], name

    return sorted(work_s, key=order)


@dataclass(frozen=True)
class MeasuredTime:
    """What an earlier evaluation measured of a task, or of a part of one.

    Attributes:
        task: its name.
        kind: lm-eval's output type, such as multiple_choice.
        documents: it was asked about so many; of a part, its share of them.
        seconds: of a worker.
        metric_s: of the metrics, 0 where that is not known.
        parameters: of the model.
        device: cpu or cuda.
        fewshot: examples before each document.
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
"""Seconds a document and parameter where nothing was ever measured; only their ratios matter for the order."""


def predict_s(
    task: str, kind: str, documents: int, fewshot: int, parameters: int, history: Sequence[MeasuredTime]
) -> float:
    """Seconds of a task, by what was measured before: of the same task, else of tasks of its kind, else assumed.

    Args:
        task: its name.
        kind: lm-eval's output type.
        documents: of the task.
        fewshot: examples before each.
        parameters: of the model.
        history: on the same kind of device, the latest last.
    """
    same = [line for line in history if line.task == task and line.fewshot == fewshot]
    alike = [line for line in history if line.kind == kind]
    for lines in (same, alike):
        total = math.fsum(line.documents for line in lines)
        if total > 0:
            # The time of a document grows with the model.
            spent = math.fsum(line.seconds * parameters / max(line.parameters, 1) for line in lines)
            return documents * spent / total
    return documents * parameters * _ASSUMED_S.get(kind, _ASSUMED_S["multiple_choice"])


def predict_metric_s(task: str, history: Sequence[MeasuredTime]) -> float:
    """Seconds of the metrics of a task, as last measured; 0 where they never were."""
    return next((line.metric_s for line in reversed(history) if line.task == task and line.metric_s > 0), 0.0)
