"""Verification of files once per node."""

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

from megads.data.indexed import dataset as dataset_module
from megads.data.indexed import verified_once
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.verified_once import computed_once, verify_once
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import DataError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with settled times, on a node that has verified nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(verified_once, "SETTLED_NS", -1)
    path = tmp_path / "map.npy"
    path.write_bytes(bytes(100))
    return path


def counter() -> tuple[list[int], Callable[[], None]]:
    calls: list[int] = []
    return calls, lambda: calls.append(1)


def test_a_file_is_verified_once_until_it_changes(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches ranks that all read 14 GB at every start, and a verification that is skipped although the content, the
    expected checksum or the boot has changed, or although it failed."""
    calls, verify = counter()
    for _ in range(3):
        verify_once([file], "sum 1", verify)
    assert len(calls) == 1
    verify_once([file], "sum 2", verify)
    assert len(calls) == 2
    status = file.stat()
    file.write_bytes(b"x" * 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # like a copy that preserves times
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
    """Catches a missed write within the clock tick of the verification, and a trusted folder that other users can write
    to, who could mark a damaged file as verified."""
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
    """Catches intact files reported as damaged because there is no space for a lock file."""
    calls, verify = counter()
    whole = Path.open

    def open_(path: Path, *args: Any, **options: Any) -> Any:
        if path.suffix == ".lock":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    verify_once([file], "sum", verify)
    assert len(calls) == 1


def test_ranks_wait_for_the_one_that_verifies(file: Path) -> None:
    """Catches ranks of a node that start together and all read, or continue before the result."""
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


def test_a_verifications_result_is_remembered_by_its_key(file: Path, tmp_path: Path) -> None:
    """Catches a result that is lost, another key's, or truncated by a full disk, and one of a file that changed while
    it was read, which would be used for the old content."""
    answers = iter("abcdef")
    assert [computed_once([file], "digest", lambda: next(answers)) for _ in range(2)] == ["a", "a"]
    assert computed_once([file], "other digest", lambda: next(answers)) == "b"
    for memory in tmp_path.glob("megads-verified-*/*"):
        memory.write_bytes(memory.read_bytes()[:-3])
    assert [computed_once([file], "digest", lambda: next(answers)) for _ in range(2)] == ["c", "c"]
    before = file.read_bytes()

    def changes() -> str:
        file.write_bytes(b"another")
        return next(answers)

    assert computed_once([file], "third", changes) == "d"
    status = file.stat()
    file.write_bytes(before)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert computed_once([file], "third", lambda: next(answers)) == "e"


@pytest.fixture
def prefix(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset whose index counts as large."""
    monkeypatch.setattr(dataset_module, "LARGE_INDEX_BYTES", 0)
    prefix = file.with_name("corpus")
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for length in (3, 4, 5):
            writer.append([1] * length)
    return prefix


def test_an_index_is_verified_by_one_rank_only(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that all check and hash a 20 GB index at every start."""
    digest = IndexedDataset(prefix).fingerprint()
    with monkeypatch.context() as patch:
        for name in ("_check_index", "_hash_index"):
            patch.setattr(IndexedDataset, name, lambda _: pytest.fail("read again"))
        assert IndexedDataset(prefix).fingerprint() == digest
        with pytest.raises(pytest.fail.Exception, match="read again"):
            IndexedDataset(prefix, anew=True)
    monkeypatch.setattr(dataset_module, "LARGE_INDEX_BYTES", 1 << 30)
    assert IndexedDataset(prefix).fingerprint() == digest


def test_a_changed_index_is_read_again(prefix: Path) -> None:
    """Catches a damaged index taken for the intact one of the same size and time, and a digest of the file that
    replaced the opened one."""
    opened = IndexedDataset(prefix)
    digest, path = opened.fingerprint(), dataset_module.idx_path(prefix)
    whole, status = path.read_bytes(), path.stat()
    other = path.with_name("other.idx")
    other.write_bytes(whole[:34] + bytes([4, 0, 0, 0, 3, 0, 0, 0]) + whole[42:])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert opened.fingerprint() == digest
    with pytest.raises(DataError, match="sequence 1 starts at byte 6"):
        IndexedDataset(prefix)
    path.write_bytes(whole)
    assert IndexedDataset(prefix).fingerprint() == digest
    with dataset_module.bin_path(prefix).open("ab") as file:
        file.write(b"ab")
    with pytest.raises(DataError, match="has 26 bytes"):
        IndexedDataset(prefix)
