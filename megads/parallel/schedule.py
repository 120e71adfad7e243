"""Pipeline schedules as pure Python: what each pipeline rank does in a step, in program order.

`engine/` executes the lists, `plan/` simulates them on a clock; nothing here knows torch or a process group.

Letters: p pipeline ranks, v virtual stages a rank, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache

from megads.errors import ConfigError
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule_p2p import with_messages
from megads.parallel.schedule_v import bidirectional_v, zero_bubble_v


def one_forward_one_backward(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B (PipeDream-2BW's flush variant, Narayanan et al. 2021): rank r runs p - r - 1 forward passes ahead.

    At most p - r micro-batches wait on rank r; every rank is idle for 3 (p - 1).
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
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B whose backward passes come in two parts.

    Rank r runs the weight part r micro-batches late, and what is late fills the waits of the end. At most p
    micro-batches wait on every rank, as on 1F1B's first; every rank is idle for p - 1, a third of 1F1B's time, if
    m >= p.
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
    `contiguous` micro-batches or more: what does not fill a group of its own is spread over the others, so that no
    group is smaller than the pipeline is long and every rank is idle for 3 (p - 1) / v whatever m >= p is.

    Rank r runs 2 (p - r - 1) + (v - 1) * group passes ahead, Megatron's number: one p - r - 1 would do were messages
    free; the second hides them, since what is received was sent a whole pass before it is used.

    Args:
        pipeline_ranks: p.
        virtual_stages: v.
        micro_batches: m.
        contiguous: least micro-batches of a group, at least p: p is depth-first, m breadth-first.
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
    """Micro-batches in consecutive groups of at least `contiguous`, if there are so many, the largest first."""
    number = max(1, micro_batches // contiguous)
    size, larger = divmod(micro_batches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(starts[group], starts[group + 1]) for group in range(number)]


__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleName",
    "StagePlacement",
    "build_schedule",
    "check_contiguous",
    "stage_placement",
]

ScheduleName = StrEnum(
    "ScheduleName",
    {"1f1b": "1f1b", "interleaved": "interleaved", "zb_h1": "zb_h1", "dualpipe_v": "dualpipe_v", "zb_v": "zb_v"},
)
"""The schedules; a class statement could not have 1f1b, which is no identifier."""
_SINGLE_STAGE = ("1f1b", "zb_h1")
_V_SHAPED = ("dualpipe_v", "zb_v")
_ORDERS: dict[str, Callable[[int, int], list[list[Action]]]] = {
    "1f1b": one_forward_one_backward,
    "zb_h1": zero_bubble,
    "dualpipe_v": bidirectional_v,
    "zb_v": zero_bubble_v,
}
"""Computations of each rank, from p and m; interleaved takes more."""


def stage_placement(name: str, pipeline_ranks: int, virtual_stages: int | None = None) -> StagePlacement:
    """Where a schedule puts its virtual stages; the number of micro-batches does not matter.

    Args:
        name: of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages of each rank; None for 1 where the schedule has no more, else 2.

    Raises:
        ConfigError: there is no such schedule, or it cannot have so many virtual stages.
    """
    if name not in list(ScheduleName):
        raise ConfigError(f"parallel.schedule = {name}: must be one of {', '.join(ScheduleName)}")
    if virtual_stages is not None and virtual_stages < 1:
        raise ConfigError(f"parallel.virtual_stages = {virtual_stages}: must be at least 1")
    ranks = tuple(range(pipeline_ranks))
    if name in _SINGLE_STAGE:
        if virtual_stages not in (None, 1):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, which has one stage a "
                "rank: leave it out, or use parallel.schedule=interleaved"
            )
        return StagePlacement(ranks)
    if name in _V_SHAPED:
        if virtual_stages not in (None, 2):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, whose V shape has two "
                "stages a rank: leave it out, or use parallel.schedule=interleaved"
            )
        return StagePlacement(ranks + ranks[::-1])
    return StagePlacement(ranks * (2 if virtual_stages is None else virtual_stages))


def check_contiguous(name: str, pipeline_ranks: int, contiguous: int | None) -> None:
    """Raises ConfigError on a number of contiguous micro-batches that a schedule cannot have."""
    if contiguous is None:
        return
    if name != "interleaved":
        raise ConfigError(
            f"parallel.contiguous_micro_batches = {contiguous} with parallel.schedule = {name}: only interleaved takes "
            "it; leave it out"
        )
    if contiguous < pipeline_ranks:
        raise ConfigError(
            f"parallel.contiguous_micro_batches = {contiguous} is below parallel.pp = {pipeline_ranks}: the first rank "
            "would wait for its second virtual stage's turn; use at least parallel.pp, or leave it out"
        )


@lru_cache(maxsize=32)
def build_schedule(
    name: str, pipeline_ranks: int, virtual_stages: int | None, micro_batches: int, *, contiguous: int | None = None
) -> Schedule:
    """Writes out a schedule.

    Args:
        name: of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages of each rank; None for 1 where the schedule has no more, else 2.
        micro_batches: m, any number from 1 on.
        contiguous: micro-batches that an interleaved schedule runs through one virtual stage in a row; None for p.

    Raises:
        ConfigError: there is no such schedule, or it cannot be.
    """
    assert pipeline_ranks >= 1 and micro_batches >= 1, (pipeline_ranks, micro_batches)
    placement = stage_placement(name, pipeline_ranks, virtual_stages)
    check_contiguous(name, pipeline_ranks, contiguous)
    if name == "interleaved":
        stages = placement.num_stages // pipeline_ranks
        computations = interleaved(pipeline_ranks, stages, micro_batches, contiguous or pipeline_ranks)
    else:
        computations = _ORDERS[name](pipeline_ranks, micro_batches)
    return Schedule(name, placement, micro_batches, with_messages(placement, computations))
