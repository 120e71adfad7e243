"""Local checkpoints: every rank's newest state in the memory of its node, where it survives the end of the processes.

/dev/shm/megads-<user>-<hash of the run's folder>/
  rank_00003/lock                           held by the process that is rank 3
  rank_00003/a/rank_00003.safetensors       an image of the state, see `image`; b is the other one
  rank_00003/a/local.json                   commits it: its manifest, and which start wrote it
<run.dir>/local_checkpoints.json            which start's local checkpoints are those of the run as it is now

A rank copies its state into one image while the other one is complete, so there is always a step that all ranks have. A
rank's file holds everything that the rank needs, copies that another rank owns included: nobody reads another's.

A start continues from them if it is the next one with the same config, ranks and software, and if all ranks find the
same step; else from the newest checkpoint on disk, as it does if a checksum fails, or if the disk has a later step.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.checkpoint.config import list_checkpoints
from megads.checkpoint.image import ImageLayout, StateImage, allocate
from megads.checkpoint.manifest import Manifest, RunRecord, TensorRecord, newest_manifest, software
from megads.checkpoint.rank_file import STRICT, Count, file_name
from megads.checkpoint.read import CheckpointHandle, verify_files
from megads.checkpoint.store import RanksFailed, agreed, failure_of, on_first
from megads.checkpoint.writer import SaveProgress, Stage, Worker
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.runtime.distributed import ControlPlane
from megads.runtime.files import atomic_writer, read_regular

RECORD_FILE = "local_checkpoints.json"
_COMMIT_FILE, _LOCK_FILE = "local.json", "lock"
_IMAGES = ("a", "b")
_LOCK_WAIT_S, _POLL_S = 5.0, 0.01
"""For the process that was this rank to be gone."""
Saved = tuple[int, int]
"""Number of the start that wrote a local checkpoint, and its step."""


@dataclass(frozen=True)
class _RunsLocal:
    """<run.dir>/local_checkpoints.json.

    Attributes:
        start: the one that writes local checkpoints, number of its lease.
        base: that it continued from, still there until its own first one; None: it continued from none.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    base: tuple[Count, Count] | None


