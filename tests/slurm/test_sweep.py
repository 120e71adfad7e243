"""Tests a sweep whose points are jobs of a real SLURM."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from megads.runtime.lease import current_holder
from megads.tools.sweep.launchers import SlurmLauncher
from megads.tools.sweep.points import Point, read_points
from tests.command import Command, StartCommand, events_of, small_model, steps_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import TRAIN
from tests.tools.sweep.test_local_sweep import saved_point

STEPS = 60
RATES = "1e-3,3e-3,1e30,-1,1e-2,3e-2"


def sweep_command(
    jobs: Jobs, megads: StartCommand, corpus: Path, *overrides: str, rates: str = RATES, tools: Path | None = None
) -> Command:
    """Starts a sweep over learning rates; `tools` is a folder that is prepended to the PATH."""
    model = small_model(
        corpus, train__steps=STEPS, train__max_nonfinite_steps=1, checkpoint__every_steps=10,
        logging__wandb__mode="disabled",
    )  # fmt: skip
    variables = jobs.environment()
    if tools is not None:
        variables["PATH"] = f"{tools}:{os.environ['PATH']}"
    options = "sweep.sbatch_options=--nodes=1 --gpus-per-node=0 --time=60"
    return megads(
        "train", "-m", *model, f"optim.lr={rates}", "sweep.name=mine", "sweep.launcher=slurm",
        f"sweep.sbatch={TRAIN}", options, "sweep.poll_s=0.5", *overrides, variables=variables,
    )  # fmt: skip


def test_a_sweep_with_every_kind_of_end(jobs: Jobs, megads: StartCommand, corpus: Path) -> None:
    """Catches jobs that a sweep's second command submits again or loses, a killed point that starts from scratch, an
    infeasible point that is submitted, and a summary that contradicts the points."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    first = sweep_command(jobs, megads, corpus, "sweep.parallel=3")
    first.wait_for(lambda: saved_point(folder, 0) is not None)
    killed = megads.folder / read_points(folder)[0].run_dir
    holder = current_holder(killed)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    # Until then SLURM is still cleaning up, and the second sweep would see the point end itself.
    first.wait_for(lambda: read_points(folder)[0].state == "killed")
    first.wait_for(lambda: saved_point(folder, 1) is not None)
    # Like a login node that goes down: the jobs continue without the command that submitted them.
    first.kill_everything()
    before = read_points(folder)

    again = sweep_command(jobs, megads, corpus, "sweep.parallel=3").end(400)
    assert again.code == 7, again
    points = read_points(folder)
    jobs.submitted += [point.job for point in [*before, *points] if point.job]
    assert [str(point.state) for point in points] == [
        "finished", "finished", "failed", "infeasible", "finished", "finished",
    ]  # fmt: skip
    assert points[3].job == "" and points[0].job != before[0].job, "a new job goes on with the killed run"
    assert all(new.job == old.job for new, old in zip(points[1:], before[1:], strict=True) if old.job)
    assert points[2].exit_code == 7
    assert all([line["step"] for line in steps_of(Path(megads.folder / p.run_dir))] == list(range(1, STEPS + 1))
               for p in points if p.state == "finished")  # fmt: skip
    assert len(events_of(killed, "start")) == 2 and events_of(killed, "start")[1]["step"] > 0
    assert "1 infeasible, 4 finished, 1 failed" in again.out
    results = json.loads((folder / "results.json").read_text())
    objectives = {point.number: point.objective for point in points if point.state == "finished"}
    assert results["ranking"][0]["point"] == min(objectives, key=lambda number: objectives[number] or 0)


def test_the_users_squeue_defaults_end_no_job(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a waiting or running job taken for a finished one because SQUEUE_STATES or SQUEUE_PARTITION hides it."""
    for name, value in jobs.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SQUEUE_STATES", "CANCELLED")
    monkeypatch.setenv("SQUEUE_NAMES", "another")
    script = tmp_path / "point.sh"
    script.write_text("#!/bin/sh\nsleep 60\n")
    launcher = SlurmLauncher(tmp_path, script, ["--nodes=1", "--time=5"], None, None)
    held = SlurmLauncher(tmp_path, script, ["--hold"], None, None)
    points = [Point(number, {}, [], f"point-{number}", str(tmp_path / str(number))) for number in range(2)]
    launcher.start(points[0])
    held.start(points[1])
    jobs.submitted += [point.job for point in points]
    jobs.wait_for(points[0].job, "RUNNING")
    assert launcher.ended() == [] and held.ended() == []
    assert launcher.reattach(points[0]) and launcher.ended() == []


def test_a_sweep_killed_while_it_submits_finds_the_job(jobs: Jobs, megads: StartCommand, corpus: Path) -> None:
    """Catches a job that was submitted just before the sweep was killed and that the next sweep does not know: the
    point would be submitted twice, and one of the two jobs would fail because the other holds the run."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    tools = megads.folder / "tools"
    tools.mkdir()
    submit = tools / "sbatch"
    submit.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@"\nkill -KILL $PPID\n')
    submit.chmod(0o755)
    first = sweep_command(jobs, megads, corpus, "sweep.parallel=1", rates="1e-3,3e-3", tools=tools)
    assert first.end().code == -signal.SIGKILL
    (before,) = [point for point in read_points(folder) if point.state == "running"]
    assert before.job == ""

    again = sweep_command(jobs, megads, corpus, "sweep.parallel=1", rates="1e-3,3e-3").end(400)
    points = read_points(folder)
    jobs.submitted += [point.job for point in points]
    assert again.code == 0, again
    assert [len(events_of(megads.folder / point.run_dir, "start")) for point in points] == [1, 1]


def test_ctrl_c_stops_and_cancels_jobs(jobs: Jobs, megads: StartCommand, corpus: Path) -> None:
    """Catches jobs that a stopped sweep leaves in the queue, and one that trains and is cancelled without saving."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    sweep = sweep_command(jobs, megads, corpus, "train.steps=5000", "sweep.parallel=1")
    sweep.wait_for(lambda: saved_point(folder, 0) is not None)
    sweep.process.send_signal(signal.SIGINT)
    ended = sweep.end()
    assert ended.code == 5, ended
    point = read_points(folder)[0]
    jobs.submitted.append(point.job)
    assert (point.state, point.exit_code) == ("stopped", 5)
    assert events_of(megads.folder / point.run_dir, "end")[-1]["stopped"] == "interrupted"
    assert jobs.cluster.command("squeue", "--noheader", "--format=%i") == ""
