"""Hang detection on a simulated clock: no false alarms over days, real hangs found in time, the right rank blamed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from megads.launch.hang_detection import UNKNOWN_S, HangDetector, HangSettings, PhaseLimits, furthest_behind, phase_kind
from megads.runtime.heartbeat import AGREEING, ENGINE_STEP, INTERVAL_S, LOADING_DATA, RankPosition

DEFAULTS = HangSettings(min_s=20.0, most_s=480.0)
DAY_S = 86_400.0
Phases = Iterator[tuple[int, str, float]]


def watch(
    phases: Phases, detector: HangDetector, until_s: float, ranks: int = 1
) -> tuple[float, tuple[RankPosition, ...]]:
    """Looks every half second at ranks in the same phases; returns the time and ranks of the first detected hang."""
    began_s, (step, phase, duration_s) = 0.0, next(phases)
    look, changes_s, last = 0, 0.0, (0, "")
    while (now := look * INTERVAL_S) < until_s:
        look += 1
        changed = False
        while began_s + duration_s <= now:
            began_s += duration_s
            step, phase, duration_s = next(phases)
            changed = True
        changes_s = 0.0 if changed or last == (0, "") else changes_s + INTERVAL_S
        last = (step, phase)
        found = detector.observe([RankPosition(rank, step, phase, changes_s) for rank in range(ranks)])
        if found:
            return now, found
    return until_s, ()


def steps(duration: Callable[[random.Random], float], seed: int = 0) -> Phases:
    """Phases of a run: startup, a first step that compiles, then steps with data, hooks, saves and validations."""
    noise = random.Random(seed)
    yield 0, "building the engine", 40.0
    step = 0
    while True:
        step += 1
        stall = 60.0 * noise.random() if noise.random() < 1e-4 else 0.0  # of a shared file system
        yield step, LOADING_DATA, 0.01 + stall
        yield step, ENGINE_STEP, 300.0 if step == 1 else duration(noise)
        yield step, AGREEING, 0.001
        yield step, "MetricsHook", 0.002 + (0.5 if step % 50 == 0 else 0.0)
        if step % 100 == 0:
            yield step, "saving", noise.lognormvariate(1.5, 0.8)
        if step % 500 == 0:
            for batch in range(20):
                yield step, f"validating, batch {batch + 1}/20", 0.3 * noise.lognormvariate(0, 0.5)
            yield step, "PluginHook", 100.0  # takes minutes, at some steps only
        else:
            yield step, "PluginHook", 0.0


def even(noise: random.Random) -> float:
    return noise.gauss(1.0, 0.05)


def rarely_ten_times(noise: random.Random) -> float:
    return noise.lognormvariate(0, 0.2) * (10.0 if noise.random() < 1e-3 else 1.0)


def heavy_tailed(noise: random.Random) -> float:
    return noise.lognormvariate(0, 0.5) + (noise.expovariate(0.5) if noise.random() < 0.02 else 0.0)


def fast(noise: random.Random) -> float:
    return 0.05 * noise.lognormvariate(0, 0.5)


def slow(noise: random.Random) -> float:
    return 12.0 * noise.lognormvariate(0, 0.2) * (10.0 if noise.random() < 2e-3 else 1.0)


@pytest.mark.parametrize(
    "duration",
    [heavy_tailed, *(pytest.param(one, marks=pytest.mark.slow) for one in (even, rarely_ten_times, fast, slow))],
)
def test_no_healthy_run_of_a_day_is_called_hung(duration: Callable[[random.Random], float]) -> None:
    """Catches a run killed because of a slow step, a garbage collection, a slow file system, a first step that
    compiles, or a hook that works at some steps only."""
    assert watch(steps(duration), HangDetector(DEFAULTS), DAY_S) == (DAY_S, ())


def then_hang(before: Phases, at_step: int, in_phase: str) -> Phases:
    for step, phase, duration_s in before:
        yield step, phase, 10 * DAY_S if (step, phase) == (at_step, in_phase) else duration_s


@pytest.mark.parametrize(
    "duration, at_step, within_s",
    [(even, 30, 25.0), (fast, 200, 25.0), (rarely_ten_times, 5000, 80.0), (slow, 400, 490.0), (even, 12, 30.0)],
)
def test_a_hang_is_found_in_time(duration: Callable[[random.Random], float], at_step: int, within_s: float) -> None:
    """Catches a limit that a few slow steps, or the first step, raise so far that hangs are missed."""
    hung_at = next_start = 0.0
    for _step, _phase, duration_s in then_hang(steps(duration), at_step, ENGINE_STEP):
        if duration_s > DAY_S:
            hung_at = next_start
            break
        next_start += duration_s
    phases = then_hang(steps(duration), at_step, ENGINE_STEP)
    seen_at, found = watch(phases, HangDetector(DEFAULTS), 10 * DAY_S, ranks=2)
    assert [(at.rank, at.step, at.phase) for at in found] == [(0, at_step, ENGINE_STEP), (1, at_step, ENGINE_STEP)]
    assert DEFAULTS.min_s <= seen_at - hung_at <= within_s


def test_a_phase_without_history_has_no_limit() -> None:
    """Catches a first save, or a phase seen once or twice, taken for a hang because steps are short."""
    limits = PhaseLimits(DEFAULTS)
    assert limits.limit_s("saving") == UNKNOWN_S
    for duration_s in (10.0, 11.0):
        limits.learn("saving", duration_s)
        assert limits.limit_s("saving") == UNKNOWN_S
    limits.learn("saving", 12.0)
    assert limits.limit_s("saving") == pytest.approx(15 * 11.0 * 2)
    for _ in range(300):
        limits.learn("saving", 11.0)
    assert limits.limit_s("saving") == pytest.approx(165.0, rel=0.02)
    limits.learn("saving", 400.0)
    assert limits.limit_s("saving") == pytest.approx(1600.0, rel=0.02), "what was survived once is no hang later"
    for _ in range(3):
        limits.learn(ENGINE_STEP, 100.0)
    assert limits.limit_s(ENGINE_STEP) == 480.0, "its collectives would fail before"


def test_a_hang_in_a_phase_too_short_to_observe_is_detected() -> None:
    """Catches a missed hang in a hook that was always too short to be observed before."""
    limits = PhaseLimits(DEFAULTS)
    assert limits.limit_s("MetricsHook") == limits.limit_s(LOADING_DATA) == UNKNOWN_S, "the run may only be opening"
    for _ in range(3):
        limits.learn(ENGINE_STEP, 0.5)
    assert (limits.limit_s("MetricsHook"), limits.limit_s(LOADING_DATA)) == (200.0, 100.0)
    assert limits.limit_s("saving") == limits.limit_s("validating, batch #/#") == UNKNOWN_S


def test_a_slow_hook_gets_more_time_after_a_restart() -> None:
    """Catches endless restarts at the same slow hook."""
    limits = PhaseLimits(HangSettings(20.0, 480.0, patience=4.0))
    for _ in range(1000):
        limits.learn("PluginHook", 0.25)
    assert limits.limit_s("PluginHook") == 800.0


WAITING = RankPosition(0, 6, ENGINE_STEP, 30.0)


@pytest.mark.parametrize(
    "culprit",
    [
        RankPosition(1, 5, "SleepyHook", 30.5),
        RankPosition(1, 6, LOADING_DATA, 30.0),
        RankPosition(1, 5, "saving", 29.5),
    ],
    ids=["a-step-behind", "an-earlier-phase", "in-a-save"],
)
def test_the_rank_that_others_wait_for_is_blamed(culprit: RankPosition) -> None:
    """Catches blame on a waiting rank, which may be in its collective as long as the culprit is in its phase."""
    assert furthest_behind([WAITING, culprit, RankPosition(2, 6, ENGINE_STEP, 31.0)]) == [culprit]


def test_a_rank_stuck_in_the_earliest_hook_is_blamed() -> None:
    """Catches blame on a rank that waits in a hook's collective for one that is stuck in an earlier hook."""
    stuck = RankPosition(1, 5, "FirstHook", 30.0)
    assert furthest_behind([RankPosition(0, 5, "SecondHook", 20.0), stuck]) == [stuck]
    assert furthest_behind([]) == []