@dataclass(frozen=True)
class _Commit:
    """local.json.

    Attributes:
        start: that wrote it, number of its lease.
        world_size: ranks at that time.
        computation: digest of what the run computes.
        step_on_disk: newest committed checkpoint at that time; 0: none.
        manifest: `Manifest.encode` of this rank's part.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    world_size: Count
    computation: str
    step_on_disk: Count
    manifest: str


_RUNS_LOCAL, _COMMIT = TypeAdapter(_RunsLocal), TypeAdapter(_Commit)


@dataclass(frozen=True)
class LocalCheckpoint(CheckpointHandle):
    """This rank's part of a checkpoint in the memory of nodes, verified.

    Attributes:
        run_dir: of the run.
        start: that wrote it.
    """

    run_dir: Path = Path()
    start: int = 0

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def home(self) -> Path:
        return self.run_dir

    @property
    def name(self) -> str:
        return f"step {self.state['step']} in memory"

    @property
    def saved(self) -> Saved:
        return self.start, self.state["step"]


@dataclass(frozen=True)
class SealOrder:
    """What makes a copied image a local checkpoint.

    Attributes:
        image: number of the image that was copied.
        folder: of that image.
        start: that the rank belongs to.
        computation: digest of what the run computes.
        step_on_disk: of the newest committed checkpoint; 0: none.
        run: what the manifest says of the run.
        software: what it says of versions.
    """

    image: int
    folder: Path
    start: int
    computation: str
    step_on_disk: int
    run: RunRecord
    software: dict[str, str]

    def carry_out(self, image: StateImage, worker: Worker) -> SaveProgress:
        """Writes header and checksums, then the file that commits the image."""
        begin, record = time.perf_counter(), image.seal()
        files, tensors = {}, {}
        if image.shards:
            files = {file_name(worker.rank): record}
            tensors = {shard.key: TensorRecord(tuple(shard.global_shape), (worker.rank,)) for shard in image.shards}
        manifest = Manifest(self.run, self.software, 0, files, tensors)
        text = manifest.encode().decode()
        commit = _Commit(self.start, worker.world_size, self.computation, self.step_on_disk, text)
        try:
            with atomic_writer(self.folder / _COMMIT_FILE) as file:
                file.write(json.dumps(asdict(commit)).encode())
        except OSError as error:
            return SaveProgress(Stage.failed, failure_of(error)[0])
        return SaveProgress(Stage.done, seconds=time.perf_counter() - begin)


class LocalFolder:
    """This rank's folder in its node's memory.

    Args:
        root: a folder in memory, /dev/shm for instance.
        run_dir: of the run.
        control: of all ranks.
        start: that this rank belongs to, number of its lease.
        computation: digest of what the run computes, and in which layout: after a change it continues from disk.
    """

    def __init__(self, root: Path, run_dir: Path, control: ControlPlane, start: int, computation: str) -> None:
        self._run_dir, self._control, self._start, self._computation = run_dir, control, start, computation
        self._node_folder = node_folder(root, run_dir)
        self._folder = self._node_folder / f"rank_{control.rank:05d}"
        self._software = software()
        self._lock: int | None = None
        self._last = 0

    def open(self) -> str:
        """Takes the folder for this process, on all ranks or on none; collective.

        Returns:
            Why it cannot be had; empty where it can.
        """
        reason = ""
        try:
            _make_own(self._node_folder)
            for image in _IMAGES:
                (self._folder / image).mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._folder / _LOCK_FILE)
        except OSError as error:
            reason = f"rank {self._control.rank}: {error.filename or self._folder}: {error.strerror}"
        return first_reason(self._control.gather(reason, str))

    def find(self) -> tuple[LocalCheckpoint | None, list[str]]:
        """The newest local checkpoint that all ranks have, verified; collective.

        Returns:
            This rank's part; and why later ones are not used. None where there is none.
        """
        valid, on_disk, folders = on_first(self._control, self._state_of_run, tuple[_RunsLocal | None, int, list[int]])
        if valid is None:
            return None, []
        own = {
            saved: at
            for saved, at in _committed(self._folder).items()
            if saved[0] == valid.start or saved == valid.base
        }
        reasons = {saved: self._unfit(commit, on_disk, folders) for saved, (_, commit) in own.items()}
        fitting = sorted(saved for saved, reason in reasons.items() if not reason)
        found = self._control.gather((fitting, first_reason(reasons.values())), tuple[list[Saved], str])
        shared = set.intersection(*(set(saved) for saved, _ in found))
        passed_by: list[str] = []
        for saved in sorted(shared, reverse=True):
            folder, commit = own[saved]
            try:
                agreed(self._control, partial(_verify, folder, commit))
            except RanksFailed as error:
                passed_by.append(f"step {saved[1]} in memory: {error}")
                continue
            manifest = Manifest.decode(commit.manifest.encode())
            return LocalCheckpoint(folder, manifest, tuple(passed_by), run_dir=self._run_dir, start=saved[0]), []
        if not shared:
            lacking = [f"rank {rank} has none on its node" for rank, (saved, _) in enumerate(found) if not saved]
            reason = (
                first_reason(why for _, why in found) or first_reason(lacking) or "the ranks have none of the same step"
            )
            passed_by.append(f"checkpoints in memory: {reason}")
        return None, passed_by

    def _state_of_run(self) -> tuple[_RunsLocal | None, int, list[int]]:
        """Whose local checkpoints are the run's, None for nobody's; the newest readable step on disk, 0 for none; and
        all steps with a folder there, damaged ones too."""
        on_disk, folders = newest_step(self._run_dir), list(list_checkpoints(self._run_dir))
        try:
            return _RUNS_LOCAL.validate_json(read_regular(self._run_dir / RECORD_FILE)), on_disk, folders
        except (OSError, ValidationError):
            return None, on_disk, folders

    def _unfit(self, commit: _Commit, on_disk: int, folders: Collection[int]) -> str:
        """Why a local checkpoint is not what this start continues from; empty where it is."""
        manifest = Manifest.decode(commit.manifest.encode())
        step, before = manifest.run.state["step"], commit.step_on_disk
        # Who removes a checkpoint wants to go on from an earlier one; a damaged one is still there.
        removed = on_disk < before and before not in folders
        for wrong, why in (
            (commit.computation != self._computation, "what the run computes, or its layout, has changed since"),
            (commit.world_size != self._control.world_size, f"they are of {commit.world_size} ranks"),
            (manifest.software != self._software, "they are of other software"),
            (step < on_disk, f"the disk has a later one, step {on_disk}"),
            (removed, f"the checkpoint of step {before} has left the disk since"),
        ):
            if wrong:
                return why
        return ""

    def allocate(self, held: Sequence[Shard], owned: Sequence[Shard], base: LocalCheckpoint | None) -> list[StateImage]:
        """Makes the images, all of them resident; memory of an earlier start is used again. Not collective.

        Args:
            held: everything that this rank holds.
            owned: what of it the rank speaks for in a checkpoint on disk.
            base: that this start continues from: it stays until another one is complete.

        Raises:
            OSError: the node's memory has not that much.
        """
        layout, images = ImageLayout.of(held, owned), []
        for number, name in enumerate(_IMAGES):
            folder = self._folder / name
            is_base = base is not None and base.folder == folder
            if not is_base:
                self.invalidate(number)
            else:
                self._last = number
            path = folder / file_name(self._control.rank)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size != max(layout.size, 1):
                    assert not is_base, "the same config gives the same shards"
                    os.ftruncate(descriptor, 0)
                allocate(descriptor, layout.size)
                images.append(StateImage(layout, descriptor, resident=True))
            except OSError:
                os.close(descriptor)
                raise
        return images

    def missing_bytes(self, held: Sequence[Shard]) -> int:
        """Memory that `allocate` takes beside what files of an earlier start have taken."""
        size, there = sum(shard.tensor.nbytes for shard in held), 0
        for name in _IMAGES:
            with suppress(OSError):
                there += min(size, (self._folder / name / file_name(self._control.rank)).stat().st_size)
        return len(_IMAGES) * size - there

    def begin(self, base: LocalCheckpoint | None) -> None:
        """From now on the run's local checkpoints are those of this start; collective.

        Raises:
            RanksFailed: the run's folder cannot be written to.
        """
        record = _RunsLocal(self._start, base.saved if base is not None else None)

        def write() -> None:
            with atomic_writer(self._run_dir / RECORD_FILE) as file:
                file.write(json.dumps(asdict(record)).encode())

        on_first(self._control, write, type(None))

    def next_image(self, read: int | None) -> int:
        """Which image to copy into: not the newest one, unless the other is being written to disk.

        Args:
            read: image that a writer reads, on any rank.
        """
        older = 1 - self._last
        return self._last if read == older else older

    def invalidate(self, image: int) -> None:
        """What the image holds is no local checkpoint any more."""
        (self._folder / _IMAGES[image] / _COMMIT_FILE).unlink(missing_ok=True)

    def order(self, image: int, run: RunRecord, step_on_disk: int) -> SealOrder:
        """What completes an image that was copied."""
        self._last = image
        folder, computation = self._folder / _IMAGES[image], self._computation
        return SealOrder(image, folder, self._start, computation, step_on_disk, run, self._software)

    def sweep(self) -> None:
        """Frees the memory of ranks that this node has no longer; called by one rank of a node, once all are open."""
        for folder in self._node_folder.glob("rank_*"):
            with suppress(OSError):
                os.close(_locked(folder / _LOCK_FILE, wait_s=0.0))
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Frees the memory: the state is on disk."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            self._node_folder.rmdir()
        self.close()

    def close(self) -> None:
        """Lets go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def node_folder(root: Path, run_dir: Path) -> Path:
    """Where the ranks of a node keep the local checkpoints of a run."""
    run = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    return root / f"megads-{os.getuid()}-{run}"


