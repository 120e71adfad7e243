"""Runs with asynchronous checkpoints: the real command, real kills."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scripts.bench.checkpoint_soak import rank_and_writer
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on(corpus: Path, megads: StartCommand) -> None:
    """Catches a checkpoint that differs from a synchronous save's, in a layout with every kind of shard, and a resume
    from one that is incomplete or of another step."""
    layout = {"parallel__tp": 2, "parallel__pp": 2}
    overrides = small_model(corpus, train__steps=40, checkpoint__every_steps=3, checkpoint__keep=0, **layout)
    reference, run_dir = megads.folder / "reference", megads.folder / "killed"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0

    behind = (*overrides, "checkpoint.async_save=true", f"run.dir={run_dir}")
    command = megads("train", *behind)
    command.wait_for(lambda: bool(events_of(run_dir, "checkpoint_saved")))
    command.kill_everything()
    command.end()
    ended = megads("train", *behind).end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == steps_of(reference)
    saved = [event for event in events_of(run_dir, "checkpoint_saved") if event["step"] < 40]
    assert saved and all("write_s" in event for event in saved), "the training waited"
    assert events_of(run_dir, "resume")[-1]["step"] >= saved[0]["step"]
    for folder in (run_dir / "checkpoints").glob("step_*"):
        assert checksums(folder) == checksums(reference / "checkpoints" / folder.name)


def test_a_run_that_is_stopped_saves_its_last_step(corpus: Path, megads: StartCommand) -> None:
    """Catches a stop that loses the checkpoint that a writer is about to commit, or the last step."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=500, checkpoint__every_steps=1, parallel__dp=2)
    command = megads("train", *overrides, "checkpoint.async_save=true", f"run.dir={run_dir}")
    command.wait_for(lambda: len(steps_of(run_dir)) > 4)
    os.kill(command.process.pid, signal.SIGTERM)
    ended = command.end()
    last = steps_of(run_dir)[-1]["step"]
    assert checkpoint_of(run_dir, last).is_dir(), ended.err


@pytest.mark.slow
def test_a_writer_that_is_stopped(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that waits for a writer stopped by SIGSTOP, that saves no more, or whose results change."""
    overrides = small_model(corpus, train__steps=60, checkpoint__every_steps=2, checkpoint__keep=3)
    reference, run_dir = megads.folder / "reference", megads.folder / "stopped"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0
    behind = (*overrides, "checkpoint.async_save=true", f"run.dir={run_dir}")
    command = megads("train", *behind)

    def writer() -> int | None:
        # Processes come and go; the writer is identified by the image that it has mapped.
        with suppress(psutil.Error, OSError):
            found = rank_and_writer(command.process.pid)
            return found["writer"].pid if "writer" in found else None
        return None

    command.wait_for(lambda: writer() is not None)
    pid = writer()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    ended = command.end()
    assert ended.code == 0, ended.err
    assert "(SIGSTOP)" in events_of(run_dir, "synchronous_saves")[0]["reason"]
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 60)) == checksums(checkpoint_of(reference, 60))


@pytest.mark.slow
@pytest.mark.fault(18)
def test_two_starts_at_once(corpus: Path, megads: StartCommand) -> None:
    """Catches two starts of one command that both train: metrics.jsonl must have every step once, and one start must be
    refused with the other's process id."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=30, checkpoint__every_steps=2, checkpoint__async_save=True)
    started = [megads("train", *overrides, f"run.dir={run_dir}") for _ in range(2)]
    ended = [command.end() for command in started]
    assert sorted(end.code for end in ended) == [0, 2], [end.err for end in ended]
    winner, loser = sorted(zip(ended, started, strict=True), key=lambda pair: pair[0].code)
    assert f"is in use by process {winner[1].process.pid}" in loser[0].err
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, 31))
    assert len(events_of(run_dir, "launch")) == 1 and not events_of(run_dir, "resume")
