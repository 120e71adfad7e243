"""Orders of V-shaped pipelines: each rank holds two stages, one on the way down and one on the way back up.

Rank r holds stages r and 2p - 1 - r, so the last rank turns around without a message, and the first one computes the
loss. Backward passes come in two parts where their weight part fills a wait.

Letters: p pipeline ranks, m micro-batches. Idle time is counted in passes of a virtual stage, with a forward pass and
each part of a backward pass of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule_clock import ScheduleCosts, run_clock
from megads.parallel.schedule_p2p import with_messages

_DOWN, _UP = 0, 1


@dataclass
class _Row:
    """A rank's computations as they are written down; each kind of pass takes micro-batches in order.

    Attributes:
        stages: the rank's stages, down and up.
        actions: so far.
        counts: passes so far, by direction (of the pass) and stage.
        late: weight parts that are still to do, in the order of their input parts.
    """

    stages: tuple[int, int]
    actions: list[Action] = field(default_factory=list)
    counts: dict[tuple[bool, int], int] = field(default_factory=dict)
    late: deque[Action] = field(default_factory=deque)

    def add(self, kind: ActionKind, way: int) -> None:
        """The next forward or backward pass on the stage of a way."""
        stage = self.stages[way]
        key = kind is ActionKind.forward, stage
        micro_batch = self.counts.get(key, 0)
        self.counts[key] = micro_batch + 1
        self.actions.append(Action(kind, micro_batch, stage))
        if kind is ActionKind.backward_input:
            self.late.append(Action(ActionKind.backward_weight, micro_batch, stage))

    def forward(self, way: int) -> None:
        self.add(ActionKind.forward, way)

    def backward(self, way: int, *, split: bool = False) -> None:
        self.add(ActionKind.backward_input if split else ActionKind.backward, way)

    def weight(self) -> None:
        """The oldest weight part that is late."""
        self.actions.append(self.late.popleft())


def bidirectional_v(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """DualPipeV (DeepSeek-AI 2025; "cut in half" by Qi et al.): micro-batches run down and up at the same time.

    In the steady state a forward pass of one way stands beside a backward pass of the other, neither of which needs the
    other's result: their messages hide behind each other's computation. At most 2p + 1 passes of a virtual stage wait
    on a rank, each half as large as 1F1B's; every rank is idle for p - 1.

    With fewer than 2p micro-batches the ways never fill; the order is then that of `zero_bubble_v`.
    """
    if micro_batches < 2 * pipeline_ranks:
        return zero_bubble_v(pipeline_ranks, micro_batches)
    rows = []
    for rank in range(pipeline_ranks):
        row = _Row((rank, 2 * pipeline_ranks - 1 - rank))
        before, through = pipeline_ranks - rank - 1, rank + 1
        _fill(row, before, through)
        for _ in range(micro_batches - 2 * pipeline_ranks + through):
            row.forward(_DOWN)
            row.backward(_UP)
            row.forward(_UP)
            row.backward(_DOWN)
        _drain(row, before, through)
        rows.append(row.actions)
    return rows


def _fill(row: _Row, before: int, through: int) -> None:
    """The begin of DualPipeV: `before` ranks lie between this one and the turn, `through` with it on its other side."""
    for _ in range(2 * before):
        row.forward(_DOWN)
    for _ in range(through):
        row.forward(_DOWN)
        row.forward(_UP)
    for _ in range(before):
        row.backward(_UP, split=True)
        row.weight()
        row.forward(_UP)


def _drain(row: _Row, before: int, through: int) -> None:
    """The end of DualPipeV: halfway through the last backward passes their weight parts are put off, to fill waits."""
    for _ in range(before):
        row.backward(_UP)
        row.forward(_UP)
        row.backward(_DOWN)
    for index in range(2 * through):
        row.backward(_DOWN if index % 2 else _UP, split=index >= through)
    for _ in range(before):
        row.weight()
        row.backward(_DOWN, split=True)
    while row.late:
        row.weight()


_FORWARD, _INPUT, _WEIGHT = ActionKind.forward, ActionKind.backward_input, ActionKind.backward_weight
_PREFERENCES = (
    ((_FORWARD, _UP), (_FORWARD, _DOWN), (_INPUT, _DOWN), (_INPUT, _UP)),
    ((_FORWARD, _UP), (_INPUT, _UP), (_FORWARD, _DOWN), (_INPUT, _DOWN)),
    ((_FORWARD, _UP), (_INPUT, _DOWN), (_FORWARD, _DOWN), (_INPUT, _UP)),
)
"""What a rank does first of what it can do at once; weight parts come last. No order is the best for every p and m."""


_INPUT_TIMES = (1.5, 1.0)
"""Of an input part, in forward passes, with which orders are found. Those of 1 are shorter where that is so, but wait
up to three times as long where it is not: attention and recomputation make it up to twice a forward pass."""
_CASES = ((1.0, 1.0, 0.0), (1.2, 0.9, 0.05), (2.0, 1.0, 0.0))
"""Input part, weight part and message, in forward passes, over which orders are compared: even, as measured without
recomputation, with it."""
_MOST_COMPARED = 256
"""Ranks times micro-batches up to which orders are compared; beyond, the first is taken: more would take seconds."""


def zero_bubble_v(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"), found by list scheduling.

    On a clock every rank runs what can start first, weight parts only where nothing else can; of a few orders of
    preference the one that waits least is taken. At most 2p passes of a virtual stage wait on a rank,
    1F1B's memory. Idle time, if m >= p, is p - 1 with two ranks and less than 2p - 1 with more: that is the price of
    orders that also hold where the parts of a pass take different times.

    Args:
        pipeline_ranks: p.
        micro_batches: m.
    """
    # With two ranks an order that reckons with slow messages is as short without them; with more ranks none is.
    message = 1 / 16 if pipeline_ranks == 2 else 0.0
    tried = list(product(_INPUT_TIMES, _PREFERENCES))
    if pipeline_ranks * micro_batches > _MOST_COMPARED:
        tried = tried[:1]
    orders = []
    for input_time, preference in tried:
        scheduler = _ListScheduler(pipeline_ranks, micro_batches, input_time, message, preference)
        scheduler.run()
        orders.append(scheduler.rows)
    return min(orders, key=lambda rows: _mean_bubble(rows, micro_batches)) if len(orders) > 1 else orders[0]


