"""Which sends a pipeline rank knows to be complete, against random orders of the ranks' actions."""

from __future__ import annotations

import random

import pytest

from megads.parallel.pipeline_actions import Action, Schedule, acknowledged_sends, message_to, sent_and_received
from megads.parallel.schedule import ScheduleName, build_schedule


def run_in_any_order(schedule: Schedule, rng: random.Random) -> list[tuple[int, Action]]:
    """Returns a random order of all ranks' actions in which no tensor is used before it is sent."""
    done: set[Action] = set()
    left = [list(row) for row in schedule.actions]
    order = []
    while any(left):
        rank = rng.choice([rank for rank, row in enumerate(left) if row])
        needed = message_to(schedule.placement, left[rank][0])
        if needed is None or needed.send in done:
            action = left[rank].pop(0)
            done.add(action)
            order.append((rank, action))
    return order


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 5), (3, 4), (4, 9)])
def test_sent_tensors_are_freed_only_after_use(name: str, ranks: int, micro_batches: int) -> None:
    """Catches a sent tensor that is freed before its receiver has used it, and a receive that frees sends to another
    peer."""
    schedule = build_schedule(name, ranks, None, micro_batches)
    for seed in range(5):
        order = run_in_any_order(schedule, random.Random(seed))
        places = {action: place for place, (_, action) in enumerate(order)}
        users = {m.receive: p for p, (_, a) in enumerate(order) if (m := message_to(schedule.placement, a))}
        for rank in range(ranks):
            sent, received = sent_and_received(schedule, rank)
            ends = {message.send: message.receive for message in sent}
            made = {message.receive: message.send for message in received}
            for receive, sends in acknowledged_sends(schedule, rank).items():
                assert all(users[ends[send]] < places[made[receive]] for send in sends)


@pytest.mark.parametrize("name", ScheduleName)
def test_sent_tensors_are_freed_within_the_step(name: str) -> None:
    """Catches sends that are never acknowledged: of 32 micro-batches all but the last few are freed within the step."""
    schedule = build_schedule(name, 4, None, 32)
    for rank in range(4):
        sent, _ = sent_and_received(schedule, rank)
        freed = sum(len(sends) for sends in acknowledged_sends(schedule, rank).values())
        assert len(sent) - 12 <= freed <= len(sent)
