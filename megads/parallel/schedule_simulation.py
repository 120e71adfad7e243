"""Simulates pipeline schedules in time, and verifies that they are correct and free of deadlocks.

`schedule_faults` must be empty for every schedule; the other functions compute bubble, memory and receive buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement, message_from, message_to

_BACKWARDS = (ActionKind.backward, ActionKind.backward_weight)
"""Actions that accumulate a micro-batch's weight gradients."""


class ScheduleDeadlock(AssertionError):
    """Deadlock, a bug in the schedule: every unfinished rank waits for a message that is never sent."""


@dataclass(frozen=True)
class ScheduleCosts:
    """Durations of a schedule's actions, in seconds or any other unit, indexed by virtual stage.

    Attributes:
        forward: duration of a forward pass, [stage].
        backward_input: duration of the input-gradient part of a backward pass, which the previous stage waits for,
            [stage].
        backward_weight: duration of the weight-gradient part, [stage]; a whole backward pass takes the sum of both.
        latency: p2p latency from the end of the transfer to the arrival at the receiver.
        transfer: time that a message occupies its direction between two ranks: bytes over bandwidth.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    latency: float = 0.0
    transfer: float = 0.0

    def duration_of(self, action: Action) -> float:
        """Compute time of an action; 0 for loads, sends and receives."""
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
    """An action with its start and end times; a receive lasts as long as the rank waits for it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Simulated timeline of one step.

    Attributes:
        spans: timed actions of each pipeline rank, in order.
    """

    spans: tuple[tuple[TimedAction, ...], ...]

    @property
    def step_time(self) -> float:
        """Time from the start of the step to the end of its last action."""
        return max(row[-1].end for row in self.spans)

    def busy(self, rank: int) -> float:
        """Compute time of a rank."""
        return sum(span.end - span.start for span in self.spans[rank] if span.action.kind.computes)

    @property
    def bubble_share(self) -> float:
        """Pipeline bubble: share of all ranks' time without compute."""
        ranks = range(len(self.spans))
        return 1 - sum(self.busy(rank) for rank in ranks) / (len(ranks) * self.step_time)


def _unit_costs(schedule: Schedule) -> ScheduleCosts:
    """Costs of 1 for a forward pass and for each part of a backward pass, and 0 for messages."""
    ones = [1.0] * schedule.placement.num_stages
    return ScheduleCosts(ones, ones, ones)


def simulate_schedule(schedule: Schedule, costs: ScheduleCosts) -> Timeline:
    """Simulates a schedule: ranks run actions in program order, sends and receives are asynchronous, and a pass waits
    for its input, which the timeline shows as its receive.

    Messages of one direction between two ranks are serialized, each taking `costs.transfer`. A tensor that is sent
    before its receive is posted arrives as if it had been posted.

    Raises:
        ScheduleDeadlock: a pass waits for a message that is never sent.
    """
    now = [0.0 for _ in schedule.actions]
    spans: list[list[TimedAction]] = [[] for _ in schedule.actions]
    arrivals: dict[tuple[ActionKind, int, int], float] = {}
    occupied: dict[tuple[int, int], float] = {}
    placement = schedule.placement

    def run(rank: int, action: Action) -> bool:
        if action.kind.receives:
            return True
        needed = message_to(placement, action)
        if needed is not None:
            arrival = arrivals.get((needed.receive.kind, action.micro_batch, action.stage))
            if arrival is None:
                return False
            spans[rank].append(TimedAction(needed.receive, now[rank], max(now[rank], arrival)))
            now[rank] = spans[rank][-1].end
        start = end = now[rank]
        if action.kind.sends:
            forth = action.kind is ActionKind.send_activation
            user = action.stage + (1 if forth else -1)
            way = rank, placement.rank_of(user)
            occupied[way] = max(start, occupied.get(way, 0.0)) + costs.transfer
            receive = ActionKind.receive_activation if forth else ActionKind.receive_gradient
            arrivals[receive, action.micro_batch, user] = occupied[way] + costs.latency
        else:
            end = start + costs.duration_of(action)
        spans[rank].append(TimedAction(action, start, end))
        now[rank] = end
        return True

    stuck = [str(action) for action in advance(schedule, run)]
    if stuck:
        raise ScheduleDeadlock(f"{schedule.name} deadlocks; its ranks wait before: {'; '.join(stuck)}")
    return Timeline(tuple(map(tuple, spans)))


