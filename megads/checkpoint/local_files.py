"""Files of local checkpoints in a node's memory: those of its own ranks, and replicas of ranks on other nodes.

/dev/shm/megads-<user>-<hash of the run's folder>/
  rank_00003/lock                           held by the process that writes here
  rank_00003/a/rank_00003.safetensors       an image of the state, see `image`; b is the other one
  rank_00003/a/local.json                   commits it: its manifest, and which start wrote it
  replica_of_rank_00005/...                 same files for a rank on another node, see `replication`
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.checkpoint.manifest import Manifest
from megads.checkpoint.rank_file import STRICT, Count, file_name
from megads.checkpoint.read import verify_files
from megads.errors import CheckpointError
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.own_folder import make_own, own_path

IMAGES = ("a", "b")
_COMMIT_FILE, _LOCK_FILE = "local.json", "lock"
_LOCK_WAIT_S, _POLL_S = 5.0, 0.01
"""Longest wait, and polling interval, for a previous process of the rank to release its lock."""
_OWN, _REPLICA = "rank_", "replica_of_rank_"
Saved = tuple[int, int]
"""Lease number of the start that wrote a local checkpoint, and its step."""


@dataclass(frozen=True)
class LocalCommit:
    """Content of local.json, which commits an image.

    Attributes:
        start: lease number of the start that wrote it.
        world_size: number of ranks of that start.
        computation: digest of everything that affects the run's results.
        step_on_disk: step of the newest committed checkpoint at that time; 0: none.
        manifest: `Manifest.encode` of this rank's part.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    world_size: Count
    computation: str
    step_on_disk: Count
    manifest: str

    @classmethod
    def decode(cls, text: bytes) -> LocalCommit:
        """Inverse of `encode`; raises ValidationError or CheckpointError on invalid text."""
        commit = _COMMIT.validate_json(text)
        commit.contents()
        return commit

    def encode(self) -> bytes:
        """JSON text."""
        return json.dumps(asdict(self)).encode()

    def contents(self) -> Manifest:
        """Manifest of the image; raises CheckpointError if it is damaged."""
        return Manifest.decode(self.manifest.encode())

    @property
    def saved(self) -> Saved:
        return self.start, self.contents().run.state["step"]


_COMMIT = TypeAdapter(LocalCommit)


def node_folder(root: Path, run_dir: Path) -> Path:
    """Folder for the local checkpoints of a run in a node's memory."""
    run = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    return own_path(suffix=run, root=root)


def own_folder(node: Path, rank: int) -> Path:
    """Folder of a rank's own images."""
    return node / f"{_OWN}{rank:05d}"


def replica_folder(node: Path, rank: int) -> Path:
    """Folder of the replicas of a rank on another node."""
    return node / f"{_REPLICA}{rank:05d}"


def held_folders(node: Path) -> dict[Path, int]:
    """Folders of images in a node's memory, those of its own ranks first, with the rank whose state each holds."""
    return {path: int(path.name.rpartition("_")[2]) for kind in (_OWN, _REPLICA) for path in node.glob(f"{kind}[0-9]*")}


def held_in_memory(root: Path, run_dir: Path) -> tuple[int, int]:
    """Newest step that all ranks of a run on this node hold, 0 if there is none; and the bytes of all images."""
    folders = held_folders(node_folder(root, run_dir))
    own = [folder for folder in folders if folder.name.startswith(_OWN)]
    steps = [{step for _, step in committed(folder)} for folder in own]
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*/*.safetensors"))
    return max(set.intersection(*steps), default=0) if steps else 0, size


def newest_in_memory(root: Path, run_dir: Path) -> Manifest | None:
    """Manifest of one rank in the newest local checkpoint on this node; None if there is none."""
    folders = held_folders(node_folder(root, run_dir))
    commits = {saved: commit for folder in folders for saved, (_, commit) in committed(folder).items()}
    return commits[max(commits)].contents() if commits else None


def open_folder(folder: Path) -> int:
    """Creates a folder for images and locks it for this process.

    Returns:
        Descriptor of the lock, which is held until the descriptor is closed.

    Raises:
        OSError: the folder belongs to another user, or another process holds the lock.
    """
    make_own(folder.parent)
    for image in IMAGES:
        (folder / image).mkdir(parents=True, exist_ok=True)
    return lock_folder(folder)


def lock_folder(folder: Path, *, wait: bool = True) -> int:
    """Locks a folder; returns the descriptor of the lock, which is held until the process ends or closes it.

    Raises:
        OSError: another process holds the lock.
    """
    path = folder / _LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + (_LOCK_WAIT_S if wait else 0.0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OSError(0, "another process of this run holds it", str(path)) from None
            time.sleep(_POLL_S)
        else:
            return descriptor


def open_image(image: Path, rank: int, size: int) -> int:
    """Opens the file of an image to write to it; one of another size is emptied first, and the image invalidated.

    Args:
        image: folder of the image.
        rank: rank whose state it holds.
        size: bytes of the image.

    Returns:
        The descriptor.

    Raises:
        OSError: as the system reports it.
    """
    descriptor = os.open(image / file_name(rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(descriptor).st_size != max(size, 1):
        invalidate_image(image)
        os.ftruncate(descriptor, 0)
    return descriptor


def commit_image(image: Path, commit: LocalCommit) -> None:
    """Commits a complete image as a local checkpoint. Raises OSError."""
    with atomic_writer(image / _COMMIT_FILE) as file:
        file.write(commit.encode())


def invalidate_image(image: Path) -> None:
    """Marks an image as no longer a local checkpoint."""
    (image / _COMMIT_FILE).unlink(missing_ok=True)


def read_commit(image: Path) -> LocalCommit | None:
    """The commit record of an image; None if it is not committed."""
    with suppress(OSError, ValidationError, CheckpointError):
        return LocalCommit.decode(read_regular(image / _COMMIT_FILE))
    return None


def committed(folder: Path) -> dict[Saved, tuple[Path, LocalCommit]]:
    """Committed images in a folder, by start and step; their tensors are not verified."""
    found = {}
    for name in IMAGES:
        commit = read_commit(folder / name)
        if commit is not None:
            found[commit.saved] = (folder / name, commit)
    return found


def image_to_replace(folder: Path, start: int, base: Saved | None) -> Path:
    """Which image of a folder to overwrite: an uncommitted one; else one that is neither of this start nor its base;
    else the older.

    Args:
        folder: folder of the images.
        start: lease number of the start that writes now.
        base: start and step of the local checkpoint that it continued from; None: none.
    """

    def value(image: Path) -> tuple[bool, bool, Saved]:
        commit = read_commit(image)
        saved = commit.saved if commit is not None else (0, 0)
        return commit is not None, saved[0] == start or saved == base, saved

    return min((folder / name for name in IMAGES), key=value)


def verify_image(image: Path, commit: LocalCommit) -> None:
    """Raises CheckpointError if a rank's file does not match its checksums."""
    manifest = commit.contents()
    verify_files(image, manifest, sorted(manifest.files))
