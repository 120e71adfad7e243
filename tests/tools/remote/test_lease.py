"""One process at a time uploads a run's checkpoints, wherever it runs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from megads.tools.remote import upload
from megads.tools.remote.store import RemoteStore
from megads.tools.remote.upload import LEASE_FILE, RemoteInUse, RemoteLease


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    monkeypatch.setattr(upload, "_SETTLE_S", 0.05)
    return RemoteStore(f"file://{tmp_path}/store")


class Impatient(Exception):
    """The wait was long enough for the test."""


def take(lease: RemoteLease, silent_s: float = 60.0, wait_s: float = 1.0) -> list[str]:
    told, deadline = list[str](), time.monotonic() + wait_s

    def go_on() -> None:
        if time.monotonic() > deadline:
            raise Impatient

    lease.take(go_on, told.append, silent_s)
    return told


def write_holder(store: RemoteStore, **fields: object) -> None:
    store.write(LEASE_FILE, json.dumps({"token": "other", "beat": 1, "node": "far", "pid": 7, **fields}).encode())


def test_a_second_one_waits_and_is_told(store: RemoteStore) -> None:
    """Catches two machines that mix the files of one run, and a lease that outlives its holder."""
    with RemoteLease(store) as first, RemoteLease(store) as second:
        assert take(first) == [] and first.is_held()
        with pytest.raises(Impatient):
            take(second, silent_s=60)
        assert not second.is_held() and first.is_held()
    assert store.read(LEASE_FILE) is None, "it is not released"
    with RemoteLease(store) as third:
        assert take(third) == []


def test_a_holder_far_away_that_is_silent_is_gone(store: RemoteStore) -> None:
    """Catches a lost machine that keeps its successor from uploading, and one that uploads again after a pause."""
    write_holder(store)
    with RemoteLease(store, beat_s=0.05) as lease:
        told = take(lease, silent_s=0.4, wait_s=30)
        assert told == [f"process 7 on far uploads to {store.url}"] and lease.is_held()
        deadline = time.monotonic() + 30
        with pytest.raises(RemoteInUse):
            while time.monotonic() < deadline:
                write_holder(store, beat=2)  # again and again: a heartbeat that is under way may overwrite the first
                lease.require()
                time.sleep(0.02)
        assert not lease.is_held()
    assert json.loads(store.read(LEASE_FILE) or b"")["token"] == "other", "another's lease was removed"


def test_a_holder_far_away_that_beats_is_alive(store: RemoteStore) -> None:
    """Catches a takeover from a process that still sends heartbeats."""
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            write_holder(store, beat=number)

    write_holder(store)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with RemoteLease(store) as lease, pytest.raises(Impatient):
            take(lease, silent_s=0.6, wait_s=2)
    finally:
        ended.set()
        thread.join()


def test_a_dead_process_of_this_machine_is_gone_at_once(store: RemoteStore) -> None:
    """Catches a restart after a kill that waits a minute for a dead process."""
    dead = {"machine": upload.machine_id(), "pid": 2**22 + 1, "born": 1}
    write_holder(store, **dead)
    with RemoteLease(store) as lease:
        assert take(lease) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_file_holds_nothing(content: bytes, store: RemoteStore) -> None:
    """Catches a damaged lease file that blocks every later process."""
    store.write(LEASE_FILE, content)
    with RemoteLease(store) as lease:
        assert take(lease) == []
