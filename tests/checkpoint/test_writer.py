"""Asynchronous saves: a checkpoint holds the state of its step, even if its writer process fails."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megads.checkpoint import image as image_module
from megads.checkpoint import writer as writer_module
from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.config import CheckpointConfig, list_checkpoints
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.writer import CheckpointWriter, SaveState
from megads.errors import Fenced
from megads.runtime.distributed import open_control_plane
from megads.runtime.hooks import TrainState
from megads.runtime.lease import Fence, claimed
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.runtime.slurm import SlurmJob
from tests.checkpoint.random_layouts import all_equal, global_tensors, random_layout, run_record, shards_of
from tests.checkpoint.stepping import SteppedEngine, take_step
from tests.distributed import run_ranks
from tests.system_calls import needs_ptrace, trace_this_process

WITHIN_S = 120.0
"""Time for what a healthy process does soon, on a machine however busy."""


class Loop:
    """Training loop of a rank with the checkpoint hook and a writer.

    Args:
        run_dir: folder of the run.
        writer: None: saves are synchronous.
        timeout_s: a writer that takes longer is considered hung.
        fence: fence of the start.
        options: fields of CheckpointConfig.
    """

    def __init__(
        self,
        run_dir: Path,
        writer: CheckpointWriter | None,
        timeout_s: float = 60.0,
        fence: Fence | None = None,
        **options: Any,
    ) -> None:
        control = open_control_plane()
        layout = random_layout(7, control.world_size)
        self.engine, self.state = SteppedEngine(layout[control.rank]), TrainState()
        config = CheckpointConfig(**{"every_steps": 1, "async_save": True, **options})
        events = EventWriter(run_dir, enabled=control.rank == 0)
        engine: Any = self.engine
        background = AsyncSaves(config, writer=writer, timeout_s=timeout_s)
        loss_key = "valid/held_out/loss" if config.keep_best else None
        self.hook = CheckpointHook(
            engine, run_dir, config, run_record(0), self.state, events, fence, background=background, loss_key=loss_key
        )
        self.hook.on_start(self.state)

    def step(self, last: bool = False) -> None:
        take_step(self.engine, self.state, self.hook, last=last)


@contextmanager
def started() -> Iterator[CheckpointWriter]:
    control = open_control_plane()
    writer = CheckpointWriter(control.rank, control.world_size)
    try:
        yield writer
    finally:
        writer.close()


def wait_for(stage: SaveState, writer: CheckpointWriter) -> None:
    deadline = time.monotonic() + WITHIN_S
    while writer.progress().state is not stage:
        assert time.monotonic() < deadline, writer.progress()
        time.sleep(0.01)


def events_of(run_dir: Path) -> list[tuple[str, int]]:
    return [(line["event"], line.get("step", 0)) for line in read_json_lines(run_dir / EVENTS_FILE)]


def seeds_of(run_dir: Path) -> list[int]:
    """Seeds whose tensors the checkpoints hold; each checkpoint is read and verified."""
    found = []
    for folder in list_checkpoints(run_dir).values():
        handle = find_checkpoint(run_dir, str(folder), open_control_plane())
        assert handle is not None
        shards = shards_of(random_layout(99, 1)[0])
        read_into(handle, shards)
        found += [seed for seed in range(20) if all_equal(shards, global_tensors(seed))]
    return found


def held(monkeypatch: pytest.MonkeyPatch, until: Path) -> None:
    """Holds every write of a writer process until a file is there; call it before the writer is forked."""
    write = writer_module._carry_out

    def waits(*arguments: Any) -> Any:
        deadline = time.monotonic() + WITHIN_S
        while not until.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return write(*arguments)

    monkeypatch.setattr(writer_module, "_carry_out", waits)


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delays every write of a writer process; call it before the writer is forked."""
    write = writer_module._carry_out

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    monkeypatch.setattr(writer_module, "_carry_out", slow)