def test_ranks_that_wait_for_a_save_are_not_hung() -> None:
    """Catches ranks killed because they wait in a collective for a rank whose save is within its limit."""
    detector = HangDetector(HangSettings(2.0))
    for number in range(40):
        for rank_phase in (LOADING_DATA, ENGINE_STEP):
            detector.observe([RankPosition(rank, number + 1, rank_phase, 0.0) for rank in (0, 1)])
    for look in range(200):
        positions = [RankPosition(0, 41, ENGINE_STEP, look * 0.5), RankPosition(1, 40, "saving", look * 0.5)]
        assert detector.observe(positions) == ()


def test_a_debugged_rank_is_left_alone() -> None:
    """Catches a rank that is killed while a debugger has stopped it."""
    detector = HangDetector(HangSettings(2.0))
    for number in range(40):
        for phase in (LOADING_DATA, ENGINE_STEP):
            detector.observe([RankPosition(rank, number + 1, phase, 0.0) for rank in (0, 1)])
    stopped = RankPosition(1, 40, ENGINE_STEP, 60.0, silent_s=60.0, state="T")
    assert detector.observe([RankPosition(0, 40, ENGINE_STEP, 60.0), stopped]) != ()
    debugged = RankPosition(1, 40, ENGINE_STEP, 60.0, silent_s=60.0, state="t")
    assert detector.observe([RankPosition(0, 40, ENGINE_STEP, 60.0), debugged]) == ()


