"""Pipeline schedules as pure Python: what each pipeline rank does in a step, in program order.

`engine/` executes the lists, `plan/` simulates them on a clock; nothing here knows torch or a process group.

Letters: p pipeline ranks, v virtual stages a rank, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache

from megads.errors import ConfigError
from megads.parallel.pipeline_actions import Action, ActionKind, Placement, Schedule
from megads.parallel.schedule_messages import with_messages
from megads.parallel.schedule_orders import interleaved, one_forward_one_backward, zero_bubble
from megads.parallel.schedule_v import bidirectional_v, zero_bubble_v

__all__ = [
    "Action",
    "ActionKind",
    "Placement",
    "Schedule",
    "ScheduleName",
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


def stage_placement(name: str, pipeline_ranks: int, virtual_stages: int | None = None) -> Placement:
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
        return Placement(ranks)
    if name in _V_SHAPED:
        if virtual_stages not in (None, 2):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, whose V shape has two "
                "stages a rank: leave it out, or use parallel.schedule=interleaved"
            )
        return Placement(ranks + ranks[::-1])
    return Placement(ranks * (2 if virtual_stages is None else virtual_stages))


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