def train_steps(run_dir: Path, steps: int, behind: bool) -> list[int]:
    """Runs a whole training on several ranks; returns the saved steps."""
    with started() as writer:
        loop = Loop(run_dir, writer if behind else None, every_steps=2, keep=0)
        for step in range(1, steps + 1):
            loop.step(last=step == steps)
        loop.hook.on_end(loop.state)
    return list(list_checkpoints(run_dir))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_as_a_synchronous_save(world_size: int, tmp_path: Path) -> None:
    """Catches a manifest or a tensor that differs from a synchronous save's."""
    for name, behind in (("waited", False), ("behind", True)):
        (tmp_path / name).mkdir()
        found = run_ranks(train_steps, world_size, tmp_path / name, 5, behind)
        assert found == [[2, 4, 5] if name == "waited" else found[0]] * world_size and found[0][-1] == 5
    for folder in list_checkpoints(tmp_path / "behind").values():
        ours, theirs = read_manifest(folder), read_manifest(tmp_path / "waited" / "checkpoints" / folder.name)
        assert (ours.tensors, ours.files, ours.run, ours.software) == (
            theirs.tensors, theirs.files, theirs.run, theirs.software
        )  # fmt: skip
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *sorted(ours.files)]
    assert seeds_of(tmp_path / "behind") == list(list_checkpoints(tmp_path / "behind"))


def validated_steps(run_dir: Path) -> list[int]:
    """Saves steps 1 to 8 asynchronously; rank 0 validates each: step 3 has the lowest loss, step 5 the next."""
    metrics = MetricsWriter(run_dir, enabled=open_control_plane().rank == 0)
    with started() as writer:
        loop = Loop(run_dir, writer, keep=1, keep_best=2, keep_every=4)
        for step in range(1, 9):
            loop.step(last=step == 8)
            metrics.write({"step": step, "valid/held_out/loss": {3: 1.0, 5: 2.0}.get(step, 2.0 + step)})
            while writer.progress().state is SaveState.writing:
                time.sleep(0.001)
            open_control_plane().barrier()
        loop.hook.on_end(loop.state)
    return list(list_checkpoints(run_dir))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_writer_keeps_the_best(world_size: int, tmp_path: Path) -> None:
    """Catches a writer process without the validation losses that its own rank has."""
    assert run_ranks(validated_steps, world_size, tmp_path) == [[3, 4, 5, 7, 8]] * world_size
    assert seeds_of(tmp_path) == [3, 4, 5, 7, 8]


def test_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a save that blocks training, one that contains later weights, and a postponed save never made."""
    held(monkeypatch, until=tmp_path / "writes")
    with started() as writer:
        loop = Loop(tmp_path, writer, every_steps=2)
        for _ in range(5):
            loop.step()
        assert list_checkpoints(tmp_path) == {}, "the loop waited for the writer"
        (tmp_path / "writes").touch()
        wait_for(SaveState.done, writer)
        assert seeds_of(tmp_path) == [2]
        loop.step()
        loop.step(last=True)
        loop.hook.on_end(loop.state)
    assert seeds_of(tmp_path) == [6, 7]
    assert events_of(tmp_path) == [
        ("checkpoint_put_off", 4), ("checkpoint_saved", 2), ("checkpoint_saved", 6), ("checkpoint_saved", 7)
    ]  # fmt: skip


@pytest.mark.parametrize("kept", [{"keep_every": 4}, {"keep_best": 1}])
def test_a_step_that_is_kept_waits_for_the_writer(
    kept: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the checkpoint of a later step in place of one that is kept for good, or whose step was validated."""
    slowed(monkeypatch, 0.2)
    with started() as writer:
        loop = Loop(tmp_path, writer, every_steps=2, **kept)
        for step in range(1, 6):
            loop.step(last=step == 5)
        loop.hook.on_end(loop.state)
    saved = [step for event, step in events_of(tmp_path) if event == "checkpoint_saved"]
    assert saved == [2, 4, 5]


