"""Sweeps on this machine as a user runs them: real commands, real training runs, real kills."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from megads.runtime.lease import current_holder
from megads.tools.sweep.points import Point, PointState, read_points
from tests.command import Command, StartCommand, events_of, small_model, steps_of

STEPS = 60


def sweep_command(megads: StartCommand, corpus: Path, *overrides: str, **changes: Any) -> Command:
    settings = {"train__steps": STEPS, "train__max_nonfinite_steps": 1, "checkpoint__every_steps": 20} | changes
    return megads("train", "-m", *small_model(corpus, **settings), "sweep.name=mine", "sweep.poll_s=0.05", *overrides)


def kill_run(run_dir: Path) -> None:
    """Sends SIGKILL to the launcher of a run, as the kernel's out-of-memory killer would; its ranks die with it."""
    holder = current_holder(run_dir)
    assert holder is not None
    launcher = psutil.Process(holder.pid)
    ranks = launcher.children(recursive=True)
    launcher.send_signal(signal.SIGKILL)
    psutil.wait_procs(ranks, timeout=30)


def states(folder: Path) -> dict[str, PointState]:
    return {point.assignment["optim.lr"]: point.state for point in read_points(folder)}


def saved_point(folder: Path, number: int) -> Point | None:
    """Returns the point, once it has saved a checkpoint."""
    points = read_points(folder)
    if len(points) <= number or not points[number].run_dir:
        return None
    saved = list((folder.parents[2] / points[number].run_dir / "checkpoints").glob("step_*/manifest.json"))
    return points[number] if saved else None


@pytest.mark.slow
@pytest.mark.distributed
def test_a_sweep_with_every_kind_of_end(corpus: Path, megads: StartCommand) -> None:
    """Catches a failure that ends the sweep, an infeasible point that counts as a failure, a finished point trained
    twice, a killed point that starts from scratch, a failed one that is not retried when asked, and a wrong summary."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    values = "optim.lr=1e-3,3e-3,1e30,-1,1e-2,3e-2"
    first = sweep_command(megads, corpus, values, "sweep.parallel=2")
    first.wait_for(lambda: saved_point(folder, 0) is not None)
    killed = megads.folder / read_points(folder)[0].run_dir
    kill_run(killed)
    ended = first.end(600)
    assert ended.code == 10, ended
    expected = {
        "0.001": "killed", "0.003": "finished", "1e+30": "failed", "-1": "infeasible", "0.01": "finished",
        "0.03": "finished",
    }  # fmt: skip
    assert states(folder) == expected
    assert "point 3 is dropped, optim.lr=-1: optim.lr = -1" in ended.out
    dropped, started = ended.out.index("point 3 is dropped"), ended.out.index("point 0 starts")
    assert dropped < started, "dropped before anything starts"
    assert len(list((megads.folder / "runs").glob("tiny-*"))) == 5, "nothing is started for a dropped point"

    again = sweep_command(megads, corpus, values, "sweep.parallel=2", "sweep.retry_failed=true").end(600)
    assert again.code == 7, again
    assert states(folder) == expected | {"0.001": "finished"}
    assert "point 0 goes on" in again.out and "point 2 goes on" in again.out
    assert again.out.count(" goes on") == 2 and " starts," not in again.out
    assert [line["step"] for line in steps_of(killed)] == list(range(1, STEPS + 1))
    assert len(events_of(killed, "start")) == 2 and events_of(killed, "start")[1]["step"] > 0
    assert "4 finished, 1 failed" in again.out and "1 infeasible" in again.out

    results = json.loads((folder / "results.json").read_text())
    objective = {point["assignment"]["optim.lr"]: point["objective"] for point in results["points"]}
    best = min((lr for lr, state in states(folder).items() if state == "finished"), key=lambda lr: objective[lr])
    assert results["points"][results["ranking"][0]["point"]]["assignment"]["optim.lr"] == best
    assert [row["mean"] for row in results["ranking"]] == sorted(row["mean"] for row in results["ranking"])
    assert f"optim.lr={best}" in results["best_command"]
    report = (folder / "report.html").read_text()
    assert ">finished<" in report and "optim.lr" in report and len(list((folder / "report").glob("*.png"))) == 3

    winner = megads("train", "--config-dir", str(folder), "experiment=best", "train.steps=70", "run.dry_run=true").end()
    assert winner.code == 0 and "70 steps" in winner.out, winner


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_leaves_a_sweep_that_goes_on(corpus: Path, megads: StartCommand) -> None:
    """Catches a signal that kills a point without saving or starts the next one, and a sweep that starts over."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    first = sweep_command(megads, corpus, "optim.lr=1e-3,3e-3", train__steps=4000)
    first.wait_for(lambda: saved_point(folder, 0) is not None)
    first.process.send_signal(signal.SIGINT)
    ended = first.end(600)
    assert ended.code == 5, ended
    assert states(folder) == {"0.001": "stopped", "0.003": "waiting"}
    run_dir = megads.folder / read_points(folder)[0].run_dir
    trained = len(steps_of(run_dir))
    assert 20 <= trained < 4000
    assert "1 waiting, 1 stopped" in ended.out and "no point has finished" in ended.out

    # Stopped early by the sweep's own rule: no failure.
    limit = sweep_command(megads, corpus, "optim.lr=1e-3,3e-3", "sweep.point_limit_s=0.5", train__steps=4000).end(600)
    assert limit.code == 0, limit
    assert "point 0 goes on" in limit.out and "trained longer than sweep.point_limit_s = 0.5" in limit.out
    assert set(states(folder).values()) <= {"pruned"}
    assert len(steps_of(run_dir)) >= trained


@pytest.mark.slow
@pytest.mark.distributed
def test_bayes_with_pruning_and_repeated_seeds(corpus: Path, megads: StartCommand) -> None:
    """Catches learning curves that are not read while a run trains, pruned points that fail the sweep, seeds that
    repeat the same training, and a best point without its standard deviation."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    ended = sweep_command(
        megads, corpus, "hparams_search=bayes", "sweep.trials=6", "sweep.startup_trials=3", "sweep.parallel=2",
        "optim.lr=tag(log,interval(1e-6,1e-1))", "sweep.repeat_best=1", "sweep.repeats=1", "sweep.pruning.name=median",
        "sweep.pruning.startup_points=2", train__steps=120, evaluation__every_steps=10, checkpoint__every_steps=120,
    ).end(600)  # fmt: skip
    assert ended.code == 0, ended
    points = read_points(folder)
    own, again = points[:6], points[6:]
    assert {point.state for point in own} == {"finished", "pruned"}
    assert all(point.step < 120 and point.exit_code == 5 for point in own if point.state == "pruned")
    best = min((point for point in own if point.state == "finished"), key=lambda point: point.objective or 0)
    assert [point.repeats for point in again] == [best.number]
    assert again[0].objective != best.objective
    assert "mean of 2 seeds, standard deviation" in ended.out
