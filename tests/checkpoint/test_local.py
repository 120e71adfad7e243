"""Local checkpoints: however a process ends, the next start finds the newest complete state."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megads.checkpoint import image as image_module
from megads.checkpoint import local as local_module
from megads.checkpoint import local_files as local_files_module
from megads.checkpoint import local_saves as local_saves_module
from megads.checkpoint import writer as writer_module
from megads.checkpoint.config import CheckpointConfig, list_checkpoints, step_folder
from megads.checkpoint.local import RECORD_FILE, forget
from megads.checkpoint.local_files import held_in_memory, node_folder
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import newest_manifest
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.runtime.distributed import open_control_plane
from megads.runtime.environment import RankEnvironment
from tests.checkpoint import local_runs
from tests.checkpoint.local_runs import Kept, Run, events_of, files_of, flip, started, trained
from tests.checkpoint.random_layouts import all_equal, global_tensors, random_layout, run_record, shards_of
from tests.distributed import run_ranks

TRACED = tuple(module.__file__ for module in (image_module, local_module, local_files_module, local_saves_module))


def several_starts(run_dir: Path) -> list[tuple[int, list[str]]]:
    found = []
    for start in range(1, 5):
        with started(run_dir, start) as run:
            found.append((run.found(), run.skipped))
            for _ in range(3 if start != 2 else 0):
                run.step()
                run.wait()
            open_control_plane().barrier()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_next_start_continues(world_size: int, tmp_path: Path) -> None:
    """Catches a checkpoint that holds another step's state, lacks the copies of another rank's shards, or is lost when
    a start ends before its first step."""
    found = [(0, []), (3, []), (3, []), (6, [])]
    assert run_ranks(several_starts, world_size, tmp_path) == [found] * world_size


def killed_at(run_dir: Path, number: int) -> tuple[bool, int]:
    """Kills a rank before the n-th executed line of the image and local checkpoint code at step 3, whose image
    overwrites that of step 1.

    Returns:
        Whether the kill happened, and the step that the next start found.
    """
    run_dir.mkdir()
    armed, rank = run_dir / "armed", os.fork()
    if rank == 0:
        seen = 0

        def count(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line" and armed.exists():
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return count

        code = 2
        try:
            threading.settrace(count)
            sys.settrace(count)
            with started(run_dir) as run:
                for step in (1, 2, 3):
                    if step == 3:
                        armed.touch()
                    run.step()
                    run.wait()
                armed.unlink()
                # As the next step does first.
                code = 0 if run.saves._last_is_complete() else 1
        finally:
            os._exit(code)
    status = os.waitpid(rank, 0)[1]
    killed = status != 0
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    with started(run_dir, 2) as run:
        return killed, run.found()


def kill_at_lines(run_dir: Path, stride: int) -> list[tuple[bool, int]]:
    outcomes = []
    for number in range(1, 1000, stride):
        outcomes.append(killed_at(run_dir / str(number), number))
        if not outcomes[-1][0]:
            break
    return outcomes


@pytest.mark.distributed
@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_every_line(stride: int, tmp_path: Path) -> None:
    """Catches a line of code at which killing a rank leaves a torn state, or none."""
    (outcomes,) = run_ranks(kill_at_lines, 1, tmp_path, stride)
    assert len(outcomes) * stride > 20 and outcomes[-1] == (False, 3), "not every line was tried"
    assert {found for _, found in outcomes} == {2, 3}


def with_one_state_incomplete(run_dir: Path) -> list[int]:
    """Rank 1 does not complete step 3; the other ranks complete theirs."""
    control = open_control_plane()
    with started(run_dir) as run:
        for _ in range(2):
            run.step()
            run.wait()
            control.barrier()
        if control.rank == 1:
            never_completes(run)
        run.state.step = 2
        run.engine.step(3)
        run.saves.copy(run.engine.named_shards(owned=False), run_record(3), 0, None, lambda _: None).sealed.result()
        control.barrier()
    with started(run_dir, 2) as run:
        return [run.found(), *files_of(run_dir, control.rank)]


def never_completes(run: Run) -> None:
    """Lets the copies of a rank end before they are complete, as after a kill of the rank."""
    saves: Any = run.saves
    saves._complete = lambda *_: None


@pytest.mark.distributed
def test_ranks_agree_on_a_step(tmp_path: Path) -> None:
    """Catches ranks that resume from different steps, or from none although all have a common one."""
    found = run_ranks(with_one_state_incomplete, 3, tmp_path)
    assert [steps[0] for steps in found] == [2, 2, 2]


def beside_slow_writers(run_dir: Path) -> list[list[int]]:
    """Rank 1's disk is slow: its writer still reads an image while later local checkpoints are made."""
    control, kept = open_control_plane(), []
    write = writer_module._carry_out

    def slow(*arguments: Any) -> Any:
        time.sleep(1.0 if control.rank == 1 else 0.0)
        return write(*arguments)

    writer_module._carry_out = slow
    try:
        run = Run(run_dir, behind=True, every_steps=4, keep=0)
    finally:
        writer_module._carry_out = write
    with closing(run):
        for step in range(1, 9):
            run.step(last=step == 8)
            run.wait()
            control.barrier()
            kept.append(sorted(files_of(run_dir, control.rank)))
            control.barrier()
    return kept


