"""Brings committed checkpoints of a run to a store, where they are visible once complete.

<url>/<run id>/checkpoints/step_00000100/rank_00000.safetensors   the very files of the run directory
                                         metrics.jsonl            what it held when the checkpoint was saved
                                         manifest.json            put last: it commits the checkpoint there, too
<url>/<run id>/configs/ tokenizer.json ...                        what a start asks of the run that wrote it

While it is uploaded, a checkpoint is held by hard links in checkpoints/.step_00000100.upload, so that retention may
remove it. Beside each file that is in the store, and was verified there, lies a note of it: <file>.sent. Nodes that
share the work, and a process that goes on after a killed one, learn from these.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megads.checkpoint.config import checkpoints_folder, step_folder, step_of
from megads.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest
from megads.checkpoint.rank_file import verify_tensors
from megads.checkpoint.remote import RemoteError, RemoteFile, RemoteStore
from megads.checkpoint.retention import Retention
from megads.checkpoint.store import hidden_folder
from megads.data.indexed.sidecar import template_path
from megads.errors import CheckpointError
from megads.runtime.files import atomic_writer, parse_json, read_regular
from megads.runtime.metrics import LedgerRecord, begins_as
from megads.runtime.run_dir import CONFIG_FILE, DATA_FILE, METRICS_FILE, STARTS_FOLDER, TOKENIZER_FILE

CHECKPOINTS = "checkpoints"
PIN = "upload"
_NOTE = ".sent"
_POLL_S = 0.5
TAKE_OVER_S = 120.0
"""Where another node has brought nothing for so long, node 0 brings its files, too."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """What a store holds of a checkpoint.

    Attributes:
        step: of its name.
        files: of its folder, by name.
        manifest: None where there is none, or a damaged one.
        problem: why it cannot be used, as far as a listing and the manifest tell; empty where nothing is wrong.
    """

    step: int
    files: Mapping[str, RemoteFile]
    manifest: Manifest | None
    problem: str

    @property
    def sequence(self) -> int:
        """See Manifest; 0 where it cannot be used."""
        return self.manifest.sequence if self.manifest is not None and not self.problem else 0


def remote_folder(step: int) -> str:
    """The folder of a checkpoint in a store."""
    return f"{CHECKPOINTS}/{step_folder(Path(), step).name}"


def remote_checkpoints(store: RemoteStore) -> dict[int, RemoteCheckpoint]:
    """The checkpoints of a run that a store holds, by step, ascending; those without a manifest, too.

    Raises:
        RemoteError: the store does not tell.
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
    """Checkpoints that are held to be uploaded, complete ones only."""
    found = checkpoints_folder(run_dir).glob(f".step_*.{PIN}")
    return sorted(path for path in found if (path / MANIFEST_FILE).exists())


