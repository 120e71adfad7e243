"""Starts on SLURM that fail before a rank trains, and ranks that srun itself starts: real jobs, short ones."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megads.runtime.lease import current_holder
from tests.command import events_of, steps_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import Training, overrides

ONE_TASK_PER_RANK = """#!/bin/bash
#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1 --time=10
exec srun megads train "$@"
"""


@pytest.fixture
def training(jobs: Jobs, corpus: Path, tmp_path: Path) -> Callable[..., Training]:
    """Returns a function that makes trainings in this test's folder."""
    return lambda **changes: Training(jobs, corpus, tmp_path / "run", **changes)


def test_the_tasks_of_an_srun_are_the_ranks(jobs: Jobs, corpus: Path, tmp_path: Path) -> None:
    """Catches one launcher per task of `srun megads train`, whose losers advise to cancel their own job."""
    run_dir = tmp_path / "run"
    job = jobs.submit(ONE_TASK_PER_RANK, *overrides(corpus, run_dir, train__steps=4))
    assert jobs.wait_for(job) == "COMPLETED", jobs.output(job)
    assert [line["step"] for line in steps_of(run_dir)] == [1, 2, 3, 4]
    launches = events_of(run_dir, "launch")
    assert len(launches) == 1 and len(launches[0]["nodes"]) == 2, launches
    refused = jobs.submit(ONE_TASK_PER_RANK, "cluster=slurm", *overrides(corpus, run_dir, train__steps=4))
    jobs.wait_for(refused)
    assert "srun has started 2 launchers" in jobs.output(refused) and "scancel" not in jobs.output(refused)


def test_a_failure_of_srun_blames_no_node(training: Callable[..., Training]) -> None:
    """Catches a mistyped option of srun, or a container that is not installed, after which healthy nodes are excluded
    and the job pends for ever."""
    run = training()
    job = run.submit("cluster.srun_options=[--no-such-option]", "cluster.max_restarts=3")
    run.jobs.wait_for(job)
    assert run.exit_code(job) == 2
    assert "unrecognized option '--no-such-option'" in run.jobs.output(job), run.jobs.output(job)
    absent = run.submit("cluster.wrapper=[no-such-container,exec]", "cluster.max_restarts=3")
    run.jobs.wait_for(absent)
    assert run.exit_code(absent) == 2
    assert "no-such-container" in run.jobs.output(absent)
    for name in (job, absent):
        assert run.jobs.field(name, "ExcNodeList") == "(null)" and run.jobs.field(name, "Restarts") == "0"


def test_an_unknown_key_is_refused_before_a_job_waits_with_it(training: Callable[..., Training]) -> None:
    """Catches a job that waits for days to be refused."""
    run = training()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run.submit_chain(3, "no.such.key=1")
    assert caught.value.returncode == 2 and "unknown key no.such.key" in str(caught.value.stderr)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.global_batch_size=7", "train.global_batch_size"),
        ("parallel.pp=1", "cannot be distributed evenly over the 2 nodes"),
    ],
)
def test_a_refused_start_cancels_its_chain(training: Callable[..., Training], change: str, named: str) -> None:
    """Catches a chain of 120 jobs each of which starts 48 nodes to be refused."""
    run = training()
    array = run.submit_chain(3, change)
    run.jobs.wait_until(lambda: not _waiting(run.jobs, array), "the end of the chain", array)
    out = (run.jobs.folder / "chain-0.out").read_text()
    assert named in out and f"the pending jobs of array {array} are cancelled" in out, out
    assert not (run.jobs.folder / "chain-1.out").exists()


def test_an_outage_of_the_controller_delays_a_requeue(training: Callable[..., Training]) -> None:
    """Catches a run that ends because SLURM's controller did not answer in the moment of its requeue."""
    run = training()
    job = run.submit()
    run.wait_for_step(job, 3)
    (controller,) = [
        process for process in psutil.process_iter(["name"])
        if process.info["name"] == "slurmctld" and str(run.jobs.cluster.folder) in " ".join(process.environ().values())
    ]  # fmt: skip
    holder = current_holder(run.run_dir)
    assert holder is not None
    controller.suspend()
    try:
        os.kill(holder.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while not events_of(run.run_dir, "exit") and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(25)  # the first request fails after 20 s
    finally:
        controller.resume()
    run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "1", "the requeue", job)
    assert "not requeued" not in run.jobs.output(job)


def _waiting(jobs: Jobs, array: str) -> str:
    return jobs.cluster.command(*shlex.split(f"squeue --noheader --jobs={array} --format=%i"))
