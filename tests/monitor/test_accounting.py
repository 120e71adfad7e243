"""Time accounting of a run: from written records, and of a real run that is killed."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from megads.monitor.accounting import (
    Accounting,
    Activity,
    EffectiveTime,
    RecordedFault,
    StepTime,
    account,
    read_accounting,
)
from megads.runtime.metrics import MetricsWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from tests.command import StartCommand, events_of, small_model
from tests.test_restart import kill_rank


def event(at: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": at, "event": name, **fields}


def spent(events: list[dict[str, Any]], steps: list[StepTime]) -> dict[str, float]:
    """Nonzero seconds by activity; asserts that their sum is the wall time."""
    found = account(events, steps)
    assert found is not None
    assert sum(found.spent_us.values()) == found.wall_us
    return {str(activity): us / 1e6 for activity, us in found.spent_us.items() if us}


def first_start(ckpt_s: float = 0.5) -> list[dict[str, Any]]:
    """Command at 98, launch at 100, first step from 104 to 105, checkpoint of step 2 at 106.5."""
    return [
        event(100, "launch", command_start=98.0),
        event(103.5, "start", step=0),
        event(105, "first_step", step=1, step_time_s=1.0, seconds={"imports": 2.0}),
        event(106 + ckpt_s, "checkpoint_saved", step=2, save_s=ckpt_s),
    ]


STEPS = [StepTime(105, 1.0, step=1), StepTime(106, 1.0, step=2), StepTime(108, 1.0, 0.4, 0.5, 3)]


def test_all_time_of_a_run_that_ends_is_counted() -> None:
    """Catches time between steps, or before the launch, that is not counted."""
    end = [
        event(109, "after_last_step", validate_time_s=0.25, save_time_s=0.25),
        event(109, "end", step=3),
        event(110, "exit", exit_code=0),
    ]
    assert spent(first_start() + end, STEPS) == pytest.approx(
        {"start": 6 + 1.5, "train": 3.1, "validate": 0.65, "save": 0.75}
    )


def test_lost_steps_of_a_restart_count_as_lost() -> None:
    """Catches lost steps counted as training, a save counted as lost work, and a fault that costs no time."""
    events = [
        *first_start(),
        event(112, "failure", first_sign=111.0, exit_code=10),
        event(112, "exit", exit_code=10),
        event(112.2, "restart", restart=1),
        event(112.5, "launch", command_start=98.0),
        event(115, "steps_dropped", step=2, last_step=5, last_time=110.5, validate_s=0.4, save_s=0.5),
        event(118, "first_step", step=3, step_time_s=1.5, seconds={"loading a checkpoint": 1.0}),
        event(120, "end", step=4),
        event(120, "exit", exit_code=0),
    ]
    steps = [*STEPS[:2], StepTime(118, 1.5, step=3), StepTime(119.5, 1.5, step=4)]
    assert spent(events, steps) == pytest.approx(
        {"start": 6.5, "train": 5.0, "validate": 0.4, "save": 0.5, "lost work": 4.1, "detect": 1.0, "recover": 4.5}
    )
    found = account(events, steps)
    assert found is not None and found.faults == (RecordedFault(111.0, 112.0, 118.0),)
    assert (found.mean_time_to_detect_s, found.mean_time_to_recover_s) == (1.0, 6.0)
    assert found.effective_time == pytest.approx(5 / 22)


def test_a_fault_is_dated_by_the_last_lost_heartbeat() -> None:
    """Catches a heartbeat that came back but counts as the first sign of a fault hours later, and a lost heartbeat that
    does not count."""
    events = [
        *first_start(),
        event(106, "heartbeat_lost", rank=1),
        event(107, "heartbeat_back", rank=1),
        event(109, "heartbeat_lost", rank=0),
        event(120, "failure", exit_code=9),
        event(120, "exit", exit_code=9),
    ]
    found = account(events, STEPS)
    assert found is not None and found.faults == (RecordedFault(109.0, 120.0, None),)
    assert (found.mean_time_to_detect_s, found.mean_time_to_recover_s) == (11.0, None)
    assert spent(events, STEPS)["detect"] == 11.0


def test_hours_between_starts_count_as_stopped() -> None:
    """Catches hours between starts that count as training or recovery, also if the next start dies between recording
    the dropped steps and dropping them."""
    drop = {"step": 2, "last_step": 3, "last_time": 108.0, "validate_s": 0.4, "save_s": 0.5}
    events = [
        *first_start(),
        event(109, "heartbeat_lost", rank=1),
        event(1000, "launch", command_start=999.0),
        event(1004, "steps_dropped", **drop),
        event(2000, "launch", command_start=1998.0),
        event(2004, "steps_dropped", **drop),
        event(2006, "first_step", step=3, step_time_s=1.0, seconds={}),
    ]
    found = spent(events, [*STEPS[:2], StepTime(2006, 1.0, step=3)])
    assert found == pytest.approx(
        {"start": 6, "train": 3, "validate": 0.4, "save": 0.5, "lost work": 2.1, "stopped": 890 + 998, "recover": 8}
    )


def test_steps_dropped_by_a_later_start_count_as_lost() -> None:
    """Catches steps of a successful start that count as training although a later start dropped them."""
    events = [
        *first_start(),
        event(109, "end", step=3),
        event(110, "exit", exit_code=5),
        event(200, "launch", command_start=199.0),
        event(203, "steps_dropped", step=1, last_step=3, last_time=108.0, validate_s=0.0, save_s=0.0),
        event(206, "first_step", step=2, step_time_s=1.0, seconds={"verifying a checkpoint": 2.0}),
    ]
    found = spent(events, [STEPS[0], StepTime(206, 1.0, step=2)])
    assert found == pytest.approx({"start": 6 + 2 + 4, "load": 2, "train": 2, "lost work": 3, "stopped": 89})


def test_queue_time_and_steps_lost_to_a_second_signal_are_counted() -> None:
    """Catches queue time counted as stopped, and lost steps after a second signal counted as training."""
    job = {"slurm_job": "7"}
    events = [
        event(100, "launch", **job),
        event(105, "first_step", step_time_s=1.0),
        event(106, "end", step=1),
        event(106, "exit", exit_code=6),
        event(306, "launch", **job),
        event(311, "first_step", step_time_s=1.0),
        event(313, "killed", exit_code=130),
    ]
    found = spent(events, [StepTime(105, 1.0, step=1), StepTime(311, 1.0, step=2)])
    assert found == {"start": 9.0, "queue": 200.0, "train": 2.0, "lost work": 2.0}


def test_a_gap_after_a_step_back_is_not_training() -> None:
    """Catches a gap between two kept steps of one start that counts as training, after a step back."""
    events = [
        *first_start(),
        event(121, "steps_dropped", step=2, last_step=9, last_time=120.0, validate_s=0.0, save_s=0.5),
        event(125, "end", step=3),
    ]
    found = spent(events, [*STEPS[:2], StepTime(124, 1.0, step=3)])
    assert found == pytest.approx({"start": 7, "train": 3, "save": 0.5, "lost work": 13.5, "recover": 3})


def test_a_run_without_times_is_not_accounted_for() -> None:
    """Catches a run of an earlier version that is accounted for although its records have no times."""
    assert account([], STEPS) is None
    assert account(first_start(), [StepTime(math.nan, 1.0)]) is None
    assert spent([event(100, "launch")], []) == {}
    assert Accounting((), ()).effective_time == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_every_microsecond_counts_once(seed: int) -> None:
    """Catches a sum that differs from the wall time, with wrong clocks and incomplete records."""
    chance = random.Random(seed)
    names = [
        "launch", "start", "first_step", "checkpoint_saved", "failure", "exit", "killed", "end", "steps_dropped",
        "restart", "requeue", "heartbeat_lost", "after_last_step",
    ]  # fmt: skip

    def moment() -> Any:
        return chance.choice([None, "x", math.nan, *(chance.uniform(0, 1000) for _ in range(9))])

    keys = ("last_time", "first_sign", "command_start", "step_time_s", "save_s", "validate_s", "exit_code", "seconds")
    events = [event(moment(), chance.choice(names), step=chance.randint(0, 9), **{key: moment() for key in keys})
              for _ in range(60)]  # fmt: skip
    steps = [StepTime(chance.uniform(0, 1000), chance.uniform(0, 50), chance.uniform(-5, 5), 1.0, n) for n in range(20)]
    found = account(events, steps)
    if found is not None:
        assert sum(found.spent_us.values()) == found.wall_us
        ends = [period.end_us for period in found.periods]
        assert ends[:-1] == [period.begin_us for period in found.periods[1:]]
        assert all(period.begin_us < period.end_us for period in found.periods)


def test_the_effective_time_ratio_continues_after_a_resume(tmp_path: Path) -> None:
    """Catches an effective-time ratio that is reset at each start, or that excludes the time between starts."""
    (tmp_path / "events.jsonl").write_text('{"time": 100.0, "event": "launch", "command_start": 98.0}\n')
    first = EffectiveTime(tmp_path)
    shares = [first.after(step) for step in STEPS]
    assert shares == pytest.approx([1 / 7, 2 / 8, 3.1 / 10])
    metrics = MetricsWriter(tmp_path, enabled=True)
    metrics.write({"step": 3, "loss": 1.0, "time": 108.0, "effective_time": shares[-1]})
    assert EffectiveTime(tmp_path).after(StepTime(208, 5.0)) == pytest.approx(8.1 / 110)


@pytest.mark.slow
@pytest.mark.distributed
def test_every_moment_of_a_run_killed_twice_belongs_to_an_activity(corpus: Path, megads: StartCommand) -> None:
    """Catches time of a real run that belongs to no activity: a rank is killed, then everything."""
    run_dir = megads.folder / "run"
    overrides = [
        *small_model(corpus, parallel__dp=2, train__steps=36, checkpoint__every_steps=4, evaluation__every_steps=9),
        f"run.dir={run_dir}", "cluster.max_restarts=1",
    ]  # fmt: skip
    command = megads("train", *overrides)
    kill_rank(command, run_dir, rank=1, step=7, start=1)
    command.wait_for(lambda: len(events_of(run_dir, "first_step")) == 2)
    command.kill_everything()
    ended = megads("train", *overrides).end()
    assert ended.code == 0, ended.err

    found = read_accounting(run_dir)
    assert found is not None
    launches = events_of(run_dir, "launch")
    begin, end = launches[0]["command_start"], events_of(run_dir, "exit")[-1]["time"]
    assert found.wall_us == round(end * 1e6) - round(begin * 1e6) == sum(found.spent_us.values())
    spent = {activity: us / 1e6 for activity, us in found.spent_us.items()}
    for activity in Activity:
        # The launcher sees these ranks end at once, so there is no earlier sign of a fault.
        if activity is not Activity.detect:
            assert (spent[activity] > 0) == (activity is not Activity.queue), (activity, spent)
    lines = [line for line in read_json_lines(run_dir / METRICS_FILE) if "loss" in line]
    assert spent[Activity.train] >= sum(line["step_time_s"] for line in lines) > 0.5 * spent[Activity.train]
    assert spent[Activity.save] >= 0.5 * sum(line["save_s"] for line in events_of(run_dir, "checkpoint_saved"))
    assert lines[-1]["effective_time"] == pytest.approx(spent[Activity.train] / (lines[-1]["time"] - begin), rel=0.1), (
        "what trackers are told while the run goes on"
    )
    [fault] = found.faults
    assert fault.recovered_s == pytest.approx(events_of(run_dir, "first_step")[1]["time"])
    for said in events_of(run_dir, "first_step"):
        assert sum(said["seconds"].values()) == pytest.approx(said["since_launch_s"], abs=0.2)
    assert "first step: done" in ended.out and "verifying a checkpoint" in str(said["seconds"])
