"""Tests nodes that fail during training: real jobs on a real SLURM cluster of four nodes.

In every case the step metrics of the whole run equal those of an undisturbed run of one process group on one machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megads.runtime.run_dir import agent_log_path
from tests.command import StartCommand, events_of, steps_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import Training, overrides

THREE_NODES = ("--nodes=3", "--no-kill")


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> list[dict]:
    """Returns the step metrics of an undisturbed run on this machine alone."""
    run_dir = module_megads.folder / "reference"
    assert module_megads("train", *overrides(corpus, run_dir)).end().code == 0
    return steps_of(run_dir)


@pytest.fixture
def training(jobs: Jobs, corpus: Path, tmp_path: Path) -> Callable[..., Training]:
    """Returns a function that creates trainings in this test's folder."""
    return lambda **changes: Training(jobs, corpus, tmp_path / "run", **changes)


@pytest.mark.fault(22)
def test_a_spare_takes_the_place_of_a_lost_node(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a lost node that ends the job or the run although there is a spare, and steps that are lost or differ."""
    run = training(cluster__spare_nodes=1, cluster__max_restarts=3)
    job = run.submit(options=THREE_NODES)
    run.wait_for_step(job, 12)
    first = events_of(run.run_dir, "launch")[0]["nodes"]
    cluster = run.jobs.cluster
    cluster.lose_node(first[1])
    try:
        assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
        assert run.jobs.field(job, "Restarts") == "0"
        spare = events_of(run.run_dir, "launch")[1]["nodes"]
        assert spare[0] == first[0] and spare[1] not in first
        (restart,) = events_of(run.run_dir, "restart")
        assert (restart["blamed"], restart["excluded"]) == ([first[1]], [first[1]])
        assert restart["from_step"] >= 10 and restart["lost_steps"] == restart["last_step"] - restart["from_step"]
        assert steps_of(run.run_dir) == reference
    finally:
        cluster.revive(first[1])


def test_without_spares_the_job_asks_for_other_nodes(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a requeue that may land on the faulty node again: its agent is killed, but SLURM finds the node idle."""
    run = training()
    job = run.submit(options=("--no-kill",))
    run.wait_for_step(job, 12)
    first = events_of(run.run_dir, "launch")[0]["nodes"]
    log = agent_log_path(run.run_dir, 1).read_text()
    os.kill(int(log.split("pid ")[1].split(",")[0]), signal.SIGKILL)
    run.jobs.wait_until(lambda: run.jobs.field(job, "ExcNodeList") == first[1], "the requeue", job)
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    assert run.jobs.field(job, "Restarts") == "1"
    assert first[1] not in events_of(run.run_dir, "launch")[1]["nodes"]
    assert steps_of(run.run_dir) == reference


def test_a_node_that_fails_the_health_check_is_not_used(
    reference: list[dict], training: Callable[..., Training]
) -> None:
    """Catches ranks started on a node that does not respond while SLURM still considers it up."""
    run = training(cluster__spare_nodes=1, cluster__max_restarts=3)
    cluster = run.jobs.cluster
    silent = cluster.nodes[1]
    cluster.kill_slurmd(silent)
    try:
        job = run.submit(options=(*THREE_NODES, f"--nodelist={','.join(cluster.nodes[:3])}"))
        assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
        (launch,) = events_of(run.run_dir, "launch")
        assert launch["nodes"] == [cluster.nodes[0], cluster.nodes[2]]
        (checked,) = events_of(run.run_dir, "nodes_checked")
        assert list(checked["rejected"]) == [silent]
        assert f"node {silent} is not fit to train" in run.jobs.output(job)
        assert steps_of(run.run_dir) == reference
    finally:
        cluster.revive(silent)


def test_the_batch_node_is_lost(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a job that continues without a launcher, with idle nodes until the time limit: with --no-kill SLURM
    itself does not end it. And an agent that waits for SLURM to act: once SLURM marks the node down, it kills the step,
    and the agent in it."""
    run = training()
    job = run.submit(options=("--no-kill",))
    run.wait_for_step(job, 12)
    cluster, lost = run.jobs.cluster, run.jobs.field(job, "BatchHost")
    cluster.lose_node(lost)
    try:
        # Time for the agent to notice; SLURM by itself takes longer.
        time.sleep(6.0)
        cluster.command("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
        run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "1", "the requeue", job)
        assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
        assert lost not in events_of(run.run_dir, "launch")[1]["nodes"]
        assert steps_of(run.run_dir) == reference
    finally:
        cluster.revive(lost)