def advance(schedule: Schedule, run: Callable[[int, Action], bool]) -> list[Action]:
    """Runs every rank's actions in program order, each rank as far as it gets, until no rank can proceed.

    Args:
        schedule: the schedule.
        run: called with a rank and its next action; returns False if the action has to wait for another rank.

    Returns:
        The next action of every unfinished rank; empty if all ranks finished.
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
    """All violations of a schedule's invariants; empty if it is valid.

    - Every micro-batch runs forward and backward once on every stage, on the rank that holds the stage; a backward pass
      is whole, or has both its parts in order.
    - On every stage, micro-batches run forward, and accumulate their gradients, in the order 0, 1, 2, ...
    - First and last stage load a micro-batch before its forward pass.
    - Every tensor that crosses ranks is sent once after it is produced and received once before it is used; there are
      no other sends and receives, and receives are in the order of the sends for each direction between two ranks.
    - All ranks finish, even if every send and every receive blocks; see `blocked`.
    """
    found = [*_count_faults(schedule), *_order_faults(schedule), *_local_faults(schedule), *_channel_faults(schedule)]
    if not found:
        try:
            simulate_schedule(schedule, _unit_costs(schedule))
        except ScheduleDeadlock as error:
            found.append(str(error))
        stuck = blocked(schedule)
        if stuck:
            found.append(f"{schedule.name} deadlocks if messages block: {'; '.join(map(str, stuck))}")
    return found


def _count_faults(schedule: Schedule) -> Iterator[str]:
    """Computations that are missing, duplicated, or on the wrong rank."""
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
    """Stages that run micro-batches, or accumulate their gradients, in another order than 0, 1, 2, ..."""
    for stage in range(schedule.placement.num_stages):
        row = schedule.actions[schedule.placement.rank_of(stage)]
        for what, kinds in (("runs forward", (ActionKind.forward,)), ("adds gradients of", _BACKWARDS)):
            order = [action.micro_batch for action in row if action.stage == stage and action.kind in kinds]
            if order != sorted(order):
                yield f"stage {stage} {what} micro-batches in the order {order}"


def _local_faults(schedule: Schedule) -> Iterator[str]:
    """Actions that precede an action of the same rank which they depend on, and unused receives and loads."""
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
    """Actions that must precede an action in its rank's list.

    Args:
        placement: placement of the virtual stages.
        action: the action.
        split: all input-gradient parts of the rank's split backward passes.
    """
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
    """The action that produces the gradient of a stage's input."""
    part = Action(ActionKind.backward_input, micro_batch, stage)
    return part if part in split else Action(ActionKind.backward, micro_batch, stage)


def _channel_faults(schedule: Schedule) -> Iterator[str]:
    """Messages that are not sent, sent more than once, or not received in the order of sending."""
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
        yield f"{action}: listed {sent[action]} times, but its tensor is produced {expected[action]} times"
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


def passes_in_flight(schedule: Schedule, rank: int) -> Iterator[tuple[Action, Counter[int]]]:
    """Each computation of a rank, with the number of micro-batches that are in flight during it.

    Yields:
        The computation, and the number of micro-batches of each virtual stage between their forward and (weight part of
        the) backward passes, including the computation's own. The counter is updated in place.
    """
    waiting: Counter[int] = Counter()
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.forward:
            waiting[action.stage] += 1
        if action.kind.computes:
            yield action, waiting
        if action.kind in _BACKWARDS:
            waiting[action.stage] -= 1


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Maximum number of micro-batches in flight per rank, summed over its virtual stages; see `passes_in_flight`."""
    ranks = range(len(schedule.actions))
    return [max(waiting.total() for _, waiting in passes_in_flight(schedule, rank)) for rank in ranks]


def bubble_share(schedule: Schedule) -> float:
    """Pipeline bubble if a forward pass and each part of a backward pass take 1 and messages take no time."""
    return simulate_schedule(schedule, _unit_costs(schedule)).bubble_share


def closed_form_bubble_share(name: str, pipeline_ranks: int, virtual_stages: int, micro_batches: int) -> float | None:
    """Closed form of `bubble_share`; None if there is none: for some with m < p, and searched orders with p > 2.

    1F1B (p - 1) / (m + p - 1); interleaved (p - 1) / (v m + p - 1); ZB-H1 (p - 1) / (3 m + p - 1), a third of the idle
    time; V shapes (p - 1) / (6 m + p - 1), which is the forward pass of the first micro-batch to the last rank.
    """
    p, m = pipeline_ranks, micro_batches
    works = {"1f1b": 1, "interleaved": virtual_stages, "zb_h1": 3, "dualpipe_v": 6, "zb_v": 6}
    searched = name == "zb_v" or (name == "dualpipe_v" and m < 2 * p)
    if (m < p and name != "1f1b") or (searched and p > 2):
        return None
    return (p - 1) / (works[name] * m + p - 1)


def blocked(schedule: Schedule) -> list[Action]:
    """Actions that ranks never get past if every send and every receive blocks until its peer reaches the other end.

    This is stricter than any number of hardware queues, any buffers and any synchronization with the device, so a
    schedule without such actions deadlocks on none of them; see `message_order`.

    Returns:
        The next action of every rank that does not finish; empty if there is no deadlock.
    """
    ends: dict[Action, Action] = {}
    for row in schedule.actions:
        for action in row:
            message = message_from(schedule.placement, action)
            if message is not None:
                ends |= {message.send: message.receive, message.receive: message.send}
    reached: set[Action] = set()

    def run(_rank: int, action: Action) -> bool:
        if action not in ends:
            return True
        reached.add(action)
        return ends[action] in reached

    return advance(schedule, run)


def most_early_receives(schedule: Schedule, rank: int) -> int:
    """Maximum number of receives of a rank that are posted while no pass has used their tensors."""
    early = most = 0
    for action in schedule.actions[rank]:
        if action.kind.receives:
            early += 1
        elif message_to(schedule.placement, action) is not None:
            most = max(most, early)
            early -= 1
    return most