def test_the_next_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that waits for the copy of its own state, and an update that does not wait for the last copy: a
    checkpoint with tensors of two steps."""
    copy, may_copy, copied = np.copyto, threading.Event(), list[int]()

    def waits(*arguments: Any) -> None:
        may_copy.wait(WITHIN_S)
        copy(*arguments)
        copied.append(loop.state.step)

    monkeypatch.setattr(image_module.np, "copyto", waits)
    with started() as writer:
        loop = Loop(tmp_path, writer, every_steps=2)
        count = len(loop.engine.named_shards())
        loop.step()
        loop.step()
        assert copied == [], "a copy held up the step that it is of"
        threading.Timer(0.2, may_copy.set).start()
        loop.step()
        assert len(copied) == count, "the third step changed the weights before they were copied"
        wait_for(SaveState.done, writer)
        may_copy.clear()
        loop.step()
        assert len(copied) == count, "a copy held up the step that it is of"
        may_copy.set()
        loop.hook.on_end(loop.state)
    assert seeds_of(tmp_path) == [2, 4]


def kill(writer: CheckpointWriter) -> None:
    os.kill(writer.pid, signal.SIGKILL)


def stop(writer: CheckpointWriter) -> None:
    os.kill(writer.pid, signal.SIGSTOP)


@pytest.mark.parametrize("end", [kill, stop])
def test_a_lost_writer(
    end: Callable[[CheckpointWriter], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that hangs on a dead or stopped writer, ends because of it, or stops saving."""
    slowed(monkeypatch, 0.5)
    with started() as writer:
        loop = Loop(tmp_path, writer, keep=0)
        loop.step()
        end(writer)
        wait_for(SaveState.lost, writer)
        for last in (False, False, True):
            loop.step(last)
        loop.hook.on_end(loop.state)
    assert seeds_of(tmp_path) == [2, 3, 4]
    assert events_of(tmp_path) == [
        ("checkpoint_failed", 1), ("synchronous_saves", 0), *(("checkpoint_saved", step) for step in (2, 3, 4))
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest", "step_00000002", "step_00000003", "step_00000004"
    ]  # fmt: skip


@needs_ptrace
def test_a_writer_that_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches asynchronous saves that end because strace or py-spy stops a writer for microseconds."""
    serve = writer_module._serve

    def serve_watched(*arguments: Any) -> None:
        trace_this_process(tmp_path, tmp_path / "calls")
        serve(*arguments)

    monkeypatch.setattr(writer_module, "_serve", serve_watched)
    with started() as writer:
        loop = Loop(tmp_path, writer, keep=1)
        for _ in range(10):
            loop.step()
            while writer.progress().state is SaveState.writing:
                continue
            assert writer.progress().state is SaveState.done, writer.progress()
    assert (tmp_path / "calls").read_text().count("rename checkpoints/.latest") == 10


def test_a_writer_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches saves that are postponed forever."""
    slowed(monkeypatch, 3600)
    with started() as writer:
        loop = Loop(tmp_path, writer, timeout_s=600.0)
        loop.step()
        loop.step()
        monkeypatch.setattr(writer, "elapsed_s", lambda: 601.0)
        loop.step()
        assert seeds_of(tmp_path) == [3]


def test_a_full_disk(tmp_path: Path) -> None:
    """Catches a failed write that nothing replaces, or that ends asynchronous saves."""
    with started() as writer:
        loop = Loop(tmp_path, writer, keep=0)
        loop.step()
        wait_for(SaveState.done, writer)
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        loop.step()
        wait_for(SaveState.failed, writer)
        assert "File too large" in writer.progress().reason
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        loop.step()
        loop.step()
        wait_for(SaveState.done, writer)
        loop.step(last=True)
    assert seeds_of(tmp_path) == [1, 3, 4, 5]
    assert [event for event in events_of(tmp_path) if event[0] != "checkpoint_saved"] == [("checkpoint_failed", 2)]


