"""Reactions to faults: the budget of non-finite steps, and restart decisions from a history of attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.errors import NumericalError
from megads.resilience.hooks import NonFiniteHook
from megads.resilience.restarts import Attempt, GiveUp, Requeue, Restart, RestartMeans, first_attempt, next_attempt
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE


def step(number: int, skipped: bool) -> StepInfo:
    return StepInfo(
        step=number, samples=number, tokens=number, loss=1.0, grad_norm=1.0, lr=0.1, global_batch_size=1, seq_len=1,
        step_time_s=0.1, data_time_s=0.0, skipped=skipped, culprit="rank 1 in its forward" * skipped, batch_hash="",
    )  # fmt: skip


def hook(run_dir: Path, most: int) -> NonFiniteHook:
    made = NonFiniteHook(EventWriter(run_dir), most, lambda step: run_dir / str(step))
    made.on_start(TrainState())
    return made


def test_each_skipped_step_is_an_event(tmp_path: Path) -> None:
    """Catches a skipped step without an event, and an event without its root cause."""
    watch = hook(tmp_path, 5)
    for number, skipped in enumerate([False, True, False, True, True], start=1):
        watch.on_step(step(number, skipped))
    events = list(read_json_lines(tmp_path / EVENTS_FILE))
    assert [(e["event"], e["step"], e["culprit"]) for e in events] == [
        ("step_skipped", number, "rank 1 in its forward") for number in (2, 4, 5)
    ]


def test_one_more_than_the_cap_in_a_row_ends_the_run(tmp_path: Path) -> None:
    """Catches a cap that is off by one, and a message that does not say what to do."""
    watch = hook(tmp_path, 2)
    watch.on_step(step(1, True))
    watch.on_step(step(2, True))
    with pytest.raises(
        NumericalError, match=r"3 non-finite steps in a row, up to step 3 .*rank 1 .*optim\.lr.*checkpoint\.load=.*/0"
    ):
        watch.on_step(step(3, True))
    assert NumericalError.exit_code == 7
    assert len(list(read_json_lines(tmp_path / EVENTS_FILE))) == 3


def test_a_good_step_resets_the_count_of_skips(tmp_path: Path) -> None:
    """Catches skipped steps that accumulate over weeks until a healthy run ends."""
    watch = hook(tmp_path, 2)
    for number in range(1, 31):
        watch.on_step(step(number, skipped=number % 3 != 0))


def test_every_rank_counts_but_only_one_writes(tmp_path: Path) -> None:
    """Catches ranks that continue after rank 0 has stopped."""
    watch = NonFiniteHook(EventWriter(tmp_path, enabled=False), 0)
    with pytest.raises(NumericalError):
        watch.on_step(step(1, True))
    assert not (tmp_path / EVENTS_FILE).exists()


JOB = RestartMeans(nodes=("a", "b", "c", "d"), needed=2, max_restarts=3, queue=True)
LOST_B = Attempt(("a", "b"), 9, blamed=("b",), lost=True)


def killed(*nodes: str, on: str = "") -> Attempt:
    """An attempt in which a rank was killed, on one of the nodes of a job or on this machine."""
    return Attempt(nodes, 10, blamed=(on,) if on else ())


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 7, 130])
def test_finished_and_invalid_runs_are_not_restarted(code: int) -> None:
    """Catches an invalid configuration or a missing file that is retried, and a finished run that is restarted."""
    assert next_attempt([Attempt(("a", "b"), code, blamed=("b",))], JOB) == GiveUp(code)


@pytest.mark.parametrize("attempt", [LOST_B, killed("a", "b", on="b")])
def test_a_run_that_was_asked_to_stop_is_not_restarted(attempt: Attempt) -> None:
    """Catches a restart of a run that the user interrupted and whose ranks died because of it."""
    stopped = Attempt(attempt.nodes, attempt.exit_code, attempt.blamed, attempt.lost, stopping=True)
    assert next_attempt([stopped], JOB) == GiveUp(attempt.exit_code)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    """Catches ranks that move to other nodes needlessly: the other ranks' caches and logs stay where they are."""
    assert next_attempt([LOST_B], JOB) == Restart(("a", "c"), ("b",))
    lost_a = Attempt(("a", "c"), 9, blamed=("a",), lost=True)
    assert next_attempt([LOST_B, lost_a], JOB) == Restart(("d", "c"), ("b", "a"))


