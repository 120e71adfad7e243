"""A run restarts by itself after ranks are killed: the real command, real kills."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.command import Command, StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of

pytestmark = pytest.mark.distributed


def kill_rank(command: Command, run_dir: Path, rank: int, step: int, start: int) -> None:
    """Kills one rank of start number `start`, once `step` is recorded."""
    log = run_dir / "logs" / f"rank_{rank:05d}.log"

    def due() -> bool:
        steps = steps_of(run_dir)
        return len(events_of(run_dir, "start")) == start and bool(steps) and steps[-1]["step"] >= step

    command.wait_for(due)
    os.kill(int(log.read_text().split("pid ")[-1].split(",")[0]), signal.SIGKILL)


@pytest.mark.quick("1")
@pytest.mark.fault(1)
@pytest.mark.parametrize("local_every_steps", [0, 1])
def test_killed_ranks_restart_in_place(local_every_steps: int, corpus: Path, megads: StartCommand) -> None:
    """Catches a restart that loses or repeats steps, does not load the last checkpoint, repeats without end, is not in
    events.jsonl with cause and cost, or counts toward max_restarts although the previous start had saved."""
    overrides = small_model(
        corpus, parallel__dp=2, train__steps=36, checkpoint__every_steps=4 if not local_every_steps else 30,
        checkpoint__local_every_steps=local_every_steps,
    )  # fmt: skip
    reference, run_dir = megads.folder / "reference", megads.folder / "killed"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0

    command = megads("train", *overrides, f"run.dir={run_dir}", "cluster.max_restarts=1")
    kill_rank(command, run_dir, rank=1, step=6, start=1)
    kill_rank(command, run_dir, rank=0, step=14, start=2)
    ended = command.end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 36)) == checksums(checkpoint_of(reference, 36))
    restarts, resumes = events_of(run_dir, "restart"), events_of(run_dir, "resume")
    assert [event["restart"] for event in restarts] == [1, 2]
    assert [event["from_step"] for event in restarts] == [event["step"] for event in resumes]
    assert ["in memory" in event["checkpoint"] for event in resumes] == [local_every_steps > 0] * 2
    for event, rank in zip(restarts, (1, 0), strict=True):
        assert f"rank {rank} was killed by SIGKILL" in event["cause"]
        assert event["lost_steps"] == event["last_step"] - event["from_step"] >= 0
    assert [event["start"] for event in events_of(run_dir, "launch")] == [1, 2, 3], "each start fences the last"


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_changed_seed_does_not_lose_steps_held_in_memory(corpus: Path, megads: StartCommand) -> None:
    """Catches a changed seed accepted as a new run's although steps were trained: they are only in memory so far."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=100000, checkpoint__local_every_steps=1, run__dir=run_dir)
    command = megads("train", *overrides)
    command.wait_for(lambda: len(steps_of(run_dir)) >= 5)
    command.kill_everything()
    ledger = steps_of(run_dir)
    ended = megads("train", *overrides, "train.seed=7").end()
    assert ended.code == 2 and "train.seed = 7, but the run was trained with 1234 up to sample" in ended.err, ended.err
    assert steps_of(run_dir) == ledger
    again = megads("train", *overrides, "run.exit_after=1s")
    again.end()
    assert "in memory" in events_of(run_dir, "resume")[-1]["checkpoint"]


