"""When a sent tensor may be freed: once a later message shows that its receiver has used it. Pure Python.

Backends differ in how a sender learns that a message has left it; gloo says it only to those who wait. What a schedule
does next says it at no cost: the gradient of an activation cannot come back before the activation got there.
"""

from __future__ import annotations

from bisect import bisect_right

from megads.parallel.pipeline_actions import Action, Schedule
from megads.parallel.schedule_messages import Message, message_from, message_to


def sent_and_received(schedule: Schedule, rank: int) -> tuple[list[Message], list[Message]]:
    """Messages that a pipeline rank sends, in order, and those that it uses, in the order of their receives."""
    placement, row = schedule.placement, schedule.actions[rank]
    sent = [message for message in (message_from(placement, action) for action in row) if message is not None]
    used = {m.receive: m for m in (message_to(placement, action) for action in row) if m is not None}
    return sent, [used[action] for action in row if action.kind.receives]


def acknowledged_sends(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    """What a pipeline rank knows to have arrived as soon as a message of its own is there.

    Args:
        schedule: of the step.
        rank: the pipeline rank.

    Returns:
        For receives of this rank, the sends of this rank to the same peer that the peer used before it sent. A send
        that no message follows is not in it.
    """
    sent, received = sent_and_received(schedule, rank)
    found: dict[Action, list[Action]] = {}
    for peer in {message.receiver for message in sent}:
        row = schedule.actions[peer]
        uses = {m.receive: place for place, action in enumerate(row) if (m := message_to(schedule.placement, action))}
        places = {action: place for place, action in enumerate(row) if action.kind.sends}
        replies = [message for message in received if message.sender == peer]
        sent_at = [places[reply.send] for reply in replies]
        for message in sent:
            if message.receiver == peer:
                following = bisect_right(sent_at, uses[message.receive])
                if following < len(replies):
                    found.setdefault(replies[following].receive, []).append(message.send)
    return {receive: tuple(sends) for receive, sends in found.items()}