@pytest.mark.distributed
def test_all_ranks_keep_the_same_steps(tmp_path: Path) -> None:
    """Catches an image that is overwritten while a writer reads it, and ranks that keep different steps because some
    writers are slower."""
    kept = run_ranks(beside_slow_writers, 2, tmp_path)
    assert kept[0] == kept[1]
    # While step 4 is being written to disk, its image is kept.
    assert kept[0][:7] == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 6], [4, 7]]
    for step, folder in list_checkpoints(tmp_path).items():
        handle = find_checkpoint(tmp_path, str(folder), open_control_plane())
        assert handle is not None
        shards = shards_of(random_layout(99, 1)[0])
        read_into(handle, shards)
        assert all_equal(shards, global_tensors(step)), f"the disk's step {step} is torn"
    assert list(list_checkpoints(tmp_path)) == [4, 8]


def cut(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def lengthen(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(draw.randrange(1, 100)))


@pytest.mark.quick("flip")
@pytest.mark.parametrize("damage", [flip, cut, lengthen])
def test_damage_is_passed_by(damage: Callable[[Path, random.Random], None], tmp_path: Path) -> None:
    """Catches undetected corruption at any position, and a start that fails because of corruption."""
    trained(tmp_path, 3)
    kept, draw = Kept(tmp_path), random.Random(1)
    for name in ("rank_00000.safetensors", "local.json"):
        for _ in range(25):
            kept.put_back()
            damage(files_of(tmp_path)[3] / name, draw)
            with started(tmp_path, 2) as run:
                # A changed local.json may still be valid, with a smaller number, for instance.
                assert run.found() == 2 or (run.found() == 3 and name == "local.json")
                if run.found() == 2 and name != "local.json":
                    assert "step 3 in memory" in run.base.skipped[0]  # type: ignore[union-attr]
    kept.put_back()
    for folder in files_of(tmp_path).values():
        damage(folder / "rank_00000.safetensors", draw)
    with started(tmp_path, 2) as run:
        assert run.found() == 0 and len(run.skipped) == 2


RULES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "another computation": (
        lambda run_dir, patch: patch.setattr(local_runs, "COMPUTATION", "of another layout"),
        "what the run computes, or its layout, has changed",
    ),
    "other software": (
        lambda run_dir, patch: patch.setattr(local_saves_module, "software", lambda: {"torch": "3.0"}),
        "of other software",
    ),
    "the checkpoint before it is gone": (
        lambda run_dir, patch: shutil.rmtree(step_folder(run_dir, 2)),
        "the checkpoint of step 2 has left the disk",
    ),
    "of no start of the run": (lambda run_dir, patch: forget(run_dir), ""),
    "a rank's memory is gone": (
        lambda run_dir, patch: shutil.rmtree(node_folder(run_dir / "memory", run_dir)),
        "rank 0 has none on its node",
    ),
    "its record is no record": (lambda run_dir, patch: flip(run_dir / RECORD_FILE, random.Random(1)), ""),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_continued(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start that resumes from a state that is no longer valid for the run, or does not report why not."""
    trained(tmp_path, 3, every_steps=2, keep=0)
    change, reason = RULES[rule]
    change(tmp_path, monkeypatch)
    with started(tmp_path, 2) as run:
        assert run.found() == 0
        assert run.skipped == [] if not reason else reason in run.skipped[0]


@pytest.mark.parametrize("more_steps", [0, 1])
def test_a_damaged_checkpoint_on_disk_is_not_a_removed_one(more_steps: int, tmp_path: Path) -> None:
    """Catches an intact local checkpoint that is discarded for an older one on disk, or for none, because a manifest on
    disk is damaged; and one that is never saved to disk because the damaged checkpoint has its step."""
    trained(tmp_path, 2 + more_steps, every_steps=2, keep=0)
    manifest = step_folder(tmp_path, 2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    with started(tmp_path, 2, every_steps=2, keep=0) as run:
        assert run.found() == 2 + more_steps, run.skipped
        run.hook.on_end(run.state)
    newest = newest_manifest(tmp_path)
    assert newest is not None and newest.run.state["step"] == 2 + more_steps


def test_a_later_step_on_disk_wins(tmp_path: Path) -> None:
    """Catches a run that resumes from a local checkpoint older than its newest one on disk, as after a start without
    local checkpoints."""
    trained(tmp_path, 3)
    save_checkpoint(tmp_path, shards_of(random_layout(1, 1)[0], global_tensors(9)), run_record(9))
    with started(tmp_path, 2) as run:
        assert run.found() == 0 and "the disk has a later one, step 9" in run.skipped[0]


def test_when(tmp_path: Path) -> None:
    """Catches local checkpoints at other steps than configured, at a non-finite step, or at every step after a
    postponed one; and a checkpoint on disk without one in memory."""
    with started(tmp_path, local_every_steps=3, every_steps=5, behind=True) as run:
        found = []
        for step in range(1, 11):
            run.step(skipped=step in (6, 7))
            run.wait()
            # A checkpoint that is still being written would postpone the next.
            run.wait_for_disk()
            found.append(max(files_of(tmp_path), default=0))
    assert found == [0, 0, 3, 3, 5, 5, 5, 8, 9, 10]


def test_the_end_of_a_run_frees_the_memory(tmp_path: Path) -> None:
    """Catches memory that is not freed at the end of a run, and a next start that takes it for the newest state."""
    with started(tmp_path) as run:
        run.step()
        run.wait()
        step, size = held_in_memory(run.memory, tmp_path)
        assert step == 1 and size > 0
        run.step(last=True)
        run.hook.on_end(run.state)
    assert list(run.memory.iterdir()) == [] and not (tmp_path / RECORD_FILE).exists()
    assert held_in_memory(run.memory, tmp_path) == (0, 0)
    assert list(list_checkpoints(tmp_path)) == [2]


def test_a_run_that_continues_at_its_end_saves(tmp_path: Path) -> None:
    """Catches a state in memory that is never saved to disk because the resumed run has no step left."""
    trained(tmp_path, 3)
    with started(tmp_path, 2) as run:
        assert run.found() == 3
        run.hook.on_end(run.state)
    assert list(list_checkpoints(tmp_path)) == [3]


def test_training_does_not_wait_for_the_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step that waits until the last local checkpoint is complete, and one that overwrites it before."""
    go_on, complete = threading.Event(), LocalSaves._complete

    def held_up(*arguments: Any) -> None:
        go_on.wait(60)
        complete(*arguments)

    monkeypatch.setattr(LocalSaves, "_complete", held_up)
    with started(tmp_path) as run:
        run.step()
        run.step()
        assert files_of(tmp_path) == {}
        go_on.set()
        run.wait()
        assert list(files_of(tmp_path)) == [1]
        run.step()
        run.wait()
        assert list(files_of(tmp_path)) == [1, 3]


def without_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_room_for_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that fails, or stops saving to disk, because its local checkpoints cannot be completed."""
    with started(tmp_path, behind=True, every_steps=2, keep=0) as run:
        run.step()
        run.wait()
        monkeypatch.setattr(local_saves_module, "commit_image", without_room)
        for step in range(2, 9):
            run.step(last=step == 8)
            time.sleep(0.05)
        run.hook.on_end(run.state)
    (event,) = [event for event in events_of(tmp_path) if event["event"] == "local_checkpoints_off"]
    assert event["level"] == "warning" and "No space left" in event["reason"]
    saved = [event["step"] for event in events_of(tmp_path) if event["event"] == "checkpoint_saved"]
    assert saved[-1] == 8 and len(saved) >= 3
    assert not (tmp_path / RECORD_FILE).exists() and list(run.memory.iterdir()) == []


def without_memory(run_dir: Path) -> list[int]:
    """Rank 1's node has no memory for images."""
    if open_control_plane().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    with started(run_dir, behind=True, every_steps=1, keep=0) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for step in (1, 2):
            run.step(last=step == 2)
            open_control_plane().barrier()
        run.hook.on_end(run.state)
    return list(list_checkpoints(run_dir))


@pytest.mark.distributed
def test_a_node_without_memory(tmp_path: Path) -> None:
    """Catches a run that fails where /dev/shm is small, or in which only some ranks keep local checkpoints."""
    found = run_ranks(without_memory, 2, tmp_path)
    assert all(2 in steps for steps in found)
    (event,) = [event for event in events_of(tmp_path) if event["event"] == "local_checkpoints_off"]
    assert "rank 1" in event["reason"] or "File too large" in event["reason"]


def test_the_folder_is_this_users_and_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a state planted by another user, and two processes that write to the same image."""
    monkeypatch.setattr(local_files_module, "_LOCK_WAIT_S", 0.1)
    (tmp_path / "elsewhere").mkdir()

    def opened() -> str:
        config = CheckpointConfig(local_every_steps=1, local_folder=str(tmp_path))
        saves = LocalSaves(config, RankEnvironment(lease=1), "what the run computes", timeout_s=20.0)
        saves.open(tmp_path, open_control_plane())
        return saves.refusal

    folder = node_folder(tmp_path, tmp_path)
    folder.symlink_to(tmp_path / "elsewhere")
    assert "belongs to another user" in opened()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    assert "others can write to it" in opened()
    folder.chmod(0o700)
    assert opened() == ""
    assert "another process of this run holds it" in opened()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_a_start_continues_from_stays(steps: int, tmp_path: Path) -> None:
    """Catches a start whose first copy overwrites the state that it resumed from: a crash meanwhile would lose it."""
    trained(tmp_path, steps)
    with started(tmp_path, 2) as run:
        never_completes(run)
        shards = run.engine.named_shards(owned=False)
        run.saves.copy(shards, run_record(steps + 1), 0, None, lambda _: None).sealed.result()
        assert list(files_of(tmp_path)) == [steps]


def test_memory_of_ranks_that_are_gone_is_freed(tmp_path: Path) -> None:
    """Catches memory of ranks that a smaller layout no longer has, and that is never freed."""
    trained(tmp_path, 2)
    folder = node_folder(tmp_path / "memory", tmp_path)
    shutil.copytree(folder / "rank_00000", folder / "rank_00007")
    trained(tmp_path, 1, start=2)
    assert [path.name for path in folder.iterdir()] == ["rank_00000"]


def test_memory_is_taken_once(tmp_path: Path) -> None:
    """Catches a start that allocates new memory instead of reusing that of the last start."""
    trained(tmp_path, 3)
    before = held_in_memory(tmp_path / "memory", tmp_path)[1]
    with started(tmp_path, 2) as run:
        assert run.saves.missing_bytes(run.engine.named_shards(owned=False)) == 0
        run.step()
        run.wait()
    assert held_in_memory(tmp_path / "memory", tmp_path) == (4, before)