def test_a_rejected_node_is_left_out() -> None:
    """Catches a failed health check that is ignored, including one of a spare node."""
    attempt = Attempt(("a", "b"), 1, blamed=("a",), rejected={"b": "GEMM at 20%", "c": "no answer"})
    assert next_attempt([attempt], JOB) == Restart(("a", "d"), ("b", "c"))


def test_without_enough_nodes_the_job_is_requeued() -> None:
    """Catches a job that keeps nodes it cannot use, or that gets the faulty ones again."""
    none_spare = RestartMeans(("a", "b"), 2, max_restarts=0, queue=True)
    assert next_attempt([LOST_B], none_spare) == Requeue(("b",))
    history = [LOST_B, Attempt(("a", "c"), 9, ("c",), True), Attempt(("a", "d"), 9, ("a", "d"), True)]
    assert next_attempt(history, JOB) == Requeue(("b", "c", "a", "d"))
    no_queue = next_attempt([LOST_B], RestartMeans(("a", "b"), 2, max_restarts=5))
    assert isinstance(no_queue, GiveUp) and no_queue.exit_code == 9 and "1 healthy nodes are left" in no_queue.reason


def test_killed_ranks_restart_in_place_up_to_the_limit() -> None:
    """Catches endless restarts of a run that fails each time, and a first fault that ends a run of weeks."""
    here = RestartMeans(("host",), 1, max_restarts=2)
    assert next_attempt([killed("host")], here) == Restart(("host",))
    assert next_attempt([killed("host")] * 2, here) == Restart(("host",), wait_s=5.0)
    last = next_attempt([killed("host")] * 3, here)
    assert isinstance(last, GiveUp) and last.exit_code == 8 and "2 restarts" in last.reason
    assert next_attempt([killed("host")], RestartMeans(("host",), 1, max_restarts=0)) == GiveUp(10)


def saved(from_step: int, saved_step: int) -> Attempt:
    return Attempt(("host",), 10, from_step=from_step, saved_step=saved_step)


def test_progress_resets_the_count_of_restarts() -> None:
    """Catches a run that is given up although each restart made progress, and endless restarts without progress: for
    the first attempt's progress, or for a checkpoint that is saved again and again."""
    here = RestartMeans(("host",), 1, max_restarts=2)

    def goes_on(*history: Attempt) -> bool:
        decision = next_attempt(history, here)
        assert isinstance(decision, Restart) or (isinstance(decision, GiveUp) and decision.exit_code == 8)
        return isinstance(decision, Restart)

    assert goes_on(*(saved(10 * n, 10 * n + 10) for n in range(50)))
    assert goes_on(saved(0, 0), saved(0, 0), saved(0, 10), saved(10, 10))
    assert not goes_on(saved(0, 0), saved(0, 0), saved(0, 10), saved(10, 10), saved(10, 10))
    assert not goes_on(saved(0, 10), saved(10, 10), saved(10, 10))
    # The newest checkpoint is damaged at each start, so that an earlier one is loaded.
    assert not goes_on(saved(10, 20), saved(10, 20), saved(10, 20))
    assert not goes_on(saved(20, 20), saved(20, 10), saved(20, 20))


@pytest.mark.parametrize("code", [1, 9, 10])
def test_every_kind_of_fault_is_restarted(code: int) -> None:
    """Catches an error, a lost node or a killed rank that ends a run although restarts are left."""
    assert next_attempt([Attempt(("host",), code)], RestartMeans(("host",), 1, max_restarts=1)) == Restart(("host",))


