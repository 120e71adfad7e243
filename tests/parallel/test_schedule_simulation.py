"""The static schedule check finds injected defects, and the simulated clock keeps time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megads.parallel.message_order import add_communication
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule import build_schedule
from megads.parallel.schedule_simulation import ScheduleCosts, schedule_faults, simulate_schedule

Row = list[Action]


def index_of(row: Row, kind: ActionKind, micro_batch: int) -> int:
    return next(i for i, a in enumerate(row) if a.kind is kind and a.micro_batch == micro_batch)


def dropped_weight_part(rows: list[Row]) -> None:
    del rows[1][index_of(rows[1], ActionKind.backward_weight, 2)]


def weight_part_twice(rows: list[Row]) -> None:
    rows[1].append(rows[1][index_of(rows[1], ActionKind.backward_weight, 2)])


def early_weight_part(rows: list[Row]) -> None:
    weight = rows[1].pop(index_of(rows[1], ActionKind.backward_weight, 2))
    rows[1].insert(index_of(rows[1], ActionKind.backward_input, 2), weight)


def weight_parts_out_of_order(rows: list[Row]) -> None:
    last = rows[3]
    a, b = (index_of(last, ActionKind.backward_weight, m) for m in (1, 2))
    last[a], last[b] = last[b], last[a]


def lost_micro_batch(rows: list[Row]) -> None:
    for row in rows:
        row[:] = [a for a in row if a.micro_batch != 3]


def swapped_messages(rows: list[Row]) -> None:
    # Both receives are early enough for their uses, but the peer sends in the opposite order.
    first, second = (index_of(rows[1], ActionKind.receive_activation, m) for m in (2, 3))
    later = rows[1].pop(second)
    rows[1].insert(first, later)


def lost_send(rows: list[Row]) -> None:
    del rows[2][index_of(rows[2], ActionKind.send_gradient, 1)]


def late_receive(rows: list[Row]) -> None:
    place = index_of(rows[2], ActionKind.receive_activation, 1)
    rows[2].insert(index_of(rows[2], ActionKind.forward, 1), rows[2].pop(place))


def early_send(rows: list[Row]) -> None:
    place = index_of(rows[0], ActionKind.send_activation, 1)
    rows[0][place], rows[0][place - 1] = rows[0][place - 1], rows[0][place]


def missing_load(rows: list[Row]) -> None:
    del rows[3][index_of(rows[3], ActionKind.load, 0)]


def pass_on_another_rank(rows: list[Row]) -> None:
    rows[0].append(rows[1].pop())


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        (dropped_weight_part, "micro-batch 2 on stage 1 runs forward, backward_input"),
        (weight_part_twice, "backward_weight of micro-batch 2 on stage 1: 2 times"),
        (early_weight_part, "backward_weight of micro-batch 2 on stage 1: before backward_input"),
        (weight_parts_out_of_order, "stage 3 adds gradients of micro-batches in the order [0, 2, 1, 3, 4]"),
        (lost_micro_batch, "micro-batch 3 on stage 0 runs nothing"),
        (swapped_messages, "the receive is receive_activation of micro-batch 3 on stage 1"),
        (lost_send, "send_gradient of micro-batch 1 on stage 2: listed 0 times, but its tensor is produced 1 times"),
        (late_receive, "forward of micro-batch 1 on stage 2: before receive_activation"),
        (early_send, "send_activation of micro-batch 1 on stage 0: before forward"),
        (missing_load, "forward of micro-batch 0 on stage 3: before load"),
        (pass_on_another_rank, "on rank 0, but rank 1 holds the stage"),
    ],
)
def test_planted_defects_are_found(defect: Callable[[list[Row]], None], message: str) -> None:
    """Catches a check that accepts a broken schedule."""
    schedule = build_schedule("zb_h1", 4, 1, 5)
    assert schedule_faults(schedule) == []
    rows = [list(row) for row in schedule.actions]
    defect(rows)
    faults = schedule_faults(replace(schedule, actions=tuple(map(tuple, rows))))
    assert any(message in fault for fault in faults), faults


def passes(stage: int, order: str) -> Row:
    kinds = {"F": ActionKind.forward, "B": ActionKind.backward}
    return [Action(kinds[word[0]], int(word[1:]), stage) for word in order.split()]


def listed(*rows: str) -> Schedule:
    """A schedule of two stages: F and B are passes, > is a send, < a receive; `load` actions are added."""
    placement, actions = StagePlacement((0, 1)), []
    for stage, row in enumerate(rows):
        kinds = {
            "F": ActionKind.forward, "B": ActionKind.backward,
            ">F": ActionKind.send_activation, "<F": ActionKind.receive_activation,
            ">B": ActionKind.send_gradient, "<B": ActionKind.receive_gradient,
        }  # fmt: skip
        found = [Action(kinds[word[:-1]], int(word[-1]), stage) for word in row.split()]
        loads = {action: Action(ActionKind.load, action.micro_batch, stage) for action in found}
        actions.append(tuple(a for action in found for a in ((loads[action], action)[action.kind is not kinds["F"] :])))
    return Schedule("by hand", placement, 2, tuple(actions))


def test_a_planted_deadlock_is_found() -> None:
    """Catches a check that misses a deadlock where every send has a matching receive, in order."""
    crossed = listed("F0 >F0 <B0 B0 F1 >F1 <B1 B1", "<F0 F0 <F1 F1 B0 >B0 B1 >B1")
    faults = schedule_faults(crossed)
    assert len(faults) == 2 and "deadlocks" in faults[0] and "forward of micro-batch 1" in faults[0]


def test_messages_that_block_each_other_are_found() -> None:
    """Catches a check of blocking messages that never blocks: neighbours that send to each other at the same time."""
    both_send = listed("F0 >F0 F1 >F1 <B0 B0 <B1 B1", "<F0 F0 B0 >B0 <F1 F1 B1 >B1")
    faults = schedule_faults(both_send)
    assert len(faults) == 1 and "deadlocks if messages block: send_activation of micro-batch 1" in faults[0]
    assert schedule_faults(listed("F0 >F0 F1 >F1 <B0 B0 <B1 B1", "<F0 F0 B0 <F1 >B0 F1 B1 >B1")) == []


def test_the_clock_counts_messages() -> None:
    """Catches a clock without latency or bandwidth, or on which transfers of one direction overlap.

    Two ranks, one micro-batch: 1 + (2 + 3) + 10 + 20 + (2 + 3) + 30 by hand.
    """
    costs = ScheduleCosts([1.0, 10.0], [15.0, 5.0], [15.0, 15.0], latency=3.0, transfer=2.0)
    timeline = simulate_schedule(build_schedule("1f1b", 2, 1, 1), costs)
    assert timeline.step_time == 1 + 5 + 10 + 20 + 5 + 30
    assert timeline.busy(0) == 31 and timeline.busy(1) == 30
    assert timeline.bubble_share == pytest.approx(1 - 61 / (2 * 71))
    waits = [span.end - span.start for row in timeline.spans for span in row if span.action.kind.receives]
    assert waits == [40, 6]


def test_messages_share_their_direction() -> None:
    """Catches bandwidth that is not shared: a fast first rank fills the link, and the second waits for it."""
    costs = ScheduleCosts([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], transfer=7.0)
    placement = StagePlacement((0, 1))
    rows = add_communication(placement, [passes(0, "F0 F1 F2 B0 B1 B2"), passes(1, "F0 F1 F2 B0 B1 B2")])
    assert simulate_schedule(Schedule("all forward", placement, 3, rows), costs).step_time == 3 * 7 + 3 * 7
