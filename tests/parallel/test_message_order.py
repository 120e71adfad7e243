"""No hardware can make the messages of a schedule deadlock: of sampled sizes; in the slow test of all with up to 8
ranks, in `make test-attack` of all with up to 16."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from megads.engine.native_engine import forward_only
from megads.parallel.message_order import MOST_EARLY, CyclicPasses, add_communication
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule, StagePlacement
from megads.parallel.schedule import V_SHAPED, ScheduleName, build_schedule
from megads.parallel.schedule_simulation import blocked, most_early_receives
from tests.engine.stream_order import deadlocks, mismatches, replayed, stuck, when_needed

MOST_RANKS, MOST_STAGES = 16, 8
RANKS = [
    pytest.param(ranks, marks=pytest.mark.slow if ranks <= 8 else pytest.mark.attack)
    for ranks in range(2, MOST_RANKS + 1)
]
"""More than 8 take minutes each."""
Size = tuple[str, int, int, int]
"""Schedule, p, v and m."""


def stages_of(name: str) -> range:
    if name == "interleaved":
        return range(1, MOST_STAGES + 1)
    return range(2, 3) if name in V_SHAPED else range(1, 2)


def sizes(ranks: int) -> Iterator[Size]:
    """All sizes with so many pipeline ranks and up to 4 p micro-batches; a ramp passes through them."""
    for name in ScheduleName:
        for stages in stages_of(name):
            yield from ((name, ranks, stages, m) for m in range(1, 4 * ranks + 1))


def prove(schedule: Schedule) -> None:
    """Asserts that a training step and an evaluation end even if every send and every receive blocks."""
    for step in (schedule, forward_only(schedule)):
        assert blocked(step) == [], schedule
        assert all(most_early_receives(step, rank) <= MOST_EARLY for rank in range(schedule.placement.num_ranks))


def test_messages_never_block_each_other() -> None:
    """Catches a common order that some size breaks: 60 of those with up to 16 ranks, and 20 with contiguous
    micro-batches."""
    rng = random.Random(0)
    every = [size for ranks in range(2, MOST_RANKS + 1) for size in sizes(ranks)]
    small = [size for size in every if size[1] * size[2] * size[3] <= 500]
    for name, p, v, m in rng.sample(small, 60):
        prove(build_schedule(name, p, v, m))
    for _ in range(20):
        p, v, m = rng.randint(2, 10), rng.randint(1, 4), rng.randint(1, 20)
        contiguous = p + rng.randint(0, 2 * p)
        prove(build_schedule("interleaved", p, v, m, contiguous=contiguous))


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_of_every_size_never_block_each_other(ranks: int) -> None:
    """Catches the same for all p <= 16, v <= 8 and m <= 4 p."""
    for name, p, v, m in sizes(ranks):
        prove(build_schedule.__wrapped__(name, p, v, m))


@pytest.mark.slow
def test_messages_of_large_steps_never_block_each_other() -> None:
    """Catches the same for 40 sizes beyond: up to 32 ranks and 512 micro-batches, contiguous ones among them."""
    rng = random.Random(1)
    for _ in range(40):
        p, v = rng.randint(2, 32), rng.randint(1, 10)
        m = rng.randint(1, min(512, 20_000 // (p * v)))
        prove(build_schedule("interleaved", p, v, m, contiguous=rng.choice([None, p + rng.randint(0, 3 * p)])))
        prove(build_schedule(rng.choice(["1f1b", "zb_h1", "dualpipe_v"]), p, None, m))
    for p, m in ((12, 400), (24, 100), (32, 65)):
        prove(build_schedule("zb_v", p, 2, m))


SHARED_QUEUE = [
    *(("interleaved", 2, 2, m) for m in range(4, 17)),
    *(("interleaved", 4, 2, m) for m in (9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23)),
    *(pytest.param(("interleaved", 12, 2, m), marks=pytest.mark.slow) for m in (25, 30, 40, 47)),
]
"""Sizes that deadlocked with one hardware queue before their messages had one order."""


@pytest.mark.quick("interleaved-2-2-4", "interleaved-4-2-9")
@pytest.mark.parametrize("size", SHARED_QUEUE, ids=lambda size: "-".join(map(str, size)))
def test_sizes_that_deadlocked_run_now(size: Size) -> None:
    """Catches the deadlock of interleaved steps with CUDA_DEVICE_MAX_CONNECTIONS=1, replayed without the engine; and a
    proof whose blocking messages are not the strictest case."""
    name, p, v, m = size
    schedule = build_schedule(name, p, v, m)
    before = when_needed(schedule)
    assert blocked(before) and stuck(replayed(before), connections=1) and stuck(replayed(before)) == []
    traces = replayed(schedule)
    assert mismatches(traces) == stuck(traces) == stuck(traces, connections=1) == []


@pytest.mark.parametrize(
    "size",
    [("1f1b", 4, 1, 9), ("zb_h1", 3, 1, 7), ("zb_v", 4, 2, 6), ("dualpipe_v", 3, 2, 8), ("interleaved", 3, 3, 7)],
)
def test_schedules_that_never_block_run_on_any_hardware_queues(size: Size) -> None:
    """Catches a schedule that the proof accepts and the model of NCCL does not."""
    schedule = build_schedule(*size)
    for step in (schedule, forward_only(schedule)):
        assert mismatches(replayed(step)) == deadlocks(replayed(step)) == []


def passes(stage: int, order: str) -> list[Action]:
    kinds = {"F": ActionKind.forward, "B": ActionKind.backward}
    return [Action(kinds[word[0]], int(word[1:]), stage) for word in order.split()]


def test_receives_are_posted_a_pass_ahead() -> None:
    """Catches a receive that is posted when its tensor is needed although it was produced during an earlier pass, and
    one that is posted more than MOST_EARLY passes before. Read off a drawing: a backward pass takes 2, F and B are
    passes, > is a send, < a receive; rank 0 produces activations faster than rank 1 uses them."""
    placement = StagePlacement((0, 1))
    ahead, alternate = "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    rows = add_communication(placement, [passes(0, ahead), passes(1, alternate)])
    kinds = {
        ActionKind.forward: "F", ActionKind.backward: "B",
        ActionKind.send_activation: ">F", ActionKind.receive_activation: "<F",
        ActionKind.send_gradient: ">B", ActionKind.receive_gradient: "<B",
    }  # fmt: skip
    words = [" ".join(f"{kinds[a.kind]}{a.micro_batch}" for a in row if a.kind in kinds) for row in rows]
    assert words == [
        "F0 >F0 F1 >F1 F2 F3 >F2 <B0 F4 F5 >F3 <B1 B0 B1 >F4 <B2 B2 >F5 <B3 B3 <B4 B4 <B5 B5",
        "<F0 F0 <F1 B0 <F2 >B0 F1 B1 <F3 >B1 F2 B2 <F4 >B2 F3 B3 <F5 >B3 F4 B4 >B4 F5 B5 >B5",
    ]


def test_passes_that_wait_in_a_circle_are_refused() -> None:
    """Catches an order made of passes that cannot run."""
    with pytest.raises(CyclicPasses, match=r"backward of micro-batch 0.*forward of micro-batch 1"):
        add_communication(StagePlacement((0, 1)), [passes(0, "F0 B0 F1 B1"), passes(1, "F0 F1 B0 B1")])
