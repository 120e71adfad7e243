"""Verification once a node."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megads.data import verified_once
from megads.data.verified_once import verify_once


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose times have settled, on a node that has verified nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(verified_once, "SETTLED_NS", -1)
    path = tmp_path / "map.npy"
    path.write_bytes(bytes(100))
    return path


def counter() -> tuple[list[int], Callable[[], None]]:
    calls: list[int] = []
    return calls, lambda: calls.append(1)


def test_once_until_something_changes(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches ranks that all read 14 GB at every start; and a verification that is left out although the content, what
    it is compared with, or the boot is another, or although it failed."""
    calls, verify = counter()
    for _ in range(3):
        verify_once([file], "sum 1", verify)
    assert len(calls) == 1
    verify_once([file], "sum 2", verify)
    assert len(calls) == 2
    status = file.stat()
    file.write_bytes(b"x" * 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    verify_once([file], "sum 1", verify)
    assert len(calls) == 3

    def fails() -> None:
        calls.append(1)
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            verify_once([file], "sum 3", fails)
    assert len(calls) == 5
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another\n")
    monkeypatch.setattr(verified_once, "_BOOT_ID", boot_id)
    verify_once([file], "sum 1", verify)
    assert len(calls) == 6


def test_fresh_files_and_foreign_folders_are_not_trusted(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a write within the tick of the clock in which the file was verified, and a folder that others can write
    to, who could say that a damaged file is whole."""
    calls, verify = counter()
    monkeypatch.setattr(verified_once, "SETTLED_NS", 3600 * 10**9)
    for _ in range(2):
        verify_once([file], "sum", verify)
    assert len(calls) == 2
    monkeypatch.setattr(verified_once, "SETTLED_NS", -1)
    verify_once([file], "sum", verify)
    next(tmp_path.glob("megads-verified-*")).chmod(0o777)
    verify_once([file], "sum", verify)
    assert len(calls) == 4


def test_a_full_disk_costs_a_verification_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches whole files taken for damaged because there is no room for a lock beside them."""
    calls, verify = counter()
    whole = Path.open

    def open_(path: Path, *args: Any, **options: Any) -> Any:
        if path.suffix == ".lock":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    verify_once([file], "sum", verify)
    assert len(calls) == 1


def test_ranks_wait_for_the_one_that_reads(file: Path) -> None:
    """Catches ranks of a node that start together and all read, or go on before the answer."""
    calls: list[float] = []
    ends: list[float] = []

    def verify() -> None:
        time.sleep(0.2)
        calls.append(time.monotonic())

    def rank() -> None:
        verify_once([file], "sum", verify)
        ends.append(time.monotonic())

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(calls) == 1 and len(ends) == 4 and min(ends) >= calls[0]
