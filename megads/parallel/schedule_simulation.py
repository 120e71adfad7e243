"""Runs pipeline schedules on a clock, and proves that they compute the right thing and cannot stand still.

`schedule_faults` is what every schedule must pass; the other functions say what it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement, message_from, message_to

_BACKWARDS = (ActionKind.backward, ActionKind.backward_weight)
"""What adds a micro-batch's gradients to the sums over micro-batches."""


class StuckSchedule(AssertionError):
    """Every rank that is not done waits for a message that nobody will send: a bug in the schedule."""


@dataclass(frozen=True)
class ScheduleCosts:
    """Seconds, or any other unit, of what a schedule does; [stage] is the number of a virtual stage.

    Attributes:
        forward: of a forward pass, [stage].
        backward_input: of the part of a backward pass that the stage before waits for, [stage].
        backward_weight: of the part that makes the gradients of weights, [stage]; a whole backward pass takes both.
        latency: from the end of sending to the receiver's having it.
        transfer: for which a message occupies its direction between two ranks: bytes over bandwidth.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    latency: float = 0.0
    transfer: float = 0.0

    def of(self, action: Action) -> float:
        """How long a rank computes for an action; nothing for what only moves data."""
        stage = action.stage
        match action.kind:
            case ActionKind.forward:
                return self.forward[stage]
            case ActionKind.backward:
                return self.backward_input[stage] + self.backward_weight[stage]
            case ActionKind.backward_input:
                return self.backward_input[stage]
            case ActionKind.backward_weight:
                return self.backward_weight[stage]
            case _:
                return 0.0


@dataclass(frozen=True)
class TimedAction:
    """An action on the clock; a receive lasts as long as the rank waits for it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step on the clock.

    Attributes:
        spans: of each pipeline rank, in order.
    """

    spans: tuple[tuple[TimedAction, ...], ...]

    @property
    def step_time(self) -> float:
        """From the start to the end of the last action of all."""
        return max(row[-1].end for row in self.spans)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank] if span.action.kind.computes)

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time in which they compute nothing."""
        ranks = range(len(self.spans))
        return 1 - sum(self.busy(rank) for rank in ranks) / (len(ranks) * self.step_time)


def _unit_costs(schedule: Schedule) -> ScheduleCosts:
    """A forward pass and each part of a backward pass take 1, messages nothing."""
    ones = [1.0] * schedule.placement.num_stages
    return ScheduleCosts(ones, ones, ones)


def run_clock(schedule: Schedule, costs: ScheduleCosts) -> Timeline:
    """Runs a schedule: ranks compute in program order, send without waiting and wait where they receive.

    Messages of one direction between two ranks follow each other, each occupying it for `costs.transfer`.

    Raises:
        StuckSchedule: a rank waits for a message that is never sent.
    """
    now = [0.0 for _ in schedule.actions]
    spans: list[list[TimedAction]] = [[] for _ in schedule.actions]
    arrivals: dict[tuple[ActionKind, int, int], float] = {}
    occupied: dict[tuple[int, int], float] = {}
    placement = schedule.placement

    def run(rank: int, action: Action) -> bool:
        start = end = now[rank]
        if action.kind.receives:
            arrival = arrivals.get((action.kind, action.micro_batch, action.stage))
            if arrival is None:
                return False
            end = max(start, arrival)
        elif action.kind.sends:
            forth = action.kind is ActionKind.send_activation
            user = action.stage + (1 if forth else -1)
            way = rank, placement.rank_of(user)
            occupied[way] = max(start, occupied.get(way, 0.0)) + costs.transfer
            receive = ActionKind.receive_activation if forth else ActionKind.receive_gradient
            arrivals[receive, action.micro_batch, user] = occupied[way] + costs.latency
        else:
            end = start + costs.of(action)
        spans[rank].append(TimedAction(action, start, end))
        now[rank] = end
        return True

    stuck = [str(action) for action in advance(schedule, run)]
    if stuck:
        raise StuckSchedule(f"{schedule.name} stands still; its ranks wait for: {'; '.join(stuck)}")
    return Timeline(tuple(map(tuple, spans)))


def advance(schedule: Schedule, run: Callable[[int, Action], bool]) -> list[Action]:
    """Runs every rank's actions in program order, rank after rank as far as each comes, until none comes further.

    Args:
        schedule: what to run.
        run: is given a rank and its next action; False: the action has to wait for another rank.

    Returns:
        What the ranks that are not done wait at; nothing where all came to the end.
    """
    positions = [0 for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while positions[rank] < len(row) and run(rank, row[positions[rank]]):
                positions[rank] += 1
                moved = True
    return [row[at] for row, at in zip(schedule.actions, positions, strict=True) if at < len(row)]


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
            run_clock(schedule, _unit_costs(schedule))
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
    return run_clock(schedule, _unit_costs(schedule)).bubble_share


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
