"""Uploads committed checkpoints of a run to a store, where they become visible once complete.

<url>/<run id>/checkpoints/step_00000100/rank_00000.safetensors   identical to the files of the run directory
                                         metrics.jsonl            its content when the checkpoint was saved
                                         manifest.json            uploaded last: commits the checkpoint in the store
<url>/<run id>/configs/ tokenizer.json ...                        records of the run that a start needs

During its upload, a checkpoint is pinned by hard links in checkpoints/.step_00000100.upload, so retention may remove
the original. Each file that was uploaded and verified in the store has a marker <file>.sent next to it. Nodes that
share an upload, and a process that continues the upload of a killed one, read these markers.

Two run directories of the same run, on two machines, would mix their files, so uploading takes a lease:
<url>/<run id>/uploader.json names the process that holds it, which rewrites the file periodically. No clocks are
compared: a second process watches the file for a while, and takes over if it does not change.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megads.api import (
    CONFIG_FILE,
    DATA_FILE,
    HUGGING_FACE_FOLDER,
    MANIFEST_FILE,
    METRICS_FILE,
    STARTS_FOLDER,
    TOKENIZER_FILE,
    CheckpointError,
    Manifest,
    atomic_writer,
    checkpoints_folder,
    parse_json,
    read_manifest,
    read_regular,
    template_path,
)
from megads.checkpoint.config import Retention, step_folder, step_of
from megads.checkpoint.rank_file import verify_tensors
from megads.checkpoint.store import hidden_folder
from megads.runtime import environment
from megads.runtime.lease import machine_id, process_birth
from megads.runtime.metrics import LedgerRecord, begins_as
from megads.tools.remote.store import RemoteError, RemoteFile, RemoteStore

CHECKPOINTS = "checkpoints"
PIN = "upload"
_MARKER = ".sent"
_POLL_S = 0.5
TAKE_OVER_S = 120.0
"""If the other nodes complete no file for this long, node 0 uploads one of their files itself."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a store, complete or not.

    Attributes:
        step: step in its name.
        files: files in its folder, by name.
        manifest: its manifest; None if it is missing or damaged.
        problem: why it is not usable, judged from the listing and the manifest only; empty if it is usable.
    """

    step: int
    files: Mapping[str, RemoteFile]
    manifest: Manifest | None
    problem: str

    @property
    def sequence(self) -> int:
        """See Manifest; 0 if the checkpoint is not usable."""
        return self.manifest.sequence if self.manifest is not None and not self.problem else 0


def remote_folder(step: int) -> str:
    """The folder of a checkpoint in a store."""
    return f"{CHECKPOINTS}/{step_folder(Path(), step).name}"


def remote_checkpoints(store: RemoteStore) -> dict[int, RemoteCheckpoint]:
    """Checkpoints of a run in a store, by step, ascending, including those without a manifest.

    Raises:
        RemoteError: the store fails.
    """
    folders: dict[int, dict[str, RemoteFile]] = {}
    for path, file in store.files(CHECKPOINTS).items():
        folder, _, name = path.partition("/")
        step = step_of(Path(folder))
        if step is not None and name:
            folders.setdefault(step, {})[name] = file
    return {step: _remote_checkpoint(store, step, files) for step, files in sorted(folders.items())}


def _remote_checkpoint(store: RemoteStore, step: int, files: Mapping[str, RemoteFile]) -> RemoteCheckpoint:
    folder = remote_folder(step)
    text = store.read(f"{folder}/{MANIFEST_FILE}") if MANIFEST_FILE in files else None
    if text is None:
        return RemoteCheckpoint(step, files, None, "its upload was not completed")
    try:
        manifest = Manifest.decode(text)
        manifest.check(step)
    except CheckpointError as error:
        return RemoteCheckpoint(step, files, None, f"{MANIFEST_FILE}: {error}")
    return RemoteCheckpoint(step, files, manifest, _missing(manifest, files))


def _missing(manifest: Manifest, files: Mapping[str, RemoteFile]) -> str:
    for name, record in sorted(manifest.files.items()):
        if name not in files:
            return f"{name} is missing"
        if files[name].bytes != record.bytes:
            return f"{name} has {files[name].bytes} bytes instead of {record.bytes}"
    return ""


def pins(run_dir: Path) -> list[Path]:
    """Folders of the checkpoints pinned for upload, complete ones only."""
    found = checkpoints_folder(run_dir).glob(f".step_*.{PIN}")
    return sorted(path for path in found if (path / MANIFEST_FILE).exists())


def pin_checkpoint(folder: Path) -> Path | None:
    """Pins a checkpoint by hard links until `unpin`; an existing pin is kept.

    Args:
        folder: folder of the committed checkpoint.

    Returns:
        The folder of the links; None if the checkpoint was removed or replaced meanwhile, or is not usable.

    Raises:
        OSError: the links cannot be made.
    """
    pin = hidden_folder(folder, PIN)
    try:
        manifest = read_manifest(folder)
        text = read_regular(folder / MANIFEST_FILE)
    except (CheckpointError, FileNotFoundError):
        return None
    with suppress(OSError):
        if read_regular(pin / MANIFEST_FILE) == text:
            return pin
    unpin(pin)
    try:
        pin.mkdir()
        for name in manifest.files:
            os.link(folder / name, pin / name)
        ledger, metrics = manifest.run.ledger, folder.parent.parent / METRICS_FILE
        if ledger is not None and metrics.is_file() and begins_as(metrics, ledger):
            with atomic_writer(pin / METRICS_FILE) as copy:
                _copy_beginning(metrics, copy.write, ledger)
        os.link(folder / MANIFEST_FILE, pin / MANIFEST_FILE)
        if read_regular(pin / MANIFEST_FILE) == text:
            return pin
    except FileNotFoundError:
        pass  # retention has removed the checkpoint meanwhile, so there is nothing to upload
    except OSError:
        unpin(pin)
        raise
    unpin(pin)
    return None


def _copy_beginning(path: Path, write: Callable[[bytes], object], ledger: LedgerRecord) -> None:
    left = ledger.bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            write(block)
            left -= len(block)


def unpin(pin: Path) -> None:
    """Removes a pin, its manifest first, so that no other node takes the rest for a pinned checkpoint."""
    with suppress(OSError):
        (pin / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(pin, ignore_errors=True)


class CheckpointUpload:
    """The upload of one checkpoint, of which each node uploads a share of the files.

    Args:
        store: store of the run.
        run_dir: the run's folder.
        pin: folder of the pinned checkpoint.
        go_on: called before every file; an exception that it raises stops the upload, which can be continued later.
        tell: called with the completed bytes of this node's share.
        node: number of this node.
        num_nodes: number of nodes that share the upload.

    Raises:
        CheckpointError: the pinned manifest is damaged or inconsistent.
    """

    def __init__(
        self,
        store: RemoteStore,
        run_dir: Path,
        pin: Path,
        go_on: Callable[[], None] = lambda: None,
        tell: Callable[[int], None] = lambda _: None,
        node: int = 0,
        num_nodes: int = 1,
    ):
        self._store, self._run_dir, self._pin, self._go_on, self._tell = store, run_dir, pin, go_on, tell
        step = step_of(Path(pin.name.removeprefix(".").removesuffix(f".{PIN}")))
        assert step is not None, pin
        # `read_manifest` cannot be used: it expects the step in a folder name without the pin's prefix and suffix.
        self.manifest = Manifest.decode(read_regular(pin / MANIFEST_FILE))
        self.manifest.check(step)
        self.step, self._folder = step, remote_folder(step)
        self._names = sorted(self.manifest.files)
        self._share = self._names[node::num_nodes]
        self._done_bytes = 0
        self.sent_bytes = 0
        """Bytes of the files that this process has uploaded."""

    @property
    def share_bytes(self) -> int:
        """Bytes of the files in this node's share."""
        return sum(self.manifest.files[name].bytes for name in self._share)

    @property
    def is_brought(self) -> bool:
        """Whether the markers show this node's share as verified in the store."""
        return all(self._marker(name) is not None for name in self._share)

    def open(self) -> None:
        """Hides an older checkpoint of the same step in the store, whose files are about to be replaced; node 0 only.

        Files of an earlier, abandoned upload may have been removed since. Markers that do not match the store are
        deleted, so the nodes upload these files again.

        Raises:
            RemoteError: the store fails.
        """
        there = self._there()
        for name in self._names:
            if (note := self._marker(name)) is not None and note != there.get(name):
                (self._pin / f"{name}{_MARKER}").unlink(missing_ok=True)
        path = f"{self._folder}/{MANIFEST_FILE}"
        text = self._store.read(path)
        if text is None:
            return
        with suppress(CheckpointError):
            # The files are the same: only the manifest differs, and it is replaced atomically.
            files = Manifest.decode(text).files
            if files == self.manifest.files and all(record.header for record in files.values()):
                return
        self._store.remove(path)

    def send(self) -> None:
        """Uploads this node's share of the files.

        Raises:
            RemoteError: the store fails.
            CheckpointError: a file is damaged.
            OSError: a file cannot be read.
        """
        self._send(self._share)

    def _send(self, names: Iterable[str]) -> None:
        there = self._there()
        for name in names:
            self._go_on()
            if there.get(name) is None or self._marker(name) != there[name]:
                self._upload(name, there.get(name))
            self._done_bytes = self._done_bytes + self.manifest.files[name].bytes
            self._tell(self._done_bytes)

    def _there(self) -> dict[str, RemoteFile]:
        return self._store.files(self._folder)

    def _marker(self, name: str) -> RemoteFile | None:
        """The store's record of a file when it was verified there; None if the file has no readable marker."""
        with suppress(OSError, ValueError, TypeError):
            return RemoteFile(**parse_json(read_regular(self._pin / f"{name}{_MARKER}")))
        return None

    def _upload(self, name: str, found: RemoteFile | None) -> None:
        local, path, begin = self._pin / name, f"{self._folder}/{name}", self._done_bytes
        if found is None or not self._store.holds(found, local, path):
            # A file that is damaged locally must not replace an intact one.
            verify_tensors(local, self.manifest.stored_in(self._pin, name))
            moved = 0

            def sent(num_bytes: int) -> None:
                nonlocal moved
                moved += num_bytes
                self._tell(begin + moved)

            found = self._store.put(local, path, sent)
            self.sent_bytes += found.bytes
        with atomic_writer(self._pin / f"{name}{_MARKER}") as file:
            file.write(json.dumps(vars(found)).encode())

    def commit(self, take_over_s: float = TAKE_OVER_S) -> None:
        """Waits for the other nodes and makes the checkpoint visible; node 0 only, after `send`.

        Args:
            take_over_s: see TAKE_OVER_S.

        Raises:
            RemoteError: the store fails, or its files have changed since they were verified.
            CheckpointError: a file is damaged.
            OSError: a file cannot be read.
        """
        self._await_markers(take_over_s)
        self._send_records()
        there = self._there()
        for name in self._names:
            if there.get(name) != self._marker(name):
                (self._pin / f"{name}{_MARKER}").unlink(missing_ok=True)
                raise RemoteError(f"{self._store.url}/{self._folder}/{name} was changed or removed by another process")
        for name in there:
            # Partial file of a killed process, in a store with renames.
            if name.startswith("."):
                self._store.remove(f"{self._folder}/{name}")
        self._go_on()
        if (self._pin / METRICS_FILE).is_file():
            self._store.put(self._pin / METRICS_FILE, f"{self._folder}/{METRICS_FILE}")
        self._go_on()
        self._store.put(self._pin / MANIFEST_FILE, f"{self._folder}/{MANIFEST_FILE}")

    def _await_markers(self, take_over_s: float) -> None:
        missing, since = list(self._names), time.monotonic()
        while True:
            left = [name for name in missing if self._marker(name) is None]
            if not left:
                return
            if left != missing:
                missing, since = left, time.monotonic()
            if time.monotonic() - since > take_over_s:
                self._send(left[:1])
            else:
                self._go_on()
                time.sleep(_POLL_S)

    def _send_records(self) -> None:
        """Uploads the records of the run that a start needs: configs, data records, tokenizers."""
        run_dir = self._run_dir
        own = [run_dir / CONFIG_FILE, run_dir / DATA_FILE, template_path(run_dir / TOKENIZER_FILE)]
        kept = (path for name in (STARTS_FOLDER, HUGGING_FACE_FOLDER) for path in run_dir.glob(f"{name}/*"))
        for local in (*own, *run_dir.glob("tokenizer*.json"), *kept):
            if local.is_file() and not local.name.startswith("."):
                name = str(local.relative_to(run_dir))
                found = self._store.stat(name)
                if found is None or not self._store.holds(found, local, name):
                    self._go_on()
                    self._store.put(local, name)


