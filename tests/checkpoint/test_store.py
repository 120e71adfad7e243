"""Writing checkpoints loses nothing: real processes, real kills, a write that the kernel refuses."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint.config import Retention, list_checkpoints, step_folder
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.rank_file import file_name, write_rank_file
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import (
    RanksFailed,
    Save,
    SaveError,
    agreed,
    hidden_folder,
    on_first,
    prepare,
    recover,
    save_checkpoint,
)
from megads.errors import CheckpointError, Fenced
from megads.runtime.distributed import open_control_plane
from megads.runtime.lease import Fence, claimed
from megads.runtime.slurm import SlurmJob
from tests.checkpoint.random_layouts import all_equal, global_tensors, random_layout, run_record, shards_of
from tests.distributed import run_ranks


def save(
    run_dir: Path,
    step: int,
    world_size: int = 1,
    keep: int = 0,
    seed: int | None = None,
    fence: Fence | None = None,
) -> Path:
    """Saves tensors drawn from `seed` (the step, unless given) in a random layout; collective."""
    layout = random_layout(step, world_size)[open_control_plane().rank]
    return save_checkpoint(
        run_dir,
        shards_of(layout, global_tensors(step if seed is None else seed)),
        run_record(step),
        Retention(keep),
        fence=fence,
        control=open_control_plane(),
    )


def holds(run_dir: Path, layout_seed: int = 99, world_size: int = 1) -> tuple[int, list[int]]:
    """Step of the newest usable checkpoint and the seeds whose tensors it holds, read in another random layout."""
    handle = find_checkpoint(run_dir, "auto", open_control_plane())
    assert handle is not None
    shards = shards_of(random_layout(layout_seed, world_size)[open_control_plane().rank])
    read_into(handle, shards)
    return handle.state["step"], [seed for seed in range(400) if all_equal(shards, global_tensors(seed))]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def latest(run_dir: Path) -> str:
    return (run_dir / "checkpoints" / "latest").read_text().strip()


def test_an_orphan_saves_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    """Catches ranks of an earlier start that commit a checkpoint, or delete what the new start is writing."""
    save(tmp_path, 100)
    with claimed(tmp_path, SlurmJob("1", 0, "c")) as orphan, claimed(tmp_path, SlurmJob("1", 1, "c")) as current:
        being_written = tmp_path / "checkpoints" / ".step_00000200.partial"
        being_written.mkdir()
        with pytest.raises(Fenced, match=r"lost .* to start 2"):
            save(tmp_path, 200, fence=Fence(tmp_path, orphan.number))
        assert being_written.exists() and latest(tmp_path) == "step_00000100"
        save(tmp_path, 200, fence=Fence(tmp_path, current.number))
    assert latest(tmp_path) == "step_00000200"


def test_litter(tmp_path: Path) -> None:
    """Catches stray files with the names of folders that make every save fail, or that count as checkpoints to keep."""
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in (".step_00000007.partial", ".step_00000007.replaced", ".step_00000007.removed", "step_00000002"):
        (folder / name).write_text("litter")
    (folder / "step_00000005").symlink_to(tmp_path / "nowhere")
    assert list(list_checkpoints(tmp_path)) == [1]
    for step in (2, 5):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000005"] and holds(tmp_path) == (5, [5])


def test_one_process(tmp_path: Path) -> None:
    """Catches leftover files, a wrong name, a wrong `latest`, or a run record that is not read back."""
    folder = save(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step_00000100"
    assert names(tmp_path) == ["latest", "step_00000100"] and latest(tmp_path) == "step_00000100"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    assert read_manifest(folder).run == run_record(100)
    assert holds(tmp_path) == (100, [100])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("writers", "readers"), [(3, 1), (1, 3), (2, 3)])
def test_any_layout_to_any_layout(writers: int, readers: int, tmp_path: Path) -> None:
    """Catches a shard read from the wrong slice of a tensor, and ranks that choose different checkpoints."""
    run_ranks(save, writers, tmp_path, 7, writers)
    assert run_ranks(holds, readers, tmp_path, 5, readers) == [(7, [7])] * readers


def test_keep(tmp_path: Path) -> None:
    """Catches one checkpoint too many kept or deleted, and later steps (of an abandoned run) deleted or counted."""
    for step in (1, 2, 3, 9):
        save(tmp_path, step)
    save(tmp_path, 4, keep=2)
    assert list(list_checkpoints(tmp_path)) == [3, 4, 9]
    assert latest(tmp_path) == "step_00000004"


def test_newest_is_the_last_written(tmp_path: Path) -> None:
    """Catches a run that went back to step 1 and, at its next start, loads step 9 of the abandoned part."""
    for step in (1, 9, 4):
        save(tmp_path, step)
    assert holds(tmp_path) == (4, [4])


def test_latest_after_a_kill_before_it_was_written(tmp_path: Path) -> None:
    """Catches a `latest` that names an older checkpoint permanently, because the kill came after the last commit but
    before `latest` was written: checkpoint.load=<the run> would load the older one."""
    for step in (1, 9, 4):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    litter = folder / ".latest.0123456789ab.partial"
    for before in ("step_00000009\n", "", None):
        litter.write_text("step_0000")
        if before is None:
            (folder / "latest").unlink()
        else:
            (folder / "latest").write_text(before)
        assert holds(tmp_path) == (4, [4])
        assert latest(tmp_path) == "step_00000004" and not litter.exists()
    written = (folder / "latest").stat().st_ino
    assert holds(tmp_path) == (4, [4])
    assert (folder / "latest").stat().st_ino == written, "rewritten for nothing"


def test_a_latest_that_is_no_file_is_replaced(tmp_path: Path) -> None:
    """Catches a pipe of this name, at which every start waited for a writer that never comes."""
    save(tmp_path, 1)
    path = tmp_path / "checkpoints" / "latest"
    path.unlink()
    os.mkfifo(path)
    found = threading.Thread(target=recover, args=(tmp_path,), daemon=True)
    found.start()
    found.join(20)
    assert not found.is_alive() and latest(tmp_path) == "step_00000001"


def test_same_step_again(tmp_path: Path) -> None:
    """Catches a second save of a step (resume, then save) that fails or leaves the old contents."""
    save(tmp_path, 5, seed=1)
    save(tmp_path, 5, seed=2)
    assert holds(tmp_path) == (5, [2])
    assert names(tmp_path) == ["latest", "step_00000005"]


def save_incomplete(run_dir: Path, missing: str) -> str:
    shards = shards_of(random_layout(1, 2)[open_control_plane().rank], global_tensors(1))
    keys = {shard.key for shard in shards}
    if missing == "a part":
        shards = [shard for shard in shards if open_control_plane().rank == 0 or shard.key != "weight/a"]
    else:
        shards = [shard for shard in shards if shard.key != "weight/b"]
    try:
        save_checkpoint(run_dir, shards, run_record(1), keys=keys, control=open_control_plane())
    except SaveError as error:
        return str(error)
    return "saved"


@pytest.mark.fault(9)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("missing", "reason"),
    [("a part", "weight/a of shape [17, 12] is not stored exactly once"), ("a key", "no rank owns weight/b")],
)
def test_incomplete_set_is_not_committed(missing: str, reason: str, tmp_path: Path) -> None:
    """Catches a checkpoint that is committed although a tensor, or a part of it, is missing."""
    for message in run_ranks(save_incomplete, 2, tmp_path, missing):
        assert reason in message
    assert names(tmp_path) == []


@pytest.mark.parametrize(("seen", "reason"), [(99, "has 99 bytes as rank 0 sees it"), (None, "must be shared by all")])
def test_what_rank_0_sees_of_the_others(seen: int | None, reason: str, tmp_path: Path) -> None:
    """Catches a committed checkpoint with a missing or truncated file, on a filesystem that is not shared or lags."""
    partial, final = hidden_folder(step_folder(tmp_path, 1), "partial"), step_folder(tmp_path, 1)
    prepare(partial)
    tensors = global_tensors(1)
    written = [
        write_rank_file(partial, rank, shards_of(layout, tensors)) for rank, layout in enumerate(random_layout(1, 2))
    ]
    if seen is None:
        (partial / file_name(1)).unlink()
    else:
        os.truncate(partial / file_name(1), seen)
    with pytest.raises(CheckpointError, match=reason):
        Save(final, run_record(1), {}).commit(written)
    assert not final.exists()


def save_with_one_full_disk(run_dir: Path) -> list[Any]:
    """Rank 1 cannot write more than 1 KiB per file: the kernel refuses the write, as on a full disk."""
    save(run_dir, 1, world_size=2)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if open_control_plane().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, unlimited[1]))
    outcome: list[Any] = []
    try:
        save(run_dir, 2, world_size=2)
    except SaveError as error:
        assert error.disk_full
        outcome = [str(error), error.previous]
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    outcome += [names(run_dir), holds(run_dir, world_size=2)]
    save(run_dir, 3, world_size=2)
    return [*outcome, holds(run_dir, world_size=2)]


@pytest.mark.fault(6)
@pytest.mark.distributed
def test_full_disk_on_one_rank(tmp_path: Path) -> None:
    """Catches a deadlock of the other ranks, a partial checkpoint that is never deleted, and a lost earlier one."""
    for message, previous, left, before, after in run_ranks(save_with_one_full_disk, 2, tmp_path):
        assert "checkpoint of step 2 not saved, step_00000001 remains the last one: rank 1: cannot write" in message
        assert "File too large" in message and previous == "step_00000001"
        assert left == ["latest", "step_00000001"]
        assert before[0] == 1 and 1 in before[1] and after[0] == 3


def test_a_name_is_no_full_disk(tmp_path: Path) -> None:
    """Catches the oldest checkpoints deleted because a path in the error message reads like a full disk."""
    run_dir = tmp_path / "No space left on device"
    run_dir.mkdir()
    (run_dir / "checkpoints").touch()
    with pytest.raises(SaveError, match="No space left on device") as caught:
        save(run_dir, 1)
    assert not caught.value.disk_full


def test_no_earlier_checkpoint(tmp_path: Path) -> None:
    """Catches an error that claims an earlier checkpoint where there is none."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError):
        save(tmp_path, 1)
    (tmp_path / "checkpoints").unlink()
    shards = shards_of(random_layout(1, 1)[0], global_tensors(1))
    with pytest.raises(SaveError, match="there is no earlier one") as caught:
        save_checkpoint(tmp_path, shards[1:], run_record(1))
    assert caught.value.previous is None


