"""The disk cache of large arrays: which process builds, what happens on a full disk, and which files are trusted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.data.sampling import cached_arrays
from megads.data.sampling.cached_arrays import ArrayCache, CachedArrays, OpenArray
from megads.errors import ConfigError
from megads.runtime.claims import Claims

WANTED = CachedArrays("abc", {"seed": 1}, ("first", "second"), "index map", 1 << 20)


def write(open_array: OpenArray) -> None:
    for number, name in enumerate(WANTED.arrays):
        with open_array(name) as file:
            np.save(file, np.full(1 << 16, number))


def forbidden(_: OpenArray) -> None:
    pytest.fail("built again")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrayCache:
    """Returns an empty cache next to a dataset; the user's cache is in the same temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    return ArrayCache(str(tmp_path / "corpus"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: Path) -> list[Path]:
    """Returns all files except locks."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_arrays_that_fit_nowhere_are_refused(
    cache: ArrayCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a full disk that makes every rank build gigabytes in its memory, and partial maps that are left on it."""

    def second_is_larger(open_array: OpenArray) -> None:
        write(open_array)
        with open_array("second") as file:
            file.write(bytes(1 << 20))

    with largest_file(700_000):
        assert cache.get(WANTED, second_is_larger) is None, "small ones are built in memory"
        monkeypatch.setattr(cached_arrays, "MOST_BYTES_IN_MEMORY", 1 << 19)
        with pytest.raises(ConfigError, match=r"no folder takes the index map .*corpus.cache .*File too large.*users"):
            cache.get(WANTED, second_is_larger)
    assert files(tmp_path) == []


def test_disk_space_is_checked_before_building(tmp_path: Path) -> None:
    """Catches a build that runs out of disk space at its end instead of being refused at once."""
    huge = CachedArrays("abc", {}, ("first",), "index map", 1 << 60)
    with pytest.raises(ConfigError, match=r"data.cache_dir.*No space left on device: 1152921504.* GB wanted"):
        ArrayCache("", str(tmp_path)).get(huge, forbidden)


def test_caches_of_earlier_versions_are_verified_by_their_own_checksums(
    cache: ArrayCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches maps of earlier versions that are rebuilt, or used without verification."""
    cache.get(WANTED, write)
    record = tmp_path / "corpus.cache" / "abc.json"
    content = json.loads(record.read_text())
    for name, entry in content["files"].items():
        whole = (tmp_path / "corpus.cache" / f"abc-{name}.npy").read_bytes()
        content["files"][name] = {"bytes": entry["bytes"], "sha256": hashlib.sha256(whole).hexdigest()}
    record.write_text(json.dumps(content))
    assert cache.get(WANTED, forbidden) is not None
    array = tmp_path / "corpus.cache" / "abc-second.npy"
    damaged = bytearray(array.read_bytes())
    damaged[-1] ^= 1
    array.write_bytes(damaged)
    found = cache.get(WANTED, write)
    assert found is not None and found["second"][-1] == 1
    assert "abc-second.npy does not match its checksum" in caplog.text


def test_a_waiting_process_reports_the_builder(
    cache: ArrayCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches ranks that wait without saying for what, and a second builder."""
    at_work, go_on = threading.Event(), threading.Event()

    def slowly(open_array: OpenArray) -> None:
        at_work.set()
        assert go_on.wait(60)
        write(open_array)

    builder = threading.Thread(target=lambda: cache.get(WANTED, slowly))
    builder.start()
    assert at_work.wait(60)
    cache.build_ahead(WANTED, forbidden)
    with caplog.at_level(logging.INFO):
        waiting = threading.Thread(target=lambda: cache.get(WANTED, forbidden))
        waiting.start()
        while "waiting for" not in caplog.text:
            time.sleep(0.01)
    go_on.set()
    builder.join()
    waiting.join()
    assert f"waiting for process {os.getpid()} on " in caplog.text
    assert cache.get(WANTED, forbidden) is not None


def test_one_node_builds_where_nodes_share_no_locks(
    cache: ArrayCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches maps that every node of a cluster builds, and nodes that wait for a builder that died."""
    monkeypatch.setattr(cached_arrays, "_lock", lambda file, wait: True)
    monkeypatch.setattr(cached_arrays, "_POLL_S", 0.01)
    built: list[int] = []

    def slowly(open_array: OpenArray) -> None:
        built.append(threading.get_ident())
        time.sleep(0.3)
        write(open_array)

    # A builder that was killed on a node of its own.
    dead = Claims(tmp_path / "corpus.cache" / "abc.builders", ["abc"])
    dead.__enter__()
    assert dead.take("abc")
    path = tmp_path / "corpus.cache" / "abc.builders" / "participants" / dead.identity
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "another"}))
    os.utime(path, (1, 1))
    with ThreadPoolExecutor(4) as nodes, caplog.at_level(logging.INFO):
        found = list(nodes.map(lambda _: cache.get(WANTED, slowly), range(4)))
    dead.__exit__(None, None, None)
    assert len(built) == 1 and all(arrays is not None and arrays["second"][-1] == 1 for arrays in found)
    assert caplog.text.count("waiting for process") == 3 and caplog.text.count("built the index map") == 1
    assert {path.name for path in files(tmp_path)} == {"abc.json", "abc-first.npy", "abc-second.npy"}


def test_files_of_killed_builders_are_removed(cache: ArrayCache, tmp_path: Path) -> None:
    """Catches partial files that are never removed, and removed files of a builder at work on another node."""
    folder = tmp_path / "corpus.cache"
    folder.mkdir()
    old, young, foreign = (
        folder / f".{name}.partial" for name in ("abc-first.npy.1", "abc-first.npy.2", "abd-x.npy.1")
    )
    for path in (old, young, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    cache.get(WANTED, write)
    assert (old.exists(), young.exists(), foreign.exists()) == (False, True, True)


def test_a_built_array_is_not_verified_again_on_its_node(cache: ArrayCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of a node that all read gigabytes that one of them has just written and verified."""
    monkeypatch.setattr(cached_arrays, "MOST_BYTES_VERIFIED_BY_ALL", 0)
    read: list[Any] = []
    records = cached_arrays._file_records

    def counting(*given: Any) -> Any:
        read.append(given)
        return records(*given)

    monkeypatch.setattr(cached_arrays, "_file_records", counting)
    for _ in range(3):
        assert cache.get(WANTED, write) is not None
    assert len(read) == 1
