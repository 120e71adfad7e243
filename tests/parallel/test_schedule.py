"""Every pipeline schedule: static verification, and bubble and memory against the papers' formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.errors import ConfigError
from megads.parallel import schedule as schedules
from megads.parallel.pipeline_actions import ActionKind, Schedule
from megads.parallel.schedule import ScheduleName, build_schedule, stage_placement
from megads.parallel.schedule_simulation import (
    bubble_share,
    closed_form_bubble_share,
    peak_in_flight,
    schedule_faults,
)

KINDS = [("1f1b", 1), *(("interleaved", v) for v in (1, 2, 3, 4)), ("zb_h1", 1), ("dualpipe_v", 2), ("zb_v", 2)]


def largest_group(m: int, contiguous: int) -> int:
    return -(-m // max(1, m // contiguous))


def peak_limit(name: str, p: int, v: int, m: int) -> int:
    """Most micro-batches in flight on a rank, by the papers and docs/layouts.md."""
    group = largest_group(m, p)
    limits = {
        "1f1b": p,
        "interleaved": 2 * (p - 1) + (v - 1) * group + 1,
        "zb_h1": p,
        "dualpipe_v": 2 * p + 1,
        "zb_v": 2 * p,
    }
    return min(limits[name], v * m)


def prove(schedule: Schedule, v: int) -> None:
    """Asserts everything that static verification shows."""
    name, p, m = schedule.name, schedule.placement.num_ranks, schedule.micro_batches
    assert schedule_faults(schedule) == []
    assert max(peak_in_flight(schedule)) <= peak_limit(name, p, v, m)
    known = closed_form_bubble_share(name, p, v, m)
    if known is not None:
        assert bubble_share(schedule) == pytest.approx(known, abs=1e-12)
    elif m >= p:
        # Found by search: at most as many additional idle passes as there are ranks.
        lost = (p - 1) / (6 * m + p - 1)
        assert lost - 1e-12 <= bubble_share(schedule) <= (2 * p - 1) / (6 * m + 2 * p - 1)


def batch_counts(p: int) -> set[int]:
    return {m for m in (1, 2, 3, 5, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1) if m >= 1}


@pytest.mark.parametrize(("name", "v"), KINDS)
def test_small_schedules_are_complete_and_do_not_deadlock(name: str, v: int) -> None:
    """Catches a missing pass, a send without a matching receive, wrong gradient order, a deadlock, a larger bubble."""
    for p in (1, 2, 3, 4, 6):
        for m in batch_counts(p):
            prove(build_schedule(name, p, v, m), v)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "v"), KINDS)
def test_large_schedules_are_complete_and_do_not_deadlock(name: str, v: int) -> None:
    """Catches faults that small pipelines do not show, up to p = 16 and m = 64."""
    for p in (5, 8, 11, 16):
        for m in sorted({1, p - 1, p + 1, 2 * p, 2 * p + 3, 64}):
            prove(build_schedule(name, p, v, m), v)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(kind=st.sampled_from(KINDS), p=st.integers(1, 8), m=st.integers(1, 24), more=st.none() | st.integers(0, 24))
def test_random_schedules_are_complete_and_do_not_deadlock(
    kind: tuple[str, int], p: int, m: int, more: int | None
) -> None:
    """Catches faults in unforeseen combinations, contiguous micro-batches among them."""
    name, v = kind
    contiguous = None if more is None or name != "interleaved" else p + more
    schedule = build_schedule(name, p, v, m, contiguous=contiguous)
    assert schedule_faults(schedule) == []
    known = closed_form_bubble_share(name, p, v, m)
    if known is not None:
        assert bubble_share(schedule) == pytest.approx(known, abs=1e-12)


def test_1f1b_is_the_published_one() -> None:
    """Catches a 1F1B with another order of passes than PipeDream's: p = 3, m = 4, read off the paper's figure."""
    letters = {ActionKind.forward: "F", ActionKind.backward: "B"}
    rows = [
        " ".join(f"{letters[a.kind]}{a.micro_batch}" for a in row if a.kind in letters)
        for row in build_schedule("1f1b", 3, 1, 4).actions
    ]
    assert rows == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


def test_1f1b_holds_less_the_later_the_rank() -> None:
    """Catches a memory plan with a wrong number of micro-batches in flight: it is min(p - rank, m)."""
    for m in (1, 2, 3, 9):
        assert peak_in_flight(build_schedule("1f1b", 4, 1, m)) == [min(4 - rank, m) for rank in range(4)]


def test_zero_bubble_idles_a_third_of_1f1b() -> None:
    """Catches weight-gradient passes that do not fill the bubble: idle time is 1/3 of 1F1B's at equal peak memory."""
    for p, m in ((2, 4), (4, 4), (4, 9), (8, 16)):
        work = 3 * m

        def idle(name: str, p: int = p, m: int = m, work: int = work) -> float:
            share = bubble_share(build_schedule(name, p, 1, m))
            return share * work / (1 - share)

        assert idle("zb_h1") == pytest.approx(idle("1f1b") / 3)
        assert max(peak_in_flight(build_schedule("zb_h1", p, 1, m))) == p