def save_killed_at(run_dir: Path, event_number: int, step: int) -> str:
    """Saves, and kills itself with SIGKILL right before the given file operation (open, mkdir, rename, remove, ...)."""
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        touches = bool(arguments) and isinstance(arguments[0], str | os.PathLike) and str(run_dir) in str(arguments[0])
        if touches and (event.startswith(("os.", "shutil.")) or event == "open"):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(run_dir, step, keep=1, seed=2)
    return "saved"


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.distributed
@pytest.mark.parametrize("step", [1, 2])
def test_killed_at_every_file_operation(step: int, tmp_path: Path) -> None:
    """Catches a kill that leaves neither the old nor the new checkpoint complete; step 1 replaces its own."""
    for event_number in range(1, 200):
        run_dir = tmp_path / str(event_number)
        save(run_dir, 1)
        try:
            assert run_ranks(save_killed_at, 1, run_dir, event_number, step) == ["saved"]
            break
        except AssertionError as error:
            assert "the process died" in str(error)
        found_step, seeds = holds(run_dir)
        assert (found_step, seeds) in ((1, [1]), (step, [2]))
        read_manifest(run_dir / "checkpoints" / latest(run_dir))
        save(run_dir, 3, keep=1)
        assert holds(run_dir) == (3, [3])
        assert names(run_dir) == ["latest", "step_00000003"], "leftovers of the killed save"
    assert event_number > 10, "the kills did not hit the save"
    assert holds(run_dir) == (step, [2])


