"""Runs with asynchronous checkpoints: the real command, real kills."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of

pytestmark = pytest.mark.distributed

SAVES = 60
SETTLED, COMPARED = 10, 20
"""One-time allocations are done after SETTLED saves; later saves may use what saves up to COMPARED used."""


class Held(NamedTuple):
    """Resident bytes, resident bytes of shared memory, and open descriptors of a process after a save."""

    resident: int
    shared: int
    descriptors: int


def shared_bytes(pid: int) -> int:
    """Resident bytes of memfd and /dev/shm that a process has mapped."""
    total, counted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counted = len(words) > 5 and words[5].startswith(("/memfd:megads", "/dev/shm/"))
        elif counted and words[0] == "Rss:":
            total += 1024 * int(words[1])
    return total


def rank_and_writer(launcher: int) -> dict[str, psutil.Process]:
    """Returns the processes that have a copy mapped: the writer is a child of the rank."""
    having = [process for process in psutil.Process(launcher).children(recursive=True) if shared_bytes(process.pid)]
    pids = {process.pid for process in having}
    return {"writer" if process.ppid() in pids else "rank": process for process in having}


def leaks(values: list[Held]) -> list[str]:
    """Returns what grew from saves SETTLED to COMPARED to the second half: memory by more than 1%, or descriptors.

    The fewest descriptors count, because files come and go.
    """
    early, late = (list(zip(*part, strict=True)) for part in (values[SETTLED:COMPARED], values[len(values) // 2 :]))
    grown = [
        f"{Held._fields[i]}: {max(late[i])} of {max(early[i])}" for i in (0, 1) if max(late[i]) > 1.01 * max(early[i])
    ]
    return grown + (["descriptors"] if min(late[2]) > min(early[2]) else [])


@pytest.mark.slow
def test_a_killed_run_with_async_saves_continues_bit_for_bit(corpus: Path, megads: StartCommand) -> None:
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
def test_a_stopped_writer_does_not_hold_up_the_run(corpus: Path, megads: StartCommand) -> None:
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
def test_only_one_of_two_starts_trains(corpus: Path, megads: StartCommand) -> None:
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


def test_the_leak_check_finds_small_leaks_only() -> None:
    """Catches a check that detects no growth of 0.1% per save, or takes a file that is open for a moment for a leak."""
    flat = Held(100_000_000, 10_000_000, 7)
    assert leaks([flat] * SAVES) == []
    assert leaks([flat._replace(descriptors=7 + number % 2) for number in range(SAVES)]) == []
    assert leaks([flat._replace(shared=flat.shared + 10_000 * number) for number in range(SAVES)])[0][:6] == "shared"
    assert leaks([flat._replace(descriptors=7 + number // 30) for number in range(SAVES)]) == ["descriptors"]


@pytest.mark.slow
def test_saves_leak_no_memory_and_no_descriptors(corpus: Path, megads: StartCommand) -> None:
    """Catches a rank or a writer that leaks memory, shared memory or a descriptor at every save, over 60 of them."""
    run_dir = megads.folder / "run"
    shape = {"model__hidden_size": 192, "data__train": f"[{{path: {corpus}, max_epochs: 1000000}}]"}
    overrides = small_model(corpus, train__steps=1_000_000, checkpoint__every_steps=1, checkpoint__keep=2, **shape)
    command = megads("train", *overrides, "checkpoint.async_save=true", "logging.console=quiet", f"run.dir={run_dir}")
    found: dict[str, list[Held]] = {"rank": [], "writer": []}
    processes: dict[str, psutil.Process] = {}

    def measured() -> bool:
        saves = sum("write_s" in event for event in events_of(run_dir, "checkpoint_saved"))
        if saves > len(found["rank"]):
            if not processes:
                processes.update(rank_and_writer(command.process.pid))
            for name, process in processes.items():
                # There may be several saves between two polls: each gets a figure.
                held = Held(process.memory_info().rss, shared_bytes(process.pid), process.num_fds())
                found[name] += [held] * (saves - len(found[name]))
        return saves >= SAVES

    command.wait_for(lambda: bool(events_of(run_dir, "checkpoint_saved")))
    command.wait_for(measured)
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end().code == 5
    assert min(map(len, found.values())) >= SAVES
    assert all(held.shared > 10**6 and held.descriptors > 3 for values in found.values() for held in values)
    assert {name: leaks(values) for name, values in found.items()} == {"rank": [], "writer": []}