def pin_checkpoint(folder: Path) -> Path | None:
    """Holds a checkpoint by hard links, until `unpin`; one that is held already stays as it is.

    Args:
        folder: of the committed checkpoint.

    Returns:
        The folder of the links; None where the checkpoint is removed or replaced meanwhile, or is not usable.

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
        pass  # retention has removed the checkpoint meanwhile: there is nothing to upload
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
    """Lets go of a checkpoint; its manifest goes first, so that no other node takes the rest for one."""
    with suppress(OSError):
        (pin / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(pin, ignore_errors=True)


class CheckpointUpload:
    """The upload of one checkpoint, of which each node brings a share of the files.

    Args:
        store: of the run.
        run_dir: the run's folder.
        pin: where the checkpoint is held.
        go_on: called before every file; what it raises ends the upload, which goes on from there another time.
        tell: told how many bytes of this node's share are done.
        node: number of this node.
        num_nodes: nodes that share the work.

    Raises:
        CheckpointError: what is held cannot be used.
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
        # The folder's name does not say the step: the pin's does.
        self.manifest = Manifest.decode(read_regular(pin / MANIFEST_FILE))
        self.manifest.check(step)
        self.step, self._folder = step, remote_folder(step)
        self._names = sorted(self.manifest.files)
        self._share = self._names[node::num_nodes]
        self._done_bytes = 0
        self.sent_bytes = 0
        """Of files that this process has put there."""

    @property
    def share_bytes(self) -> int:
        """Of the files that this node brings."""
        return sum(self.manifest.files[name].bytes for name in self._share)

    @property
    def is_brought(self) -> bool:
        """Whether this node's share was verified in the store, as far as the notes beside the checkpoint say."""
        return all(self._note(name) is not None for name in self._share)

    def open(self) -> None:
        """Takes an older checkpoint of the same step out of sight, whose files would be replaced; node 0 alone.

        What an upload that was given up has brought may have been removed since: its nodes bring it once more.

        Raises:
            RemoteError: the store fails.
        """
        there = self._there()
        for name in self._names:
            if (note := self._note(name)) is not None and note != there.get(name):
                (self._pin / f"{name}{_NOTE}").unlink(missing_ok=True)
        path = f"{self._folder}/{MANIFEST_FILE}"
        text = self._store.read(path)
        if text is None:
            return
        with suppress(CheckpointError):
            # The same files: only the manifest is another one, and is replaced at once.
            files = Manifest.decode(text).files
            if files == self.manifest.files and all(record.header for record in files.values()):
                return
        self._store.remove(path)

    def send(self) -> None:
        """Brings this node's share there.

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
            if there.get(name) is None or self._note(name) != there[name]:
                self._bring(name, there.get(name))
            self._done_bytes = self._done_bytes + self.manifest.files[name].bytes
            self._tell(self._done_bytes)

    def _there(self) -> dict[str, RemoteFile]:
        return self._store.files(self._folder)

    def _note(self, name: str) -> RemoteFile | None:
        """What the store had of a file when it was verified there; None where it was not, or a store tells little."""
        with suppress(OSError, ValueError, TypeError):
            return RemoteFile(**parse_json(read_regular(self._pin / f"{name}{_NOTE}")))
        return None

    def _bring(self, name: str, found: RemoteFile | None) -> None:
        local, path, begin = self._pin / name, f"{self._folder}/{name}", self._done_bytes
        if found is None or not self._store.holds(found, local, path):
            # What is damaged here must not take the place of what is not.
            verify_tensors(local, self.manifest.stored_in(self._pin, name))
            moved = 0

            def sent(num_bytes: int) -> None:
                nonlocal moved
                moved += num_bytes
                self._tell(begin + moved)

            found = self._store.put(local, path, sent)
            self.sent_bytes += found.bytes
        with atomic_writer(self._pin / f"{name}{_NOTE}") as file:
            file.write(json.dumps(vars(found)).encode())

    def commit(self, take_over_s: float = TAKE_OVER_S) -> None:
        """Waits for the other nodes, and makes the checkpoint visible; node 0 alone, after `send`.

        Args:
            take_over_s: see TAKE_OVER_S.

        Raises:
            RemoteError: the store fails, or holds something else than was verified there.
            CheckpointError: a file is damaged.
            OSError: a file cannot be read.
        """
        self._await_notes(take_over_s)
        self._send_records()
        there = self._there()
        for name in self._names:
            if there.get(name) != self._note(name):
                (self._pin / f"{name}{_NOTE}").unlink(missing_ok=True)
                raise RemoteError(f"{self._store.url}/{self._folder}/{name} was changed or removed by somebody else")
        for name in there:
            # Half a file of a killed process, where a store has renames.
            if name.startswith("."):
                self._store.remove(f"{self._folder}/{name}")
        self._go_on()
        if (self._pin / METRICS_FILE).is_file():
            self._store.put(self._pin / METRICS_FILE, f"{self._folder}/{METRICS_FILE}")
        self._go_on()
        self._store.put(self._pin / MANIFEST_FILE, f"{self._folder}/{MANIFEST_FILE}")

    def _await_notes(self, take_over_s: float) -> None:
        missing, since = list(self._names), time.monotonic()
        while True:
            left = [name for name in missing if self._note(name) is None]
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
        """Brings what a start asks of the run that wrote the checkpoint: configs, records of data, tokenizers."""
        run_dir = self._run_dir
        own = [run_dir / CONFIG_FILE, run_dir / DATA_FILE, template_path(run_dir / TOKENIZER_FILE)]
        for local in (*own, *run_dir.glob("tokenizer*.json"), *run_dir.glob(f"{STARTS_FOLDER}/*")):
            if local.is_file() and not local.name.startswith("."):
                name = str(local.relative_to(run_dir))
                found = self._store.stat(name)
                if found is None or not self._store.holds(found, local, name):
                    self._go_on()
                    self._store.put(local, name)


def remove_surplus(store: RemoteStore, keep: Retention, spare: Sequence[int] = ()) -> list[str]:
    """Removes the checkpoints from a store that nothing keeps, and what incomplete uploads left.

    Args:
        store: of the run.
        keep: which stay.
        spare: steps that stay in any case.

    Returns:
        The names of complete ones that are gone.

    Raises:
        RemoteError: the store fails.
    """
    found = remote_checkpoints(store)
    sequences = {step: checkpoint.sequence for step, checkpoint in found.items() if checkpoint.sequence}
    surplus = set(keep.surplus(sequences)) if keep.recent else set()
    # One with a manifest that cannot be read, or that lacks files, is for people to look at.
    surplus |= {step for step, checkpoint in found.items() if MANIFEST_FILE not in checkpoint.files}
    gone = []
    for step in sorted(surplus - set(spare)):
        remove_remote(store, found[step])
        gone += [step_folder(Path(), step).name] if step in sequences else []
    return gone


def remove_remote(store: RemoteStore, checkpoint: RemoteCheckpoint) -> None:
    """Removes a checkpoint, its manifest first: what is left of it looks like none.

    Raises:
        RemoteError: the store fails.
    """
    folder = remote_folder(checkpoint.step)
    for name in sorted(checkpoint.files, key=lambda name: name != MANIFEST_FILE):
        store.remove(f"{folder}/{name}")
    store.remove_folder(folder)
