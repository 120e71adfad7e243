"""Proves of a pipeline schedule, without running it, that it computes the right thing and cannot stand still.

`schedule_faults` is what every schedule must pass; the other functions say what it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule_clock import StuckSchedule, advance, run_clock, unit_costs
from megads.parallel.schedule_p2p import message_from, message_to

_BACKWARDS = (ActionKind.backward, ActionKind.backward_weight)
"""What adds a micro-batch's gradients to the sums over micro-batches."""


def schedule_faults(schedule: Schedule) -> list[str]:
    """Everything that is wrong with a schedule; empty if nothing is.

    - Every micro-batch runs forward and backward once on every stage, on the rank that holds it; a backward pass is
      whole, or has both its parts in order.
    - On every stage micro-batches run forward, and add their gradients, in the order 0, 1, 2, ...
    - First and last stage load a micro-batch before its forward pass.
    - Every tensor that crosses ranks is sent once after it was made and received once before it is used, nothing else
      is, and receives stand in the order of the sends, for each direction between two ranks.
    - The ranks come to the end with sends that do not wait for the receiver. `receives_ahead` has the harsher case.
    """
    found = [*_count_faults(schedule), *_order_faults(schedule), *_local_faults(schedule), *_channel_faults(schedule)]
    if not found:
        try:
            run_clock(schedule, unit_costs(schedule))
        except StuckSchedule as error:
            found.append(str(error))
    return found


def _count_faults(schedule: Schedule) -> Iterator[str]:
    """Computations that are missing, twice there, or on the wrong rank."""
    counts = Counter(action for row in schedule.actions for action in row if action.kind.computes)
    yield from (f"{action}: {number} times" for action, number in counts.items() if number > 1)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if schedule.placement.rank_of(action.stage) != rank:
                yield f"{action}: on rank {rank}, but rank {schedule.placement.rank_of(action.stage)} holds the stage"
    for stage in range(schedule.placement.num_stages):
        for micro_batch in range(schedule.micro_batches):
            kinds = [kind for kind in ActionKind if kind.computes and Action(kind, micro_batch, stage) in counts]
            whole = [ActionKind.forward, ActionKind.backward]
            parts = [ActionKind.forward, ActionKind.backward_input, ActionKind.backward_weight]
            if kinds not in (whole, parts):
                yield f"micro-batch {micro_batch} on stage {stage} runs {', '.join(kinds) or 'nothing'}"


def _order_faults(schedule: Schedule) -> Iterator[str]:
    """Stages that run micro-batches, or add their gradients, in another order than 0, 1, 2, ..."""
    for stage in range(schedule.placement.num_stages):
        row = schedule.actions[schedule.placement.rank_of(stage)]
        for what, kinds in (("runs forward", (ActionKind.forward,)), ("adds gradients of", _BACKWARDS)):
            order = [action.micro_batch for action in row if action.stage == stage and action.kind in kinds]
            if order != sorted(order):
                yield f"stage {stage} {what} micro-batches in the order {order}"


def _local_faults(schedule: Schedule) -> Iterator[str]:
    """Actions of a rank that stand before what they need, and messages without a use."""
    for row in schedule.actions:
        split = {action for action in row if action.kind is ActionKind.backward_input}
        before: set[Action] = set()
        wanted: set[Action] = set()
        for action in row:
            needs = list(_needs(schedule.placement, action, split))
            wanted.update(needs)
            missing = [need for need in needs if need not in before]
            if missing:
                yield f"{action}: before {', '.join(map(str, missing))}"
            before.add(action)
        unused = [action for action in row if (action.kind.receives or action.kind is ActionKind.load)]
        yield from (f"{action}: not used" for action in unused if action not in wanted)


def _needs(placement: StagePlacement, action: Action, split: Set[Action]) -> Iterator[Action]:
    """What must stand before an action in its rank's list, whose backward passes in two parts are given."""
    micro_batch, stage, last = action.micro_batch, action.stage, placement.num_stages - 1
    message = message_to(placement, action)
    if message is not None:
        yield message.receive
    match action.kind:
        case ActionKind.forward:
            if stage in (0, last):
                yield Action(ActionKind.load, micro_batch, stage)
            if stage and message is None:
                yield Action(ActionKind.forward, micro_batch, stage - 1)
        case ActionKind.backward | ActionKind.backward_input:
            yield Action(ActionKind.forward, micro_batch, stage)
            if stage < last and message is None:
                yield _gradient_maker(split, micro_batch, stage + 1)
        case ActionKind.backward_weight:
            yield Action(ActionKind.backward_input, micro_batch, stage)
        case ActionKind.send_activation:
            yield Action(ActionKind.forward, micro_batch, stage)
        case ActionKind.send_gradient:
            yield _gradient_maker(split, micro_batch, stage)
        case _:
            pass


def _gradient_maker(split: Set[Action], micro_batch: int, stage: int) -> Action:
    """The pass that makes the gradient of a stage's input."""
    part = Action(ActionKind.backward_input, micro_batch, stage)
    return part if part in split else Action(ActionKind.backward, micro_batch, stage)


