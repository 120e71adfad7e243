"""Places the sends and receives of a pipeline schedule so that no hardware can make them deadlock.

All passes and p2p messages of a step are put in one order that every rank agrees on, and each rank issues its own part
of it, in this order. The order fulfils every dependency: a message comes after the pass that produces its tensor and
before the pass that uses it. Then the first message that is not complete can always complete: everything that its two
ranks do before it is complete or depends on earlier messages only. This holds even if every send, receive and pass
blocks its rank until it is done. NCCL and CUDA can only be less strict, so it makes no difference how many hardware
queues the streams share, what NCCL buffers, how many communicators there are, or when CUDA makes the device wait for
everything that runs, as it may when it loads a kernel or frees memory. `schedule_simulation.blocked` verifies this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megads.parallel.pipeline_actions import Action, ActionKind, Message, StagePlacement, message_from, message_to

MOST_EARLY = 3
"""Maximum number of passes between the start of a receive and the pass that uses its tensor, that pass included; so a
rank has at most this many receive buffers whose tensors are not used yet. With 2 the sends are so late that ranks wait
for them if a pass takes longer than in `_TIMES`; more are no faster."""
_TIMES = {
    ActionKind.forward: 1,
    ActionKind.backward: 2,
    ActionKind.backward_input: 1,
    ActionKind.backward_weight: 1,
}
"""Durations of the passes on the clock that orders them; integers, so that all ranks compute the same order."""


class CyclicPasses(AssertionError):
    """The passes of the ranks wait for each other in a circle: a bug in the schedule."""


class _Event(NamedTuple):
    """A pass or a message; events are ordered by their first fields.

    Attributes:
        time: when the pass ends or the message is sent.
        is_message: whether it is a message: one follows the passes that end at its time.
        rank: rank of the pass; sender of the message.
        place: index of the pass among its rank's, of the message's pass among the sender's.
    """

    time: int
    is_message: bool
    rank: int
    place: int


@dataclass(frozen=True)
class _Clock:
    """When passes end if messages take no time.

    Attributes:
        ends: end of each pass of a rank, [rank][place].
        starts_after: by message, the earliest time at which it may be sent by the limit of MOST_EARLY.
    """

    ends: tuple[tuple[int, ...], ...]
    starts_after: dict[Action, int]


def add_communication(
    placement: StagePlacement, computations: Sequence[Sequence[Action]]
) -> tuple[tuple[Action, ...], ...]:
    """Adds loads, sends and receives to the passes of a step.

    A message is sent when its tensor is produced, but at the earliest MOST_EARLY passes of the receiver before its use.
    A pass takes the place in the common order at which it ends, so a receiver posts a receive before the pass during
    which the tensor is produced, and the transfer overlaps with that pass.

    Args:
        placement: placement of the virtual stages.
        computations: forward and backward passes of each rank, in order.

    Returns:
        All actions of each rank, in order.

    Raises:
        CyclicPasses: the passes cannot be run in the order of each rank.
    """
    clock = _run(placement, computations)
    events: list[tuple[_Event, Message | None]] = []
    for rank, row in enumerate(computations):
        for place, computation in enumerate(row):
            ended = clock.ends[rank][place]
            events.append((_Event(ended, False, rank, place), None))
            made = message_from(placement, computation)
            if made is not None:
                sent = max(ended, clock.starts_after.get(made.receive, 0))
                events.append((_Event(sent, True, rank, place), made))
    listed: list[list[Action]] = [[] for _ in computations]
    ends = 0, placement.num_stages - 1
    for event, message in sorted(events, key=lambda found: found[0]):
        if message is not None:
            listed[message.sender].append(message.send)
            listed[message.receiver].append(message.receive)
            continue
        computation = computations[event.rank][event.place]
        if computation.kind is ActionKind.forward and computation.stage in ends:
            listed[event.rank].append(Action(ActionKind.load, computation.micro_batch, computation.stage))
        listed[event.rank].append(computation)
    return tuple(map(tuple, listed))


def _run(placement: StagePlacement, computations: Sequence[Sequence[Action]]) -> _Clock:
    """Runs the passes on a clock on which messages take no time."""
    ends: list[list[int]] = [[] for _ in computations]
    starts_after: dict[Action, int] = {}
    arrived: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(computations):
            own = ends[rank]
            while len(own) < len(row):
                computation = row[len(own)]
                start, needed = own[-1] if own else 0, message_to(placement, computation)
                if needed is not None:
                    if needed.receive not in arrived:
                        break
                    start = max(start, arrived[needed.receive])
                    starts_after[needed.receive] = own[-MOST_EARLY] if len(own) >= MOST_EARLY else 0
                own.append(start + _TIMES[computation.kind])
                made = message_from(placement, computation)
                if made is not None:
                    arrived[made.receive] = own[-1]
                moved = True
    stuck = [row[len(own)] for row, own in zip(computations, ends, strict=True) if len(own) < len(row)]
    if stuck:
        raise CyclicPasses(f"ranks wait for each other before: {'; '.join(map(str, stuck))}")
    return _Clock(tuple(map(tuple, ends)), starts_after)
