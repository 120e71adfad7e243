"""Training on SLURM: real jobs on a real cluster of four nodes, with signals and lost nodes.

In every case the ledger of the whole run equals that of an uninterrupted run on one machine.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megads.runtime.lease import Holder, current_holder
from megads.runtime.metrics import read_json_lines
from tests.command import Ended, StartCommand, checkpoint_of, events_of, steps_of
from tests.slurm.jobs import Jobs
from tests.slurm.training import TRAIN, Training, overrides


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> list[dict]:
    """Ledger of an uninterrupted run on this machine, with which the tests here compare."""
    run_dir = module_megads.folder / "reference"
    ended: Ended = module_megads("train", *overrides(corpus, run_dir)).end()
    assert ended.code == 0, ended.err
    return steps_of(run_dir)


@pytest.fixture
def training(jobs: Jobs, corpus: Path, tmp_path: Path) -> Callable[..., Training]:
    """Returns a function that makes trainings in this test's folder."""
    return lambda **changes: Training(jobs, corpus, tmp_path / "run", **changes)


def test_requeues_continue_the_run(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a signal that loses steps or kills the save, a second signal that spoils the save, a requeue that starts
    from scratch, and a second job that writes into the same run."""
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
    """Catches a rank placement that differs from that on one machine, and logs that do not name a rank's node."""
    run = training(parallel__tp=2, train__steps=5)
    job = run.submit()
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    alone = module_megads.folder / "tp2pp2"
    assert module_megads("train", *overrides(corpus, alone, parallel__tp=2, train__steps=5)).end().code == 0
    assert steps_of(run.run_dir) == steps_of(alone)
    again = run.submit()
    assert run.jobs.wait_for(again) == "COMPLETED" and "finished at step" in run.jobs.output(again)
    (launch,) = events_of(run.run_dir, "launch")
    logs = [(run.run_dir / "logs" / f"rank_{rank:05d}.log").read_text().splitlines()[0] for rank in range(4)]
    assert [log.rpartition("node ")[2] for log in logs] == [launch["nodes"][rank // 2] for rank in range(4)]


@pytest.mark.parametrize(
    ("options", "gpus", "cpus"),
    [
        (("--ntasks-per-node=4", "--gpus-per-task=1", "--cpus-per-task=2"), 4, 8),
        (("--ntasks-per-node=2", "--gpus=16"), 8, 8),
        (("--ntasks-per-node=2", "--cpus-per-task=2"), 8, 8),
    ],
    ids=("of_tasks", "in_all", "of_a_whole_node"),
)
def test_an_agent_gets_all_that_the_job_has_on_its_node(
    options: tuple[str, ...], gpus: int, cpus: int, jobs: Jobs, corpus: Path, tmp_path: Path
) -> None:
    """Catches an agent's step that takes over the job's options of tasks: its one task per node saw one task's GPUs and
    CPUs, of 16 GPUs in all one of two nodes saw a single one, and of a whole node it got two tasks' CPUs."""
    seen = tmp_path / "seen"
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "${{SLURM_GPUS_ON_NODE:-0}} $SLURM_CPUS_ON_NODE" >>{seen}\nexec "$@"\n')
    wrapper.chmod(0o755)
    words = overrides(corpus, tmp_path / "run", train__steps=1, cluster__wrapper=f"[{wrapper}]")
    job = jobs.submit(TRAIN, *words, "cluster.ranks_per_node=1", options=("--nodes=2", "--time=60", *options))
    assert jobs.wait_for(job) == "COMPLETED", jobs.output(job)
    assert seen.read_text().splitlines() == [f"{gpus} {cpus}"] * 2


def test_a_killed_rank_ends_the_job(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a job that hangs and holds its nodes after a rank on a node other than the launcher's is killed, a store
    that listens on all addresses, and a secret that others can read or that outlives its start."""
    run = training()
    job = run.submit()
    run.wait_for_step(job, 3)
    launcher = psutil.Process(events_of(run.run_dir, "launch")[0]["pid"])
    listening = [c.laddr.ip for c in launcher.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    # The nodes of this test cluster have loopback addresses.
    assert len(listening) == 1 and listening[0].startswith("127.")
    (secret,) = run.run_dir.glob(".secret*")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    text = secret.read_bytes().strip()
    files = [path for path in run.run_dir.rglob("*") if path.is_file() and path != secret]
    assert not [path for path in files if text in path.read_bytes()]
    log = (run.run_dir / "logs" / "rank_00001.log").read_text()
    os.kill(int(log.split("pid ")[1].split(",")[0]), signal.SIGKILL)
    assert run.jobs.wait_for(job) == "FAILED"
    node = events_of(run.run_dir, "launch")[0]["nodes"][1]
    assert run.exit_code(job) == 10
    assert f"rank 1 on {node} was killed by SIGKILL" in run.jobs.output(job)
    assert not list(run.run_dir.glob(".secret*"))
    again = run.submit()
    assert run.jobs.wait_for(again) == "COMPLETED", run.jobs.output(again)
    assert steps_of(run.run_dir) == reference


@pytest.mark.fault(3)
def test_a_preempted_job_does_not_wait_for_a_stopped_rank(
    reference: list[dict], training: Callable[..., Training]
) -> None:
    """Catches an unreported hang of a rank on a node other than the launcher's, and a preempted job that waits for this
    rank until SLURM kills the job, and is not requeued."""
    run = training(checkpoint__every_steps=1)
    job = run.submit()
    run.wait_for_step(job, 3)
    log = (run.run_dir / "logs" / "rank_00001.log").read_text()
    os.kill(int(log.split("pid ")[1].split(",")[0]), signal.SIGSTOP)
    run.jobs.wait_until(lambda: bool(events_of(run.run_dir, "heartbeat_lost")), "the lost heartbeat", job)
    run.signal(job, "TERM")
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    (launch, again), (lost,) = events_of(run.run_dir, "launch"), events_of(run.run_dir, "heartbeat_lost")
    assert (lost["rank"], lost["node"], lost["state"]) == (1, launch["nodes"][1], "T") and again["restarts"] == 1
    (failure,) = events_of(run.run_dir, "failure")
    assert failure["exit_code"] == 6
    assert f"rank 1 on {launch['nodes'][1]} cannot: stopped by SIGSTOP" in failure["message"]
    assert steps_of(run.run_dir) == reference


def test_a_cancelled_job_saves_and_stays_away(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches scancel that loses the steps since the last checkpoint, and a cancelled run that is requeued."""
    run = training()
    job = run.submit()
    run.wait_for_step(job, 3)
    run.jobs.cluster.command("scancel", job)
    assert run.jobs.wait_for(job) == "CANCELLED"
    run.jobs.wait_until(lambda: "end" in [e["event"] for e in events_in(run)], "the end of the run", job)
    saved = run.step
    assert checkpoint_of(run.run_dir, saved).exists()
    assert events_of(run.run_dir, "end")[-1]["stopped"] == "interrupted"

    # A shared kill switch prevents a start, and stops a run.
    switch = run.run_dir.parent / "group" / "stop-all"
    switch.parent.mkdir()
    switch.touch()
    refused = run.submit(f"run.kill_switch={switch}")
    run.jobs.wait_for(refused)
    assert (run.exit_code(refused), run.step) == (5, saved)
    assert f"stopped by {switch}, nothing was started" in run.jobs.output(refused)
    switch.unlink()
    stopped = run.submit(f"run.kill_switch={switch}")
    run.wait_for_step(stopped, saved + 3)
    switch.touch()
    run.jobs.wait_for(stopped)
    assert run.exit_code(stopped) == 5
    assert checkpoint_of(run.run_dir, run.step).exists()
    switch.unlink()
    last = run.submit(f"run.kill_switch={switch}")
    assert run.jobs.wait_for(last) == "COMPLETED", run.jobs.output(last)
    assert steps_of(run.run_dir) == reference


def events_in(run: Training) -> list[dict]:
    """Returns all events of a run so far."""
    return list(read_json_lines(run.run_dir / "events.jsonl"))


def test_a_chain_continues_one_run_and_ends_with_it(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches jobs of a chain that start from scratch, requeue themselves, or run when the training is finished."""
    run = training()
    chain = run.submit_chain(4)
    run.wait_for_step(f"{chain}_0", 3)
    # Sent as by slurmstepd: scancel --batch does not find a task of an array (22.05).
    os.kill(holder(run).pid, signal.SIGUSR1)
    run.jobs.wait_until(lambda: not run.jobs.cluster.command("squeue", "--noheader", "--jobs", chain), "its end", chain)
    outputs = [(run.jobs.folder / f"chain-{task}.out") for task in range(4)]
    texts = [output.read_text() for output in outputs if output.exists()]
    assert steps_of(run.run_dir) == reference, texts
    assert len(texts) == 2 and f"the next job of array {chain} continues the run" in texts[0]
    assert f"the pending jobs of array {chain} are cancelled" in texts[-1]
    assert [event["restarts"] for event in events_of(run.run_dir, "launch")] == [0, 0]


def test_the_time_limit_is_kept_by_saving_before_it(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches a time limit that is noticed only when SLURM kills the job, and a next start that loses steps."""
    run = training(train__steps=10**6)
    job = run.submit("run.save_before_limit_s=600", options=("--signal=B:USR1@1",))
    run.wait_for_step(job, 3)
    run.jobs.cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=8")
    run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "1", "the requeue", job)
    run.jobs.cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    saved = run.step
    assert saved > 0 and checkpoint_of(run.run_dir, saved).exists()
    assert "left before the job's time limit, of which saving may take 10m00s" in run.jobs.output(job)
    assert events_of(run.run_dir, "end")[-1]["stopped"] == "time limit"
    run.wait_for_step(job, saved + 1)
    assert events_of(run.run_dir, "resume")[-1]["step"] == saved
    steps = steps_of(run.run_dir)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[: len(reference)] == reference[: len(steps)]


@pytest.mark.fault(22)
def test_a_lost_node_requeues_and_fences_the_orphans(reference: list[dict], training: Callable[..., Training]) -> None:
    """Catches orphan ranks of a lost node that continue to write, and a requeued job that their lease blocks."""
    run = training(train__steps=len(reference))
    job = run.submit("train.max_nonfinite_steps=4")
    run.wait_for_step(job, 12)
    head = run.jobs.field(job, "BatchHost")
    # Only the node's slurmd dies: the launcher and the ranks there continue as orphans, without SLURM. They are
    # stopped so that they cannot finish the run before the node counts as lost.
    launcher = psutil.Process(holder(run).pid)
    orphans = [launcher, *launcher.children(recursive=True), *ranks_of(run)]
    for orphan in orphans:
        orphan.suspend()
    run.jobs.cluster.kill_slurmd(head)
    run.jobs.wait_until(lambda: run.jobs.field(job, "Restarts") == "1", "the requeue", job)
    run.jobs.wait_until(lambda: holder(run).number == 2, "the takeover", job)
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.resume()
    # Their parent is an orphan too and does not reap them: dead ones stay zombies.
    run.jobs.wait_until(lambda: not any(map(lives, orphans)), "the end of the orphans", job)
    assert run.jobs.wait_for(job) == "COMPLETED", run.jobs.output(job)
    assert steps_of(run.run_dir) == reference
    run.jobs.cluster.revive(head)


def holder(run: Training) -> Holder:
    """Returns the holder of the run directory's lease."""
    found = current_holder(run.run_dir)
    assert found is not None
    return found


def lives(process: psutil.Process) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ranks_of(run: Training) -> list[psutil.Process]:
    """Returns the rank processes; their logs name the pids."""
    logs = [path.read_text() for path in (run.run_dir / "logs").glob("rank_*.log")]
    return [psutil.Process(int(log.rpartition("pid ")[2].split(",")[0])) for log in logs]