@pytest.mark.slow
def test_a_run_continues_from_another_nodes_memory(corpus: Path, megads: StartCommand) -> None:
    """Catches lost or changed steps after all processes are killed and the memory of a node is lost: first of one node,
    then of the other."""
    memory = megads.folder / "memory"
    memory.mkdir()
    overrides = small_model(
        corpus, parallel__pp=2, parallel__dp=2, train__steps=24, checkpoint__local_every_steps=1,
        checkpoint__local_folder=memory,
    )  # fmt: skip
    reference, run_dir = megads.folder / "reference", megads.folder / "killed"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0
    for lost, step in ((1, 6), (0, 14)):
        command = megads("train", *overrides, f"run.dir={run_dir}", fault="on_two_nodes")
        command.wait_for(lambda step=step: bool(steps_of(run_dir)) and steps_of(run_dir)[-1]["step"] >= step)
        command.kill_everything()
        shutil.rmtree(memory / f"node_{lost}")
    ended = megads("train", *overrides, f"run.dir={run_dir}", fault="on_two_nodes").end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 24)) == checksums(checkpoint_of(reference, 24))
    resumes = events_of(run_dir, "resume")
    assert [event["from_replicas"] for event in resumes] == [[2, 3], [0, 1]]
    assert "in memory, of ranks 2, 3 on other nodes" in resumes[0]["checkpoint"]
    # A step takes milliseconds here, and a copy may take several steps: how many are lost depends on the machine.
    assert all(event["step"] > 0 for event in resumes)
    assert not events_of(run_dir, "replica_failed") + events_of(run_dir, "replicas_off")
    assert [list(folder.iterdir()) for folder in memory.iterdir()] == [[], []], "the memory is free at the end"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["checkpoint.every_steps", "checkpoint.local_every_steps"], ids=["disk", "memory"])
def test_with_load_none_a_restart_uses_the_runs_own_saves(key: str, corpus: Path, megads: StartCommand) -> None:
    """Catches a run with checkpoint.load=none that starts over after each crash, or resumes from a checkpoint that it
    should ignore."""
    run_dir = megads.folder / "run"
    afresh = small_model(
        corpus, parallel__dp=2, checkpoint__keep=0, checkpoint__local_folder=megads.folder, checkpoint__load="none",
        schedule__name="constant", cluster__max_restarts=1, run__dir=run_dir,
    )  # fmt: skip
    before = megads("train", *afresh, "train.steps=8").end()
    assert before.code == 0, before.err
    left_behind = steps_of(run_dir)
    ended = megads("train", *afresh, "train.steps=6", f"{key}=1", fault="die_after_a_step").end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == left_behind[:6]
    resumes, in_memory = events_of(run_dir, "resume"), key == "checkpoint.local_every_steps"
    steps = [event["step"] for event in resumes]
    # A rank may die before the in-memory copy of its last step is complete.
    assert steps == [2, 4] or (in_memory and steps[:1] in ([1], [2]) and steps == sorted(set(steps)))
    assert all(("in memory" in event["checkpoint"]) == in_memory for event in resumes)
    assert [event["from_step"] for event in events_of(run_dir, "restart")] == steps
    assert checkpoint_of(run_dir, 8).exists(), "what it left behind"
    assert [path.name for path in run_dir.glob("metrics.*.jsonl")] == ["metrics.1.jsonl"]


@pytest.mark.slow
def test_with_load_none_a_requeued_job_continues(corpus: Path, megads: StartCommand) -> None:
    """Catches a requeued job with checkpoint.load=none that starts over because its batch script passes the same
    command, and a new job that does not start over."""
    run_dir = megads.folder / "run"
    afresh = small_model(
        corpus, parallel__dp=2, train__steps=6, run__dir=run_dir, checkpoint__every_steps=1, checkpoint__load="none",
        cluster__max_restarts=0,
    )  # fmt: skip
    for requeues in range(2):
        job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(requeues)}
        assert megads("train", *afresh, fault="die_after_a_step", variables=job).end().code != 0
    assert [event["step"] for event in events_of(run_dir, "resume")] == [2]
    job = {"SLURM_JOB_ID": "8"}
    assert megads("train", *afresh, variables=job).end().code == 0
    assert [event["step"] for event in events_of(run_dir, "start")] == [0, 2, 0]


def test_exhausted_restarts_end_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that fails at every start and exits with 1, or restarts without end."""
    overrides = small_model(corpus, parallel__dp=2, train__steps=60, cluster__max_restarts=1)
    command = megads("train", *overrides, f"run.dir={megads.folder / 'run'}", fault="die_after_a_step")
    ended = command.end()
    assert ended.code == 8, ended.err
    assert "1 restarts without a new checkpoint in between were all that cluster.max_restarts allows" in ended.err
    (event,) = events_of(megads.folder / "run", "gave_up")
    assert event["exit_code"] == 8 and "killed by SIGKILL" in event["cause"]