def remove_surplus(store: RemoteStore, keep: Retention, spare: Sequence[int] = ()) -> list[str]:
    """Removes checkpoints from a store according to the retention, and leftovers of incomplete uploads.

    Args:
        store: store of the run.
        keep: which checkpoints are kept.
        spare: steps that are kept in any case.

    Returns:
        The names of the complete checkpoints that were removed.

    Raises:
        RemoteError: the store fails.
    """
    found = remote_checkpoints(store)
    sequences = {step: checkpoint.sequence for step, checkpoint in found.items() if checkpoint.sequence}
    surplus = set(keep.surplus(sequences)) if keep.recent else set()
    # A checkpoint with a damaged manifest or missing files is kept for the user to inspect.
    surplus |= {step for step, checkpoint in found.items() if MANIFEST_FILE not in checkpoint.files}
    gone = []
    for step in sorted(surplus - set(spare)):
        remove_remote(store, found[step])
        gone += [step_folder(Path(), step).name] if step in sequences else []
    return gone


def remove_remote(store: RemoteStore, checkpoint: RemoteCheckpoint) -> None:
    """Removes a checkpoint, its manifest first, so that a partly removed one does not count as a checkpoint.

    Raises:
        RemoteError: the store fails.
    """
    folder = remote_folder(checkpoint.step)
    for name in sorted(checkpoint.files, key=lambda name: name != MANIFEST_FILE):
        store.remove(f"{folder}/{name}")
    store.remove_folder(folder)


LEASE_FILE = "uploader.json"
BEAT_S = 20.0
SILENT_S = 3.5 * BEAT_S
_SETTLE_S = 1.0
_LEASE_POLL_S = 2.0


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
            time.sleep(min(_LEASE_POLL_S, silent_s / 4))

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
