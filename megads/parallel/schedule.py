"""Pipeline schedules as pure Python: the actions of each pipeline rank in a step, in program order.

`engine/native_engine.py` executes the lists, `schedule_simulation` proves them and `tools/plan/` predicts their memory
and time; this module uses neither torch nor process groups.

In a V shape each rank holds two stages: rank r holds stages r (on the way down) and 2p - 1 - r (on the way up). Thus
the last rank needs no p2p communication between its two stages, and the first rank computes the loss.

Symbols: p pipeline ranks, v virtual stages per rank, m micro-batches. Idle time is in units of one pass of a virtual
stage, where a forward pass and each part of a backward pass take 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import product
from statistics import fmean

from megads.errors import ConfigError
from megads.parallel.message_order import add_communication
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule_simulation import ScheduleCosts, simulate_schedule

_DOWN, _UP = 0, 1

_FORWARD, _INPUT, _WEIGHT = ActionKind.forward, ActionKind.backward_input, ActionKind.backward_weight
_PREFERENCES = (
    ((_FORWARD, _UP), (_FORWARD, _DOWN), (_INPUT, _DOWN), (_INPUT, _UP)),
    ((_FORWARD, _UP), (_INPUT, _UP), (_FORWARD, _DOWN), (_INPUT, _DOWN)),
    ((_FORWARD, _UP), (_INPUT, _DOWN), (_FORWARD, _DOWN), (_INPUT, _UP)),
)
"""Priorities among the passes that a rank can run next; weight-gradient parts come last. None is best for all p, m."""
_INPUT_TIMES = (1.5, 1.0)
"""Durations of an input-gradient part, relative to a forward pass, with which orders are searched. Orders found with 1
are shorter if the part takes 1, but wait up to three times as long if it does not: attention and recomputation make it
up to twice a forward pass."""
_CASES = ((1.0, 1.0, 0.0), (1.2, 0.9, 0.05), (2.0, 1.0, 0.0))
"""Durations of input-gradient part, weight-gradient part and message, relative to a forward pass, over which orders are
compared: uniform, as measured without recomputation, with recomputation."""
_MOST_COMPARED = 256
"""Ranks times micro-batches up to which orders are compared; beyond, the first is used, as a search takes seconds."""
ScheduleName = StrEnum(
    "ScheduleName",
    {"1f1b": "1f1b", "interleaved": "interleaved", "zb_h1": "zb_h1", "dualpipe_v": "dualpipe_v", "zb_v": "zb_v"},
)
"""Names of the schedules. Uses the functional API since 1f1b is not an identifier."""
_SINGLE_STAGE = (ScheduleName["1f1b"], ScheduleName.zb_h1)
V_SHAPED = (ScheduleName.dualpipe_v, ScheduleName.zb_v)  # two stages per rank
SPLIT_SCHEDULES = (ScheduleName.zb_h1, *V_SHAPED)  # input gradients and weight gradients in separate passes


def one_forward_one_backward(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B (PipeDream-2BW's flush variant, Narayanan et al. 2021) with p - r - 1 warmup forward passes on rank r.

    At most p - r micro-batches are in flight on rank r; every rank is idle for 3 (p - 1).
    """
    rows = []
    for rank in range(pipeline_ranks):
        ahead = min(pipeline_ranks - rank - 1, micro_batches)
        row = [Action(ActionKind.forward, micro_batch, rank) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            if ahead + micro_batch < micro_batches:
                row.append(Action(ActionKind.forward, ahead + micro_batch, rank))
            row.append(Action(ActionKind.backward, micro_batch, rank))
        rows.append(row)
    return rows


def zero_bubble(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B with a split backward pass.

    Rank r delays the weight-gradient part by r micro-batches, and the delayed parts fill the bubble at the end. At most
    p micro-batches are in flight on every rank, as on 1F1B's first; every rank is idle for p - 1, a third of 1F1B's
    time, if m >= p.
    """
    rows = []
    for rank in range(pipeline_ranks):
        ahead, behind = min(pipeline_ranks - rank - 1, micro_batches), min(rank, micro_batches)
        row = [Action(ActionKind.forward, micro_batch, rank) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            if ahead + micro_batch < micro_batches:
                row.append(Action(ActionKind.forward, ahead + micro_batch, rank))
            row.append(Action(ActionKind.backward_input, micro_batch, rank))
            if micro_batch >= behind:
                row.append(Action(ActionKind.backward_weight, micro_batch - behind, rank))
        late = range(micro_batches - behind, micro_batches)
        rows.append([*row, *(Action(ActionKind.backward_weight, micro_batch, rank) for micro_batch in late)])
    return rows


def interleaved(pipeline_ranks: int, virtual_stages: int, micro_batches: int, contiguous: int) -> list[list[Action]]:
    """Interleaved 1F1B (Narayanan et al. 2021) with any number of micro-batches (Llama 3, section 3.3.2).

    A group of micro-batches goes through a rank's first virtual stage, then through its second, and so on. Groups have
    `contiguous` micro-batches or more: a remainder is spread over the other groups, so that every group has at least p
    micro-batches and every rank is idle for 3 (p - 1) / v for any m >= p.

    Rank r runs 2 (p - r - 1) + (v - 1) * group warmup passes, as in Megatron-LM. p - r - 1 in place of 2 (p - r - 1)
    would suffice if communication took no time; the other p - r - 1 overlap it, since a tensor is sent a whole pass
    before it is used.

    Args:
        pipeline_ranks: p.
        virtual_stages: v.
        micro_batches: m.
        contiguous: minimum number of micro-batches of a group, at least p: p is depth-first, m breadth-first.
    """
    assert contiguous >= pipeline_ranks, (contiguous, pipeline_ranks)
    groups = _groups(micro_batches, contiguous)
    turns = range(virtual_stages)
    forwards = [(micro_batch, turn) for group in groups for turn in turns for micro_batch in group]
    backwards = [(micro_batch, turn) for group in groups for turn in reversed(turns) for micro_batch in group]
    rows = []
    for rank in range(pipeline_ranks):
        ahead = min(2 * (pipeline_ranks - rank - 1) + (virtual_stages - 1) * len(groups[0]), len(forwards))
        forward = [Action(ActionKind.forward, mb, turn * pipeline_ranks + rank) for mb, turn in forwards]
        backward = [Action(ActionKind.backward, mb, turn * pipeline_ranks + rank) for mb, turn in backwards]
        row = forward[:ahead]
        for index, action in enumerate(backward):
            row += [*forward[ahead + index : ahead + index + 1], action]
        rows.append(row)
    return rows


def _groups(micro_batches: int, contiguous: int) -> list[range]:
    """Splits micro-batches into consecutive groups, largest first, of at least `contiguous` if there are so many."""
    number = max(1, micro_batches // contiguous)
    size, larger = divmod(micro_batches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(starts[group], starts[group + 1]) for group in range(number)]


@dataclass
class _Row:
    """Builder of one rank's computations; each kind of pass takes micro-batches in order.

    Attributes:
        stages: the rank's stages, down and up.
        actions: computations so far.
        counts: number of passes so far, by (is forward, stage).
        late: pending weight-gradient parts, in the order of their input-gradient parts.
    """

    stages: tuple[int, int]
    actions: list[Action] = field(default_factory=list)
    counts: dict[tuple[bool, int], int] = field(default_factory=dict)
    late: deque[Action] = field(default_factory=deque)

    def add(self, kind: ActionKind, way: int) -> None:
        """Appends the next forward or backward pass of the stage on the way down or up."""
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
        """Appends the oldest pending weight-gradient part."""
        self.actions.append(self.late.popleft())


def bidirectional_v(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """DualPipeV (DeepSeek-AI 2025; "cut in half" by Qi et al.): micro-batches run down and up at the same time.

    In the steady state, a forward pass in one direction alternates with a backward pass in the other. Neither needs the
    other's result, so the p2p communication of each is overlapped with the compute of the other. At most 2p + 1 passes
    of a virtual stage are in flight on a rank, each half as large as 1F1B's; every rank is idle for p - 1.

    With fewer than 2p micro-batches there is no steady state; the order is then that of `zero_bubble_v`.
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
    """Warmup of DualPipeV.

    Args:
        row: the rank's computations.
        before: number of ranks after this one, p - r - 1.
        through: number of ranks up to and including this one, r + 1.
    """
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
    """Cooldown of DualPipeV: the second half of the last backward passes defers weight gradients, to fill the bubble.

    Args: as in `_fill`.
    """
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


def zero_bubble_v(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"), found by list scheduling.

    In simulated time, every rank runs the pass that can start first, and weight-gradient parts only if nothing else can
    run. Several priorities are tried, and the order with the smallest bubble is used. At most 2p passes of a virtual
    stage are in flight on a rank, which is 1F1B's memory. If m >= p, idle time is p - 1 with two ranks and less than
    2p - 1 with more; in exchange, the orders stay good if the parts of a pass take different times.

    Args:
        pipeline_ranks: p.
        micro_batches: m.
    """
    # With two ranks, an order made for slow messages is as short with free ones; with more ranks it is not.
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
    """Mean bubble over `_CASES`, i.e. different durations of the passes."""
    ranks = tuple(range(len(rows)))
    placement = StagePlacement(ranks + ranks[::-1])
    schedule = Schedule("", placement, micro_batches, add_communication(placement, rows))
    stages = placement.num_stages
    return fmean(
        simulate_schedule(
            schedule, ScheduleCosts([1.0] * stages, [of_input] * stages, [of_weight] * stages, latency)
        ).bubble_share
        for of_input, of_weight, latency in _CASES
    )


class _ListScheduler:
    """List scheduler of a V-shaped order, in simulated time in which a p2p message takes `message`."""

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
        """Fills `rows`, and `free` with each rank's end time."""
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
        """A rank's next pass: (start, index in its preference, kind, stage); None if it can run nothing."""
        best: tuple[float, int, ActionKind, int] | None = None
        for place, (kind, way) in enumerate(self.preference):
            stage = rank if way == _DOWN else 2 * self.ranks - 1 - rank
            ready = self._ready(kind, stage, rank)
            if ready is not None and (best is None or max(ready, self.free[rank]) < best[0]):
                best = max(ready, self.free[rank]), place, kind, stage
        return best

    def _ready(self, kind: ActionKind, stage: int, rank: int) -> float | None:
        """Time at which a pass's inputs are available; None if an input is not scheduled, or no memory is left."""
        micro_batch = len(self._ends[kind, stage])
        if micro_batch == self.micro_batches:
            return None
        if kind is _WEIGHT:
            needed = [(_INPUT, stage)]
        elif kind is _INPUT:
            needed = [(_FORWARD, stage), (_INPUT, stage + 1)]
        else:
            # A forward pass down needs memory for the following one up.
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


_ORDERS: dict[str, Callable[[int, int], list[list[Action]]]] = {
    "1f1b": one_forward_one_backward,
    "zb_h1": zero_bubble,
    "dualpipe_v": bidirectional_v,
    "zb_v": zero_bubble_v,
}
"""Functions that return the computations of each rank from p and m; interleaved needs more arguments."""


def stage_placement(name: str, pipeline_ranks: int, virtual_stages: int | None = None) -> StagePlacement:
    """Placement of a schedule's virtual stages, which does not depend on the number of micro-batches.

    Args:
        name: name of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages per rank; None: 1 for 1f1b and zb_h1, else 2.

    Raises:
        ConfigError: the schedule does not exist or does not support this number of virtual stages.
    """
    if name not in list(ScheduleName):
        raise ConfigError(f"parallel.schedule = {name}: must be one of {', '.join(ScheduleName)}")
    if virtual_stages is not None and virtual_stages < 1:
        raise ConfigError(f"parallel.virtual_stages = {virtual_stages}: must be at least 1")
    ranks = tuple(range(pipeline_ranks))
    if name in _SINGLE_STAGE:
        if virtual_stages not in (None, 1):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, which has one stage per "
                "rank: remove it, or use parallel.schedule=interleaved"
            )
        return StagePlacement(ranks)
    if name in V_SHAPED:
        if virtual_stages not in (None, 2):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, whose V shape has two "
                "stages per rank: remove it, or use parallel.schedule=interleaved"
            )
        return StagePlacement(ranks + ranks[::-1])
    return StagePlacement(ranks * (2 if virtual_stages is None else virtual_stages))


def check_contiguous(name: str, pipeline_ranks: int, contiguous: int | None) -> None:
    """Raises ConfigError on a number of contiguous micro-batches that the schedule does not support."""
    if contiguous is None:
        return
    if name != "interleaved":
        raise ConfigError(
            f"parallel.contiguous_micro_batches = {contiguous} only applies to parallel.schedule=interleaved, but "
            f"parallel.schedule = {name}: remove it"
        )
    if contiguous < pipeline_ranks:
        raise ConfigError(
            f"parallel.contiguous_micro_batches = {contiguous} is below parallel.pp = {pipeline_ranks}: the first rank "
            "would be idle before its second virtual stage; use at least parallel.pp, or remove it"
        )


@lru_cache(maxsize=32)
def build_schedule(
    name: str, pipeline_ranks: int, virtual_stages: int | None, micro_batches: int, *, contiguous: int | None = None
) -> Schedule:
    """Builds the schedule of a step.

    Args:
        name: name of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages per rank; None: 1 for 1f1b and zb_h1, else 2.
        micro_batches: m, at least 1.
        contiguous: consecutive micro-batches that an interleaved schedule runs through one virtual stage; None: p.

    Raises:
        ConfigError: the schedule does not exist or does not support these arguments.
    """
    assert pipeline_ranks >= 1 and micro_batches >= 1, (pipeline_ranks, micro_batches)
    placement = stage_placement(name, pipeline_ranks, virtual_stages)
    check_contiguous(name, pipeline_ranks, contiguous)
    if name == "interleaved":
        stages = placement.num_stages // pipeline_ranks
        computations = interleaved(pipeline_ranks, stages, micro_batches, contiguous or pipeline_ranks)
    else:
        computations = _ORDERS[name](pipeline_ranks, micro_batches)
    return Schedule(name, placement, micro_batches, add_communication(placement, computations))