def test_an_orphan_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a writer of an earlier start that commits after a new one has begun."""
    held(monkeypatch, until=tmp_path / "taken")
    with claimed(tmp_path, SlurmJob("1", 0, "c")) as orphan, started() as writer:
        loop = Loop(tmp_path, writer, fence=Fence(tmp_path, orphan.number))
        loop.step()
        with claimed(tmp_path, SlurmJob("1", 1, "c")):
            (tmp_path / "taken").touch()
            wait_for(SaveState.failed, writer)
            assert "lost" in writer.progress().reason
            with pytest.raises(Fenced):
                loop.step()
    assert list_checkpoints(tmp_path) == {}


def test_a_bug_of_the_writer_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a writer that crashes without a message."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(writer_module, "_carry_out", broken)
    with started() as writer:
        Loop(tmp_path, writer).step()
        wait_for(SaveState.lost, writer)
    assert "RuntimeError: a bug" in capfd.readouterr().err


def with_a_failing_rank(run_dir: Path, end: str) -> list[int]:
    """Kills rank 1's writer, or limits its files to 0 bytes; the others write their parts."""
    with started() as writer:
        loop = Loop(run_dir, writer, keep=0, timeout_s=20.0)
        if open_control_plane().rank == 1:
            if end == "killed":
                kill(writer)
            else:
                resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        for last in (False, False, True):
            loop.step(last)
            open_control_plane().barrier()
            time.sleep(0.2)
        loop.hook.on_end(loop.state)
    return list(list_checkpoints(run_dir))


@pytest.mark.distributed
@pytest.mark.parametrize("end", ["killed", "no room"])
def test_one_rank_fails(end: str, tmp_path: Path) -> None:
    """Catches a checkpoint that lacks a rank's part, and ranks that disagree on whether to wait for the writers."""
    assert run_ranks(with_a_failing_rank, 3, tmp_path, end) == [[2, 3]] * 3
    assert seeds_of(tmp_path) == [2, 3]


def in_writer(run_dir: Path, event_number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook that kills its process right before the given file operation, in any process but this one."""
    parent, seen = os.getpid(), 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        touches = bool(arguments) and isinstance(arguments[0], str | os.PathLike) and str(run_dir) in str(arguments[0])
        if os.getpid() != parent and touches and (event.startswith(("os.", "shutil.")) or event == "open"):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    return count


def run_with_killed_writer(run_dir: Path, event_number: int) -> str:
    """Saves step 1, waits for it, and replaces it by step 2; the writer dies during one of the two saves."""
    sys.addaudithook(in_writer(run_dir, event_number))
    with started() as writer:
        loop = Loop(run_dir, writer, keep=1)
        loop.step()
        while writer.progress().state is SaveState.writing:
            time.sleep(0.001)
        alive = writer.progress().state is SaveState.done
        loop.step()
        while alive and writer.progress().state is SaveState.writing:
            time.sleep(0.001)
        alive = alive and writer.progress().state is SaveState.done
        before = {step: read_manifest(folder) for step, folder in list_checkpoints(run_dir).items()}
        loop.step(last=True)
        loop.hook.on_end(loop.state)
    return f"{'done' if alive else 'killed'} {sorted(before)}"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_writer_killed_at_every_file_operation(tmp_path: Path) -> None:
    """Catches a file operation at which a writer's death leaves half a checkpoint or none, or ends the run."""
    said = []
    for event_number in range(1, 300):
        run_dir = tmp_path / str(event_number)
        run_dir.mkdir()
        (outcome,) = run_ranks(run_with_killed_writer, 1, run_dir, event_number)
        said.append(outcome)
        assert seeds_of(run_dir)[-1] == 3
        hidden = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
        assert hidden == [], "leftovers of the killed writer"
        if outcome.startswith("done"):
            break
    assert len(said) > 20 and said[-1].startswith("done"), said


@pytest.mark.slow
def test_memory_is_taken_once(tmp_path: Path) -> None:
    """Catches a writer or a rank whose memory grows with every save."""

    def resident() -> int:
        return sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            for pid in (os.getpid(), writer.pid)
        )

    with started() as writer:
        loop, sizes = Loop(tmp_path, writer, keep=1), []
        for _ in range(100):
            loop.step()
            wait_for(SaveState.done, writer)
            sizes.append(resident())
    assert max(sizes[60:]) < 1.01 * max(sizes[20:40])


def test_small_states_are_not_copied(tmp_path: Path) -> None:
    """Catches a writer kept although async_save is null and a save takes no time."""
    with started() as writer:
        pid, loop = writer.pid, Loop(tmp_path, writer, async_save=None)
        loop.step()
        assert seeds_of(tmp_path) == [1]
        assert not psutil.pid_exists(pid)
