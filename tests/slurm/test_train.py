"""The life of a training on SLURM: real jobs on a real cluster of four nodes, signals and losses included.

Whatever happens, the ledger of the whole run equals that of one process group on one machine that nobody disturbs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megads.runtime.lease import current_holder
from tests.command import Ended, StartCommand, checkpoint_of, events_of, steps_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import Training, overrides


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> list[dict]:
    """The ledger of the run that nobody disturbs, on this machine alone; its steps are those of every test here."""
    run_dir = module_megads.folder / "reference"
    ended: Ended = module_megads("train", *overrides(corpus, run_dir)).end()
    assert ended.code == 0, ended.err
    return steps_of(run_dir)


@pytest.fixture
def training(jobs: Jobs, corpus: Path, tmp_path: Path) -> Callable[..., Training]:
    """Makes trainings of this test's own."""
    return lambda **changes: Training(jobs, corpus, tmp_path / "run", **changes)


def test_requeues_continue_the_run(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a signal that loses steps or kills the save, a second one that spoils it, a requeue that starts afresh,
    and a second job that writes into the same run."""
    run = training()
    job = run.submit()
    run.jobs.wait_until(lambda: current_holder(run.run_dir) is not None, "the launcher", job)
    second = run.submit()
    run.wait_for_step(job, 3)
    run.signal(job, "USR1")
    run.signal(job, "TERM")
    run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "1", "the requeue", job)
    saved = run.step
    assert checkpoint_of(run.run_dir, saved).exists()
    assert events_of(run.run_dir, "end")[-1]["stopped"] == "preempted"

    run.jobs.wait_for(second)
    assert run.exit_code(second) == 2
    assert f"is in use by SLURM job {job} (restart 0" in run.jobs.output(second)
    assert f"stop it (scancel {job})" in run.jobs.output(second)

    run.wait_for_step(job, saved + 3)
    run.jobs.cluster.command("scontrol", "requeue", job)
    run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "2", "the second requeue", job)
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    assert steps_of(run.run_dir) == reference
    launches = events_of(run.run_dir, "launch")
    assert [(event["slurm_job"], event["restarts"]) for event in launches] == [(job, 0), (job, 1), (job, 2)]
    assert len(launches[0]["nodes"]) == 2 and launches[0]["ranks_per_node"] == 1


def test_tensor_and_pipeline_parallel_over_two_nodes(
    reference: list[dict], training: Callable[..., Training], corpus: Path, module_megads: StartCommand
) -> None:
    """Catches ranks that are placed otherwise than on one machine, and logs that do not say where a rank was."""
    run = training(parallel__tp=2, train__steps=5)
    job = run.submit()
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    alone = module_megads.folder / "tp2pp2"
    assert module_megads("train", *overrides(corpus, alone, parallel__tp=2, train__steps=5)).end().code == 0
    assert steps_of(run.run_dir) == steps_of(alone)
    (launch,) = events_of(run.run_dir, "launch")
    logs = [(run.run_dir / "logs" / f"rank_{rank:05d}.log").read_text().splitlines()[0] for rank in range(4)]
    assert [log.rpartition("node ")[2] for log in logs] == [launch["nodes"][rank // 2] for rank in range(4)]


def test_a_killed_rank_ends_the_job(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a job that hangs, or burns its nodes, after one rank on another node than the launcher's is gone."""
    run = training()
    job = run.submit()
    run.wait_for_step(job, 3)
    log = (run.run_dir / "logs" / "rank_00001.log").read_text()
    os.kill(int(log.split("pid ")[1].split(",")[0]), signal.SIGKILL)
    assert run.jobs.wait_for(job, timeout_s=40) == "FAILED"
    node = events_of(run.run_dir, "launch")[0]["nodes"][1]
    assert run.exit_code(job) == 1
    assert f"rank 1 on {node} was killed by SIGKILL" in run.jobs.output(job)
    again = run.submit()
    assert run.jobs.wait_for(again) == "COMPLETED", run.jobs.output(again)
    assert steps_of(run.run_dir) == reference