def _channel_faults(schedule: Schedule) -> Iterator[str]:
    """Messages that are not sent, sent twice, or not received in the order of sending."""
    expected: Counter[Action] = Counter()
    receives: dict[Action, Action] = {}
    senders: dict[Action, int] = {}
    for row in schedule.actions:
        for action in row:
            message = message_from(schedule.placement, action)
            if message is not None:
                expected[message.send] += 1
                receives[message.send], senders[message.receive] = message.receive, message.sender
    sent = Counter(action for row in schedule.actions for action in row if action.kind.sends)
    for action in (sent | expected) - (sent & expected):
        yield f"{action}: listed {sent[action]} times, but it is made {expected[action]} times"
    ranks = range(len(schedule.actions))
    for sender in ranks:
        for receiver in ranks:
            sending = [receives[a] for a in schedule.actions[sender] if a in receives]
            sending = [receive for receive in sending if schedule.placement.rank_of(receive.stage) == receiver]
            listed = [a for a in schedule.actions[receiver] if a.kind.receives and senders.get(a) == sender]
            if sending != listed:
                at = next((i for i, (a, b) in enumerate(zip(sending, listed, strict=False)) if a != b), None)
                where = "" if at is None else f": message {at} is for {sending[at]}, the receive is {listed[at]}"
                yield (
                    f"rank {sender} sends {len(sending)} messages to rank {receiver}, which lists {len(listed)} "
                    f"receives{where}"
                )


def waiting_passes(schedule: Schedule, rank: int) -> Iterator[tuple[Action, Counter[int]]]:
    """Each computation of a rank with what then waits for its backward pass, the computation's own included.

    Yields:
        The computation, and how many micro-batches of each virtual stage wait. The counter is updated in place.
    """
    waiting: Counter[int] = Counter()
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.forward:
            waiting[action.stage] += 1
        if action.kind.computes:
            yield action, waiting
        if action.kind in _BACKWARDS:
            waiting[action.stage] -= 1


def peak_waiting(schedule: Schedule) -> list[int]:
    """Most micro-batches times virtual stages between forward and (weight part of the) backward pass, of each rank."""
    ranks = range(len(schedule.actions))
    return [max(waiting.total() for _, waiting in waiting_passes(schedule, rank)) for rank in ranks]


def bubble_share(schedule: Schedule) -> float:
    """Share of all ranks' time in which they wait, where a forward pass and each part of a backward pass take 1."""
    return run_clock(schedule, unit_costs(schedule)).bubble_share


def known_bubble_share(name: str, pipeline_ranks: int, virtual_stages: int, micro_batches: int) -> float | None:
    """What `bubble_share` has to be; None where there is no formula: some with m < p, orders found by search if p > 2.

    1F1B (p - 1) / (m + p - 1); interleaved (p - 1) / (v m + p - 1); ZB-H1 (p - 1) / (3 m + p - 1), a third of the idle
    time; V shapes (p - 1) / (6 m + p - 1): only the way of the first micro-batch to the last rank is left.
    """
    p, m = pipeline_ranks, micro_batches
    works = {"1f1b": 1, "interleaved": virtual_stages, "zb_h1": 3, "dualpipe_v": 6, "zb_v": 6}
    searched = name == "zb_v" or (name == "dualpipe_v" and m < 2 * p)
    if (m < p and name != "1f1b") or (searched and p > 2):
        return None
    return (p - 1) / (works[name] * m + p - 1)


def receives_ahead(schedule: Schedule) -> int | None:
    """Receives that must be posted ahead on each peer so that the ranks come to the end even if every send blocks.

    The harshest case, synchronous sends: a send returns once the receiver has posted the matching receive. A receiver
    has so many receives of each peer posted at a time, in list order, and waits for one where the list has it.

    Returns:
        The least number, 0 if nothing is sent; None if there is none.
    """
    most = max((sum(action.kind.receives for action in row) for row in schedule.actions), default=0)
    return next((ahead for ahead in range(most + 1) if _ends(schedule, ahead)), None)


def _ends(schedule: Schedule, ahead: int) -> bool:
    """Whether all ranks come to the end with blocking sends and so many posted receives a peer."""
    channels: dict[Action, tuple[int, int]] = {}
    sends: dict[Action, Action] = {}
    for row in schedule.actions:
        for action in row:
            message = message_from(schedule.placement, action)
            if message is not None:
                channels[message.send] = channels[message.receive] = message.sender, message.receiver
                sends[message.receive] = message.send
    sent: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    done: set[Action] = set()

    def run(_rank: int, action: Action) -> bool:
        if action.kind.sends:
            if sent[channels[action]] >= received[channels[action]] + ahead:
                return False
            sent[channels[action]] += 1
            done.add(action)
        elif action.kind.receives:
            if sends[action] not in done:
                return False
            received[channels[action]] += 1
        return True

    return not advance(schedule, run)