def save_until_killed(run_dir: Path, first_step: int, delay_s: float, victim: int) -> None:
    if open_control_plane().rank == victim:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start, step = time.monotonic(), first_step
    while time.monotonic() - start < 20:
        save(run_dir, step, world_size=2, keep=2)
        step += 1


@pytest.mark.slow
@pytest.mark.distributed
def test_rank_killed_at_random_times(tmp_path: Path) -> None:
    """Catches a checkpoint of two ranks with a missing or truncated file that looks committed."""
    draw = random.Random(11)
    save(tmp_path, 1)
    last = 1
    for attempt in range(8):
        with pytest.raises(AssertionError, match=r"the process died|Connection|closed|reset"):
            run_ranks(save_until_killed, 2, tmp_path, last + 1, draw.uniform(0.01, 0.3), attempt % 2)
        found, seeds = holds(tmp_path)
        assert found >= last and seeds == [found]
        assert (tmp_path / "checkpoints" / latest(tmp_path) / "manifest.json").exists()
        last = found
    assert last > 1, "no save ever finished"


def outcomes() -> list[object]:
    control = open_control_plane()

    def fail_on(failing: int) -> int:
        if control.rank == failing:
            raise OSError(28, "No space left on device", "some/file")
        return control.rank

    results: list[object] = [
        agreed(control, lambda: control.rank),
        on_first(control, lambda: f"by {control.rank}", str),
    ]
    for action in (lambda: agreed(control, lambda: fail_on(1)), lambda: on_first(control, lambda: fail_on(0), int)):
        try:
            results.append(action())
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.distributed
def test_ranks_agree() -> None:
    """Catches a failure that one rank raises while the others continue, or wait for it (a deadlock)."""
    failures = [f"rank {index}: some/file: No space left on device" for index in (1, 0)]
    assert run_ranks(outcomes, 3) == [[index, "by 0", *failures] for index in range(3)]


def errnos_of_many() -> list[int]:
    control = open_control_plane()

    def fail() -> None:
        try:
            raise OSError(errno.EDQUOT if control.rank == 3 else errno.EACCES, "whatever the locale calls it", "a/file")
        except OSError as error:
            raise CheckpointError(f"cannot write: {error.strerror}") from error

    try:
        agreed(control, fail)
    except RanksFailed as error:
        assert "and 1 more ranks" in str(error)
        return sorted(error.errnos)
    return []


@pytest.mark.distributed
def test_errors_of_the_system_keep_their_numbers() -> None:
    """Catches a full disk that goes undetected if the message omits the failing rank or is in another language."""
    assert run_ranks(errnos_of_many, 4) == [sorted([errno.EACCES, errno.EDQUOT])] * 4


def test_without_process_group() -> None:
    """Catches a single-process tool that needs a process group."""
    failure = "rank 0: some/file: No space left on device"
    assert outcomes() == [0, "by 0", 0, failure]
