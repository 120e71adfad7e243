"""A clock for pipeline schedules: when each action starts and ends, given what each costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule


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


def unit_costs(schedule: Schedule) -> ScheduleCosts:
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