def _mean_bubble(rows: Sequence[Sequence[Action]], micro_batches: int) -> float:
    """Share of waiting, over passes that take different times."""
    ranks = tuple(range(len(rows)))
    placement = StagePlacement(ranks + ranks[::-1])
    schedule = Schedule("", placement, micro_batches, with_messages(placement, rows))
    stages = placement.num_stages
    return fmean(
        run_clock(
            schedule, ScheduleCosts([1.0] * stages, [of_input] * stages, [of_weight] * stages, latency)
        ).bubble_share
        for of_input, of_weight, latency in _CASES
    )


class _ListScheduler:
    """Writes down a V-shaped order pass by pass, on a clock on which a message takes `message`."""

    def __init__(
        self,
        ranks: int,
        micro_batches: int,
        input_time: float,
        message: float,
        preference: Sequence[tuple[ActionKind, int]],
    ) -> None:
        self.ranks, self.micro_batches, self.message = ranks, micro_batches, message
        self.times = {_FORWARD: 1.0, _INPUT: input_time, _WEIGHT: 1.0}
        self.preference = (*preference, (_WEIGHT, _DOWN), (_WEIGHT, _UP))
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self._live = [0] * ranks
        self._ends: dict[tuple[ActionKind, int], list[float]] = {
            (kind, stage): [] for kind in (_FORWARD, _INPUT, _WEIGHT) for stage in range(2 * ranks)
        }

    def run(self) -> None:
        """Fills `rows`, and `free` with the time at which each rank is done."""
        following = [self._next(rank) for rank in range(self.ranks)]
        for _ in range(6 * self.ranks * self.micro_batches):
            start, _, rank = min((found[0], found[1], rank) for rank, found in enumerate(following) if found)
            found = following[rank]
            assert found is not None
            kind, stage = found[2:]
            ends = self._ends[kind, stage]
            self.rows[rank].append(Action(kind, len(ends), stage))
            self.free[rank] = start + self.times[kind]
            ends.append(self.free[rank])
            self._live[rank] += {_FORWARD: 1, _INPUT: 0, _WEIGHT: -1}[kind]
            for other in {rank, self._rank_of(stage - 1), self._rank_of(stage + 1)}:
                following[other] = self._next(other)

    def _rank_of(self, stage: int) -> int:
        inside = min(max(stage, 0), 2 * self.ranks - 1)
        return min(inside, 2 * self.ranks - 1 - inside)

    def _next(self, rank: int) -> tuple[float, int, ActionKind, int] | None:
        """What a rank runs next: (start, place in its preference, kind, stage); None while it can run nothing."""
        best: tuple[float, int, ActionKind, int] | None = None
        for place, (kind, way) in enumerate(self.preference):
            stage = rank if way == _DOWN else 2 * self.ranks - 1 - rank
            ready = self._ready(kind, stage, rank)
            if ready is not None and (best is None or max(ready, self.free[rank]) < best[0]):
                best = max(ready, self.free[rank]), place, kind, stage
        return best

    def _ready(self, kind: ActionKind, stage: int, rank: int) -> float | None:
        """When what a pass needs is there; None if something it needs has not run, or no memory is left."""
        micro_batch = len(self._ends[kind, stage])
        if micro_batch == self.micro_batches:
            return None
        if kind is _WEIGHT:
            needed = [(_INPUT, stage)]
        elif kind is _INPUT:
            needed = [(_FORWARD, stage), (_INPUT, stage + 1)]
        else:
            # A pass down is followed by one up, for which memory must be left.
            if self._live[rank] + (2 if stage < self.ranks else 1) > 2 * self.ranks:
                return None
            needed = [(_FORWARD, stage - 1)]
        ready = 0.0
        for key in needed:
            ends = self._ends.get(key)  # None before the first and after the last stage
            if ends is None:
                continue
            if len(ends) <= micro_batch:
                return None
            ready = max(ready, ends[micro_batch] + (0 if self._rank_of(key[1]) == rank else self.message))
        return ready