def newest_step(run_dir: Path) -> int:
    """Of the newest checkpoint on disk whose manifest can be read; 0: there is none."""
    newest = newest_manifest(run_dir)
    return newest.run.state["step"] if newest is not None else 0


def forget(run_dir: Path) -> None:
    """No local checkpoint is the run's any more; called by one rank of a start that writes none."""
    (run_dir / RECORD_FILE).unlink(missing_ok=True)


def _make_own(folder: Path) -> None:
    """Makes a folder that nobody else can write to.

    Raises:
        OSError: it is somebody else's.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(0, "it belongs to somebody else, or others can write to it", str(folder))


def _locked(path: Path, wait_s: float = _LOCK_WAIT_S) -> int:
    """Descriptor of a file that this process has locked until it ends.

    Raises:
        OSError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + wait_s
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


def held_in_memory(root: Path, run_dir: Path) -> tuple[int, int]:
    """The newest step that all ranks of a run on this node hold, 0 for none; and the bytes that all of it takes."""
    folders = list(node_folder(root, run_dir).glob("rank_*"))
    steps = [{step for _, step in _committed(folder)} for folder in folders]
    size = sum(path.stat().st_size for folder in folders for path in folder.glob("*/*.safetensors"))
    return max(set.intersection(*steps), default=0) if steps else 0, size


def _committed(folder: Path) -> dict[Saved, tuple[Path, _Commit]]:
    """What a rank's folder holds, by start and step; nobody has looked at the tensors."""
    found = {}
    for image in _IMAGES:
        with suppress(OSError, ValidationError, CheckpointError):
            commit = _COMMIT.validate_json(read_regular(folder / image / _COMMIT_FILE))
            step = Manifest.decode(commit.manifest.encode()).run.state["step"]
            found[commit.start, step] = (folder / image, commit)
    return found


def _verify(folder: Path, commit: _Commit) -> None:
    """Raises CheckpointError where a checksum of a rank's file does not hold."""
    manifest = Manifest.decode(commit.manifest.encode())
    verify_files(folder, manifest, sorted(manifest.files))


def first_reason(reasons: Iterable[str]) -> str:
    """The first that is not empty; empty where all are."""
    return next(filter(None, reasons), "")