def test_time_without_heartbeats_is_not_learned_from() -> None:
    """Catches a rank stopped for ten minutes, after which ten-minute hangs count as normal."""
    detector = HangDetector(HangSettings(2.0))
    for number in range(40):
        detector.observe([RankPosition(0, number + 1, phase, 0.0) for phase in (LOADING_DATA,)])
        detector.observe([RankPosition(0, number + 1, ENGINE_STEP, 0.0)])
    before = detector.limits.limit_s(ENGINE_STEP)
    detector.observe([RankPosition(0, 40, ENGINE_STEP, 600.0, silent_s=600.0, state="T")])
    detector.observe([RankPosition(0, 41, LOADING_DATA, 0.0)])
    assert detector.limits.limit_s(ENGINE_STEP) == pytest.approx(before)


def test_validation_batches_count_as_one_kind_of_phase() -> None:
    """Catches validation batches that each count as a separate kind of phase, without known durations."""
    assert phase_kind("validating, batch 3/20") == phase_kind("validating, batch 12/20")
    assert phase_kind("validating, hellaswag, 1,024 of 10,042") == phase_kind("validating, hellaswag, 8 of 10,042")
    assert phase_kind("validating, batch 3") != phase_kind("validating, tasks")


def test_a_hang_before_the_first_step_is_found_by_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank that hangs while it opens the data, for which the others wait until their collectives time out,
    and a slow start of all ranks taken for a hang."""
    detector, found = HangDetector(DEFAULTS), list[RankPosition]()
    for look in range(int(300 / INTERVAL_S)):
        now = look * INTERVAL_S
        phase, since = ("opening the data", 5.0) if now < 12 else ("building the engine", 12.0)
        others = [RankPosition(rank, 0, phase, max(0.0, now - since)) for rank in (0, 2, 3)]
        found = list(detector.observe([*others, RankPosition(1, 0, "opening the data", max(0.0, now - 5.0))]))
        if found:
            assert 200.0 <= now <= 210.0
            break
    assert [position.rank for position in found] == [1]

    detector = HangDetector(DEFAULTS)
    for look in range(int(2000 / INTERVAL_S)):
        slow = [RankPosition(rank, 0, "building the engine", look * INTERVAL_S) for rank in range(4)]
        assert not detector.observe(slow)


def test_the_first_save_of_a_restart_is_judged_by_earlier_ones() -> None:
    """Catches a save that hangs for an hour because it is the first after a restart."""
    limits = PhaseLimits(HangSettings(min_s=20.0, saves_s=(2.0,)))
    assert limits.limit_s("saving") <= 200.0
    assert PhaseLimits(HangSettings(min_s=20.0, saves_s=(60.0,))).limit_s("saving") > 900.0
    assert PhaseLimits(DEFAULTS).limit_s("saving") == UNKNOWN_S