def forward_order(contiguous: int | None) -> list[tuple[int, int]]:
    row = build_schedule("interleaved", 2, 2, 6, contiguous=contiguous).actions[0]
    return [(a.stage, a.micro_batch) for a in row if a.kind is ActionKind.forward]


def test_contiguous_micro_batches_come_in_groups_of_the_given_size() -> None:
    """Catches groups of another size than requested: depth-first in pairs, breadth-first over all six."""
    pairs = [(stage, m + i) for m in (0, 2, 4) for stage in (0, 2) for i in (0, 1)]
    assert forward_order(None) == forward_order(2) == pairs
    assert forward_order(6) == [(stage, m) for stage in (0, 2) for m in range(6)]
    peaks = [max(peak_in_flight(build_schedule("interleaved", 2, 2, 6, contiguous=n))) for n in (2, 3, 6)]
    assert peaks == sorted(set(peaks)), "breadth costs memory"


def test_stages_are_placed_as_checkpoint_and_plan_assume() -> None:
    """Catches a stage on another rank than the checkpoint and the plan assume."""
    assert stage_placement("1f1b", 4, 1).ranks == (0, 1, 2, 3)
    assert stage_placement("interleaved", 2, 2).ranks == (0, 1, 0, 1) == stage_placement("interleaved", 2).ranks
    for name in ("dualpipe_v", "zb_v"):
        placement = stage_placement(name, 3, 2)
        assert placement.ranks == (0, 1, 2, 2, 1, 0)
        assert [placement.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize(
    ("name", "v", "contiguous", "message"),
    [
        ("gpipe", 1, None, r"schedule = gpipe: must be one of 1f1b, interleaved"),
        ("1f1b", 2, None, r"virtual_stages = 2 with parallel.schedule = 1f1b.*interleaved"),
        ("zb_v", 3, None, r"virtual_stages = 3 with parallel.schedule = zb_v.*two"),
        ("interleaved", 0, None, r"virtual_stages = 0: must be at least 1"),
        ("zb_h1", 1, 8, r"contiguous_micro_batches = 8 only applies to .*interleaved"),
        ("interleaved", 2, 3, r"contiguous_micro_batches = 3 is below parallel.pp = 4"),
    ],
)
def test_impossible_schedules_are_refused(name: str, v: int, contiguous: int | None, message: str) -> None:
    """Catches a schedule that runs as another one than requested."""
    with pytest.raises(ConfigError, match=message):
        build_schedule(name, 4, v, 8, contiguous=contiguous)


def test_every_schedule_is_proven() -> None:
    """Catches a new schedule that no test above builds."""
    assert {name for name, _ in KINDS} == set(ScheduleName)


def test_the_order_that_waits_least_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search that uses its first order although it has time to compare, and one that compares for minutes
    where a step is large."""

    def waits(p: int, m: int) -> float:
        return schedules._mean_bubble(schedules.zero_bubble_v(p, m), m)

    sizes = [(3, 4), (4, 5), (4, 6)]
    compared = [waits(*size) for size in sizes]
    monkeypatch.setattr(schedules, "_MOST_COMPARED", 0)
    first = [waits(*size) for size in sizes]
    assert all(best < one for best, one in zip(compared, first, strict=True))
    monkeypatch.setattr(schedules, "_MOST_COMPARED", 24)
    assert [waits(*size) for size in sizes] == compared
    monkeypatch.setattr(schedules, "_MOST_COMPARED", 23)
    assert [waits(*size) for size in sizes] == [*compared[:2], first[2]]
