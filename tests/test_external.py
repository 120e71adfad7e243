"""Ranks that a platform starts (torchrun, a PyTorchJob, one srun task per rank) train one run; real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from megads.runtime.ports import listen
from tests.command import Command, StartCommand, events_of, small_model, steps_of

pytestmark = pytest.mark.distributed


@contextmanager
def torchrun(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Command]:
    """Starts `megads train` as two ranks of torchrun."""
    words = ("--standalone", "--nproc-per-node=2", *options, "-m", "megads.cli.main", "train", *arguments)
    command = Command(folder, words, "torch.distributed.run")
    try:
        yield command
    finally:
        command.close()


@contextmanager
def pods(folder: Path, *arguments: str, changes: Mapping[int, Mapping[str, str]] = {}) -> Iterator[list[Command]]:
    """Starts `megads train` twice, with the variables of two pods of a PyTorchJob, which have no LOCAL_RANK."""
    free = listen("127.0.0.1")
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    free.close()
    started = [
        Command(folder, ("train", *arguments), variables={**variables, "RANK": str(rank), **changes.get(rank, {})})
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for command in started:
            command.close()


def test_two_ranks_of_torchrun_train_one_run(corpus: Path, megads: StartCommand) -> None:
    """Catches two launchers of one rank each under torchrun, and a run that computes something else than its own
    launcher's."""
    overrides = small_model(corpus, parallel__dp=2, train__steps=3, checkpoint__every_steps=2)
    ours, theirs = megads.folder / "ours", megads.folder / "theirs"
    with torchrun(megads.folder, *overrides, f"run.dir={theirs}") as started:
        ended = started.end()
    assert ended.code == 0, ended.err
    assert events_of(theirs, "launch")[0]["ranks"] == 2
    assert len(events_of(theirs, "launch")) == 1
    assert megads("train", *overrides, f"run.dir={ours}").end().code == 0
    assert steps_of(theirs) == steps_of(ours)


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(corpus: Path, megads: StartCommand) -> None:
    """Catches a restart in place that competes with the platform's, and a restart that begins anew."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=60, checkpoint__every_steps=2, run__dir=run_dir)
    with torchrun(megads.folder, *overrides, options=("--max-restarts=1",)) as started:
        started.wait_for(lambda: len(steps_of(run_dir)) >= 5)
        rank = next(process for process in started.processes() if process.environ().get("RANK") == "1"
                    and "megads.launch.rank" in process.cmdline())  # fmt: skip
        rank.send_signal(signal.SIGKILL)
        ended = started.end()
    assert ended.code == 0, ended.err
    assert len(events_of(run_dir, "launch")) == 2 and len(events_of(run_dir, "resume")) == 1
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, 61))


@pytest.mark.slow
def test_the_pods_of_a_job_train_one_run_and_stop_together(corpus: Path, megads: StartCommand) -> None:
    """Catches two pods that train two models, and an eviction of one pod after which the other waits or loses work."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=100000, run__dir=run_dir)
    with pods(megads.folder, *overrides) as started:
        started[0].wait_for(lambda: len(steps_of(run_dir)) >= 2)
        started[1].process.send_signal(signal.SIGTERM)
        assert [command.end().code for command in started] == [6, 6]
    assert len(events_of(run_dir, "checkpoint_saved")) == 1


def test_ranks_of_different_command_lines_are_refused(corpus: Path, megads: StartCommand) -> None:
    """Catches two trainings in one: every process of the platform composes its own config."""
    overrides = small_model(corpus, parallel__dp=2, train__steps=3, run__dir=megads.folder / "run")
    with pods(megads.folder, *overrides, "train.seed=${oc.env:RANK}") as started:
        ended = [command.end() for command in started]
    assert [end.code for end in ended] == [2, 2]
    assert "train.seed" in ended[0].err and not (megads.folder / "run").exists()


@pytest.mark.slow
def test_a_lost_pod_ends_the_others(corpus: Path, megads: StartCommand) -> None:
    """Catches a launcher that waits for ever for a pod that is gone, so that the platform never restarts the job."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__dp=2, train__steps=100000, checkpoint__every_steps=2, run__dir=run_dir)
    with pods(megads.folder, *overrides) as started:
        started[0].wait_for(lambda: len(steps_of(run_dir)) >= 3)
        started[1].kill_everything()
        ended = started[0].end()
    assert ended.code == 9 and "rank 1" in ended.err
    with pods(megads.folder, *overrides) as started:
        started[0].wait_for(lambda: len(events_of(run_dir, "resume")) == 1)
        started[1].kill_everything()
        assert started[0].end().code == 9
