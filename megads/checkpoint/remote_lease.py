"""Lease to upload a run's checkpoints: two run directories of the same run, on two machines, would mix their files.

<url>/<run id>/uploader.json names the process that holds it, which rewrites the file periodically. No clocks are
compared: a second process watches the file for a while, and takes over if it does not change.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from megads.checkpoint.remote import RemoteError, RemoteStore
from megads.runtime import environment
from megads.runtime.files import parse_json
from megads.runtime.lease import machine_id, process_birth

LEASE_FILE = "uploader.json"
BEAT_S = 20.0
SILENT_S = 3.5 * BEAT_S
_SETTLE_S = 1.0
_POLL_S = 2.0


class RemoteInUse(RemoteError):
    """Another process uploads this run's checkpoints."""


class RemoteLease:
    """The lease to upload a run's checkpoints; used as a context manager once it is taken.

    Args:
        store: store of the run.
        beat_s: heartbeat interval in seconds.
    """

    def __init__(self, store: RemoteStore, beat_s: float = BEAT_S):
        self._store, self._beat_s = store, beat_s
        self._token, self._beats = uuid.uuid4().hex, 0
        self._lost = ""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, go_on: Callable[[], None], waits: Callable[[str], None], silent_s: float = SILENT_S) -> None:
        """Takes the lease as soon as no other live process holds it.

        Args:
            go_on: called while waiting; an exception that it raises ends the wait.
            waits: called once with a message that names the holder.
            silent_s: a holder without a heartbeat for this long is considered dead.

        Raises:
            RemoteError: the store fails.
        """
        seen, since, told = b"", time.monotonic(), False
        while True:
            text = self._store.read(LEASE_FILE) or b""
            if text != seen:
                seen, since = text, time.monotonic()
            holder = _parsed(text)
            if holder is None or _is_dead(holder) or time.monotonic() - since > silent_s:
                self._beat()
                time.sleep(_SETTLE_S)
                if self.is_held():
                    self._thread = threading.Thread(target=self._keep, name="remote lease", daemon=True)
                    self._thread.start()
                    return
            elif not told:
                told = True
                waits(f"process {holder.get('pid')} on {holder.get('node')} uploads to {self._store.url}")
            go_on()
            time.sleep(min(_POLL_S, silent_s / 4))

    def is_held(self) -> bool:
        """Whether this process still holds the lease, according to the store."""
        holder = _parsed(self._store.read(LEASE_FILE) or b"")
        return holder is not None and holder.get("token") == self._token

    def require(self) -> None:
        """Raises RemoteInUse if this process knows that another one has taken over."""
        if self._lost:
            raise RemoteInUse(self._lost)

    def _beat(self) -> None:
        self._beats += 1
        me = {"token": self._token, "beat": self._beats, "node": environment.node_name(), "pid": os.getpid()}
        me |= {"machine": machine_id(), "born": process_birth(os.getpid())}
        self._store.write(LEASE_FILE, json.dumps(me).encode())

    def _keep(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                holder = _parsed(self._store.read(LEASE_FILE) or b"")
                if holder is not None and holder.get("token") != self._token:
                    self._lost = f"process {holder.get('pid')} on {holder.get('node')} uploads to {self._store.url}"
                    return
                self._beat()
            except RemoteError:
                # Uploads detect and report errors of the store.
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            try:
                if self.is_held():
                    self._store.remove(LEASE_FILE)
            except RemoteError:
                # Without its heartbeats, another process can take over the lease.
                return


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder is a process of this machine that has ended."""
    pid = holder.get("pid")
    if holder.get("machine") != machine_id() or not isinstance(pid, int):
        return False
    return process_birth(pid) != holder.get("born")