def test_a_node_whose_rank_fails_twice_is_replaced() -> None:
    """Catches a node that kills every rank on it without ever being lost, and a spare used after a single failure."""
    once = killed("a", "b", on="b")
    assert next_attempt([once], JOB) == Restart(("a", "b"))
    assert next_attempt([once, once], JOB) == Restart(("a", "c"), ("b",))
    assert next_attempt([once, once], RestartMeans(("a", "b"), 2, max_restarts=9, queue=True)) == Restart(
        ("a", "b"), wait_s=5.0
    )
    assert next_attempt([once, killed("a", "b", on="a")], JOB) == Restart(("a", "b"), wait_s=5.0)


def test_a_fault_without_a_culprit_excludes_no_node() -> None:
    """Catches a healthy node excluded because all ranks aborted and one had to be named."""
    nobody = Attempt(("a", "b"), 1)
    assert next_attempt([nobody, nobody], JOB) == Restart(("a", "b"), wait_s=5.0)


HERE = RestartMeans(("host",), 1, max_restarts=20)


def test_restarts_in_a_row_wait_longer_and_longer() -> None:
    """Catches an outage of minutes, such as a file server's, that uses up all restarts within seconds, a first restart
    that waits, and waits that keep growing after the run made progress."""
    waits = [next_attempt([killed("host")] * count, HERE).wait_s for count in range(1, 10)]  # type: ignore[union-attr]
    assert waits == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert next_attempt([killed("host"), saved(0, 10)], HERE) == Restart(("host",))


def failed(message: str, last_step: int) -> Attempt:
    return Attempt(("host",), 1, last_step=last_step, failure=message)


def test_the_same_failure_at_the_same_step_ends_the_run() -> None:
    """Catches a bug that is retried until all restarts are used, and two different failures treated as the same."""
    given_up = next_attempt([failed("rank 1 failed, KeyError: 'x'", 7)] * 2, HERE)
    assert isinstance(given_up, GiveUp) and given_up.exit_code == 1
    assert "in the same way after the same step (7) as the start before: rank 1 failed, KeyError" in given_up.reason
    for other in (failed("rank 1 failed, KeyError: 'x'", 8), failed("rank 1 failed, OSError", 7), killed("host")):
        assert isinstance(next_attempt([failed("rank 1 failed, KeyError: 'x'", 7), other], HERE), Restart)
    assert isinstance(next_attempt([killed("host")] * 2, HERE), Restart), "a kill has no message of its own"


def test_a_node_that_fails_twice_is_replaced_before_the_run_is_given_up() -> None:
    """Catches a faulty GPU, whose message is the same each time, treated as a bug although there is a spare node."""
    once = Attempt(("a", "b"), 1, blamed=("b",), last_step=7, failure="rank 1 on b failed, AcceleratorError")
    assert next_attempt([once, once], JOB) == Restart(("a", "c"), ("b",))


def test_a_suspected_hang_gets_more_time_after_a_restart() -> None:
    """Catches a long phase that is treated as a hang at every start."""
    hung = Attempt(("host",), 9, hung=True)
    assert next_attempt([hung], HERE) == Restart(("host",), patience=4.0)
    assert next_attempt([hung, hung], HERE) == Restart(("host",), wait_s=5.0, patience=16.0)
    progress = Attempt(("host",), 9, hung=True, saved_step=10)
    assert next_attempt([hung, progress], HERE) == Restart(("host",), patience=4.0)


def test_the_first_attempt_is_on_healthy_nodes() -> None:
    """Catches ranks on a node that the check before the start rejected, and a start on too few nodes."""
    assert first_attempt(("a", "b"), ["a", "c"], JOB) == Restart(("d", "b"), ("a", "c"))
    assert first_attempt(("a", "b"), ["a", "c", "d"], JOB) == Requeue(("a", "c", "d"))
