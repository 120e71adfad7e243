"""A remote store returns what was stored, byte for byte: a real S3 server, and a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megads.tools.remote import store as store_module
from megads.tools.remote.store import RemoteError, RemoteStore, within
from tests.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["s3", "file"])
def store(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"{s3.url}/{tmp_path.name}" if request.param == "s3" else f"file://{tmp_path}/store")


def write(path: Path, size: int) -> Path:
    path.write_bytes(os.urandom(size))
    return path


def test_files_come_back(store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrongly split path, a lost empty file, parts out of order, and a digest other than the store's."""
    monkeypatch.setattr(store_module, "_PART_BYTES", 5 * 2**20)
    assert store.files("a") == {} and store.stat("a/x") is None and store.read("a/x") is None
    for size in (0, 1, 3000, 10 * 2**20, 21 * 2**20 + 7):
        local, told = write(tmp_path / "local", size), list[int]()
        found = store.put(local, f"a/b/{size}", told.append)
        assert found.bytes == size and sum(told) == size
        assert found.digest in ("", store.expected_digest(local)), "the store's digest is not what is expected of it"
        assert bool(found.digest) == store.url.startswith("s3"), "S3 tells no digest, or a folder does"
        assert store.holds(found, local, f"a/b/{size}")
        store.get(f"a/b/{size}", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == local.read_bytes()
    assert set(store.files("a")) == {f"b/{size}" for size in (0, 1, 3000, 10 * 2**20, 21 * 2**20 + 7)}
    store.remove("a/b/1")
    store.remove("a/b/1")
    assert "b/1" not in store.files("a")
    store.write("a/b/1", b"text")
    assert store.read("a/b/1") == b"text"


def test_a_digest_of_another_kind_is_no_fault(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bucket with KMS keys, whose ETag is not an MD5, that refuses uploads or accepts a damaged one."""
    store = RemoteStore(s3.url)
    monkeypatch.setattr(RemoteStore, "expected_digest", lambda *_: "0" * 32)
    local = write(tmp_path / "local", 5000)
    found = store.put(local, "kms")
    assert store.holds(found, local, "kms")
    content = bytearray(local.read_bytes())
    content[77] ^= 1
    s3.put("kms", bytes(content))
    changed = store.stat("kms")
    assert changed is not None and changed.bytes == found.bytes
    assert not store.holds(changed, local, "kms")


def test_what_arrives_damaged_is_refused(store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upload that is not verified: one bit flips on the way, in the driver."""
    local = write(tmp_path / "local", 5000)
    good = store._place

    def flipped(name: str, put: object, _write: object) -> None:
        content = bytearray(local.read_bytes())
        content[4999] ^= 1
        good(name, lambda path: store._fs.pipe_file(path, bytes(content)), lambda file: file.write(content))

    monkeypatch.setattr(store, "_place", flipped)
    with pytest.raises(RemoteError, match="is not what was sent"):
        store.put(local, "x")


def test_half_a_file_is_none(tmp_path: Path) -> None:
    """Catches a file in a folder that has its final name before it is complete."""
    store = RemoteStore(f"file://{tmp_path}/store")
    seen: list[list[str]] = []
    store.put(write(tmp_path / "local", 20 * 2**20), "x", lambda _: seen.append(sorted(store.files(""))))
    assert seen and all("x" not in names for names in seen[:-1])
    assert sorted(store.files("")) == ["x"]


def test_a_store_that_fails_says_why(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a driver's traceback, a missing bucket that is taken for an empty one, and a secret in a message."""
    local = write(tmp_path / "local", 100)
    for action in (lambda store: store.put(local, "x"), lambda store: store.write("x", b"")):
        with pytest.raises(RemoteError, match="bucket does not exist"):
            action(RemoteStore("s3://nobucket/x"))
    with pytest.raises(RemoteError, match="is not there"):
        RemoteStore(s3.url).get("nothing", tmp_path / "back")
    s3.order(refuse="PUT")
    with pytest.raises(RemoteError, match=r"(?i)denied|forbidden"):
        RemoteStore(s3.url).put(local, "x")
    s3.order()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(RemoteError, match="Unable to locate credentials") as refused:
        RemoteStore(s3.url).write("x", b"")
    assert "secret-of-a-test" not in str(refused.value)


def test_a_store_that_hangs_is_left(s3: S3Server) -> None:
    """Catches a start that hangs because the server does not answer."""
    store = RemoteStore(s3.url)
    s3.hang()
    try:
        with pytest.raises(RemoteError, match=r"not answered within 0\.5 s"):
            within(0.5, lambda: store.stat("x"), store.url)
    finally:
        s3.go_on()
    assert within(30, lambda: 3, "x") == 3
