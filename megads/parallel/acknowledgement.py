"""When a sent tensor may be freed: once a later message shows that its receiver has used it. Pure Python.

Backends differ in how a sender learns that a message has left it; gloo says it only to those who wait. What a schedule
does next says it at no cost: the gradient of an activation cannot come back before the activation got there.
"""

from __future__ import annotations

from bisect import bisect_right

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule

SENDS = (ActionKind.send_activation, ActionKind.send_gradient)
RECEIVES = (ActionKind.receive_activation, ActionKind.receive_gradient)
_ARRIVALS = {
    ActionKind.send_activation: (ActionKind.receive_activation, 1),
    ActionKind.send_gradient: (ActionKind.receive_gradient, -1),
}
_USERS = {
    ActionKind.receive_activation: (ActionKind.forward,),
    ActionKind.receive_gradient: (ActionKind.backward, ActionKind.backward_input),
}


def arrival(send: Action) -> Action:
    """The receive that a send meets."""
    kind, step = _ARRIVALS[send.kind]
    return Action(kind, send.micro_batch, send.stage + step)


def departure(receive: Action) -> Action:
    """The send that a receive meets."""
    for kind, (met, step) in _ARRIVALS.items():
        if met is receive.kind:
            return Action(kind, receive.micro_batch, receive.stage - step)
    raise AssertionError(f"{receive.kind} is no receive")


def acknowledged_sends(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    """What a pipeline rank knows to have arrived as soon as a message of its own is there.

    Args:
        schedule: of the step.
        rank: the pipeline rank.

    Returns:
        For receives of this rank, the sends of this rank to the same peer that the peer used before it sent. A send
        that no message follows is not in it.
    """
    places = [{action: place for place, action in enumerate(row)} for row in schedule.actions]
    # Of each peer, what it sends here, by place in its list.
    replies: dict[int, list[Action]] = {}
    for receive in schedule.actions[rank]:
        if receive.kind in RECEIVES:
            replies.setdefault(schedule.placement.rank_of(departure(receive).stage), []).append(departure(receive))
    found: dict[Action, list[Action]] = {}
    for send in schedule.actions[rank]:
        if send.kind not in SENDS:
            continue
        met = arrival(send)
        peer = schedule.placement.rank_of(met.stage)
        used = next(
            places[peer][user]
            for user in (Action(kind, met.micro_batch, met.stage) for kind in _USERS[met.kind])
            if user in places[peer]
        )
        sent = replies.get(peer, [])
        following = bisect_right([places[peer][reply] for reply in sent], used)
        if following < len(sent):
            found.setdefault(arrival(sent[following]), []).append(send)
    return {receive: tuple(sends) for receive, sends in found.items()}
