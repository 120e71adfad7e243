"""Saves to disks that are full, read-only or slow: real file systems, and real delays of system calls."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megads.checkpoint.config import list_checkpoints
from megads.checkpoint.read import find_checkpoint
from megads.checkpoint.writer import SaveState
from tests.checkpoint.test_writer import WITHIN_S, Loop, events_of, seeds_of, started, wait_for

PAGE = os.sysconf("SC_PAGESIZE")
_DISK_PAGES = 256


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mounts a file system at a folder; skips the test where that is not allowed."""
    folder.mkdir(exist_ok=True)
    found = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no file system can be mounted here: {found.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a file system of 1 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={_DISK_PAGES * PAGE}", "tmpfs") as folder:
        yield folder


def fill(disk: Path, free_pages: int) -> Path:
    """Fills the disk except for so many pages; returns the file to delete."""
    ballast, found = disk / "ballast", os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (found.f_bavail - free_pages) * PAGE)
    assert os.statvfs(disk).f_bavail == free_pages
    return ballast


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.fault(6)
@pytest.mark.parametrize("behind", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_at_any_page(behind: bool, disk: Path) -> None:
    """Catches a file of the protocol whose failed write ends the run, leaves a partial checkpoint, or is not made up
    for by the next save: the disk has one page more room each time, until a whole checkpoint fits."""
    failed = 0
    for free_pages in range(20):
        run_dir = disk / f"run-{free_pages}"
        run_dir.mkdir()
        with started() as writer:
            loop = Loop(run_dir, writer if behind else None, keep=0)
            loop.step()
            if behind:
                wait_for(SaveState.done, writer)
            ballast = fill(disk, free_pages)
            loop.step()
            while behind and writer.progress().state is SaveState.writing:
                continue
            found = find_checkpoint(run_dir, "auto")
            assert found is not None and found.state["step"] in (1, 2) and not found.skipped
            # A failed save frees its space at once; the next save removes what a writer process leaves.
            assert behind or not [name for name in names(run_dir) if name.endswith("partial")]
            ballast.unlink()
            loop.step()
            loop.step(last=True)
            loop.hook.on_end(loop.state)
            assert writer.pid or not behind, "the writer was given up"
        saved = seeds_of(run_dir)
        assert saved in ([1, 2, 3, 4], [1, 3, 4]), free_pages
        assert names(run_dir) == ["latest", *(f"step_{step:08d}" for step in saved)]
        failed += 2 not in saved
        subprocess.run(["rm", "-r", str(run_dir)], check=True)
    assert 3 <= failed < 20, "the disk was never full, or always"


@pytest.mark.fault(6)
@pytest.mark.parametrize("behind", [False, True])
def test_a_folder_that_becomes_read_only(behind: bool, tmp_path: Path) -> None:
    """Catches a run that ends because its disk is read-only for a while, a failed save taken for a successful one, and
    a checkpoint that cannot be read from such a disk."""
    with started() as writer:
        loop = Loop(tmp_path, writer if behind else None, keep=0)
        loop.step()
        if behind:
            wait_for(SaveState.done, writer)
        checkpoints = tmp_path / "checkpoints"
        # The mount is made read-only, as root ignores the mode of a folder.
        with mounted(checkpoints, "--bind", str(checkpoints)):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(checkpoints)], check=True)
            loop.step()
            assert seeds_of(tmp_path) == [1]
            found = find_checkpoint(tmp_path, "auto")
            assert found is not None and found.state["step"] == 1
        loop.step(last=True)
        loop.hook.on_end(loop.state)
    assert seeds_of(tmp_path) == [1, 3]
    assert [step for event, step in events_of(tmp_path) if event == "checkpoint_failed"] == [2]
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches training that waits for a disk on which every sync of a file or folder is slow, a checkpoint that
    contains later weights, and a last one that the run does not wait for."""
    fsync, this, deadline = os.fsync, os.getpid(), time.monotonic() + WITHIN_S

    def slowly(descriptor: int) -> None:
        if os.getpid() != this:
            while not (tmp_path / "trained").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            with (tmp_path / "syncs").open("a") as file:
                file.write("another\n")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    with started() as writer:
        loop = Loop(tmp_path, writer, keep=0)
        for _ in range(6):
            loop.step()
        assert writer.progress().state is SaveState.writing and list_checkpoints(tmp_path) == {}
        (tmp_path / "trained").touch()
        wait_for(SaveState.done, writer)
        loop.step()
        loop.step(last=True)
        loop.hook.on_end(loop.state)
    assert len((tmp_path / "syncs").read_text().splitlines()) >= 8
    assert seeds_of(tmp_path) == [1, 7, 8]
    assert [event for event in events_of(tmp_path) if event[0] == "checkpoint_put_off"] == [("checkpoint_put_off", 2)]
