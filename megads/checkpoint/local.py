"""Local checkpoints: every rank's newest state in the memory of its node, where it survives the end of the processes.

`local_files` defines the files. <run.dir>/local_checkpoints.json records which start's local checkpoints belong to the
current state of the run.

Each rank has two images and copies its state into one while the other is complete, so there is always a step that all
ranks have. A rank's file holds all state of the rank, including copies that another rank owns, so no rank reads the
file of another.

A start continues from local checkpoints if it is the next one with the same config, ranks and software, and if all
ranks find the same step on their node, or a replica of it on another node (`replication`). Otherwise, or if a checksum
fails or the disk has a later step, it continues from the newest checkpoint on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.checkpoint.config import EVERYTHING, History, list_checkpoints
from megads.checkpoint.image import ImageLayout, StateBuffer, allocate
from megads.checkpoint.local_files import (
    IMAGES,
    LocalCommit,
    Saved,
    commit_image,
    committed,
    held_folders,
    image_to_replace,
    invalidate_image,
    lock_folder,
    node_folder,
    open_folder,
    own_folder,
    verify_image,
)
from megads.checkpoint.manifest import Manifest, RunRecord, TensorRecord, newest_manifest, software
from megads.checkpoint.rank_file import STRICT, Count, file_name
from megads.checkpoint.read import CheckpointHandle
from megads.checkpoint.replication import Replication
from megads.checkpoint.store import RanksFailed, agreed, on_first
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.runtime.distributed import ControlPlane
from megads.runtime.files import atomic_writer, read_regular

RECORD_FILE = "local_checkpoints.json"
_NAMED = 8


@dataclass(frozen=True)
class _RunsLocal:
    """Content of <run.dir>/local_checkpoints.json.

    Attributes:
        start: lease number of the start that writes local checkpoints.
        base: local checkpoint that the start continued from, kept until its own first one is complete; None: none.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    base: tuple[Count, Count] | None


_RUNS_LOCAL = TypeAdapter(_RunsLocal)


@dataclass(frozen=True)
class LocalCheckpoint(CheckpointHandle):
    """This rank's part of a local checkpoint, verified.

    Attributes:
        run_dir: folder of the run.
        start: lease number of the start that wrote it.
        from_replicas: ranks whose part was fetched from another node.
    """

    run_dir: Path = Path()
    start: int = 0
    from_replicas: tuple[int, ...] = ()

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def home(self) -> Path:
        return self.run_dir

    @property
    def name(self) -> str:
        if not self.from_replicas:
            return f"step {self.state['step']} in memory"
        shown = ", ".join(map(str, self.from_replicas[:_NAMED]))
        more = f" and {len(self.from_replicas) - _NAMED} more" if len(self.from_replicas) > _NAMED else ""
        return f"step {self.state['step']} in memory, of ranks {shown}{more} on other nodes"

    @property
    def saved(self) -> Saved:
        return self.start, self.state["step"]


class LocalFolder:
    """This rank's folder in its node's memory.

    Args:
        root: folder in memory, for example /dev/shm.
        run_dir: folder of the run.
        control: control plane of all ranks.
        start: lease number of this rank's start.
        computation: digest of everything that affects the run's results, and of its layout; if it has changed, the run
            continues from disk.
        history: the checkpoints on disk that count.
    """

    def __init__(
        self,
        root: Path,
        run_dir: Path,
        control: ControlPlane,
        start: int,
        computation: str,
        history: History = EVERYTHING,
    ) -> None:
        self._run_dir, self._control, self._start, self._computation = run_dir, control, start, computation
        self._history = history
        self.node = node_folder(root, run_dir)
        self._folder = own_folder(self.node, control.rank)
        self._software = software()
        self._lock: int | None = None
        self.last_image = 0
        """Number of the newest image."""

    def open(self) -> str:
        """Locks the folder for this process; collective.

        Returns:
            Why a rank could not lock its folder; empty if all could.
        """
        try:
            self._lock = agreed(self._control, lambda: open_folder(self._folder))
        except RanksFailed as error:
            return str(error)
        return ""

    def find(self, replicas: Replication) -> tuple[LocalCheckpoint | None, list[str]]:
        """The newest local checkpoint that all ranks have, verified; collective.

        Args:
            replicas: fetches missing or damaged parts from another node.

        Returns:
            This rank's part, None if there is none; and why later ones are not used.
        """
        valid, on_disk, folders = on_first(self._control, self._state_of_run, tuple[_RunsLocal | None, int, list[int]])
        if valid is None:
            return None, []

        def counts(commit: LocalCommit) -> bool:
            return commit.start == valid.start or commit.saved == valid.base

        def unfit(commit: LocalCommit) -> str:
            return self._unfit(commit, on_disk, folders)

        there = {saved: at for saved, at in committed(self._folder).items() if counts(at[1])}
        own = {saved: at for saved, at in there.items() if not unfit(at[1])}
        reason = first_reason(unfit(commit) for _, commit in there.values())
        found = self._control.gather((sorted(own), reason), tuple[list[tuple[int, int]], str])
        held = [set(saved) for saved, _ in found]
        holders = replicas.find(held, lambda commit: counts(commit) and not unfit(commit))
        skipped: list[str] = []
        for saved in sorted(set.intersection(*held), reverse=True):
            take = partial(self._take, saved, own, replicas, holders.get(saved, []))
            try:
                image, commit, fetched = agreed(self._control, take)
            except RanksFailed as error:
                skipped.append(f"step {saved[1]} in memory: {error}")
                continue
            from_replicas = [rank for rank, was in enumerate(self._control.gather(fetched, bool)) if was]
            return LocalCheckpoint(
                image, commit.contents(), tuple(skipped), run_dir=self._run_dir, start=saved[0],
                from_replicas=tuple(from_replicas),
            ), []  # fmt: skip
        if not skipped:
            nobody = ", and no other node holds a copy" if replicas.is_on else ""
            lacking = [f"rank {rank} has none on its node{nobody}" for rank, saved in enumerate(held) if not saved]
            why = first_reason([*(reason for _, reason in found), *lacking, "the ranks have none of the same step"])
            skipped.append(f"checkpoints in memory: {why}")
        return None, skipped

    def _take(
        self, saved: Saved, own: dict[Saved, tuple[Path, LocalCommit]], replicas: Replication, holders: list[int]
    ) -> tuple[Path, LocalCommit, bool]:
        """This rank's image of a local checkpoint, verified, its commit record, and whether it was fetched.

        Raises:
            CheckpointError: the image is damaged or cannot be fetched.
        """
        if saved in own:
            try:
                verify_image(*own[saved])
            except CheckpointError:
                if not holders:
                    raise
            else:
                return *own[saved], False
        image = own[saved][0] if saved in own else image_to_replace(self._folder, self._start, saved)
        return image, replicas.fetch(saved, holders, image), True

    def _state_of_run(self) -> tuple[_RunsLocal | None, int, list[int]]:
        """Record of the start whose local checkpoints are valid, None if there is none; newest readable step on disk, 0
        if there is none; all steps with a checkpoint folder on disk, including damaged ones."""
        on_disk, folders = newest_step(self._run_dir, self._history), list(list_checkpoints(self._run_dir))
        try:
            return _RUNS_LOCAL.validate_json(read_regular(self._run_dir / RECORD_FILE)), on_disk, folders
        except (OSError, ValidationError):
            return None, on_disk, folders

    def _unfit(self, commit: LocalCommit, on_disk: int, folders: Collection[int]) -> str:
        """Why this start cannot continue from a local checkpoint; empty if it can."""
        manifest = commit.contents()
        step, before = manifest.run.state["step"], commit.step_on_disk
        # A user who removes a checkpoint wants to continue from an earlier one; a damaged one still has its folder.
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

    def allocate(
        self, held: Sequence[Shard], owned: Sequence[Shard], base: LocalCheckpoint | None
    ) -> list[StateBuffer]:
        """Allocates the images, with all pages resident, and reuses memory of an earlier start. Not collective.

        Args:
            held: all shards that this rank holds.
            owned: those of them that the rank saves in a checkpoint on disk.
            base: local checkpoint that this start continues from; it is kept until another one is complete.

        Raises:
            OSError: the node does not have that much memory.
        """
        layout, images = ImageLayout.of(held, owned), []
        for number, name in enumerate(IMAGES):
            folder = self._folder / name
            is_base = base is not None and base.folder == folder
            if not is_base:
                invalidate_image(folder)
            else:
                self.last_image = number
            path = folder / file_name(self._control.rank)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if os.fstat(descriptor).st_size != max(layout.size, 1):
                    assert not is_base, "the same config gives the same shards"
                    os.ftruncate(descriptor, 0)
                allocate(descriptor, layout.size)
                images.append(StateBuffer(layout, descriptor, resident=True))
            except OSError:
                os.close(descriptor)
                raise
        return images

    def missing_bytes(self, held: Sequence[Shard]) -> int:
        """Bytes that `allocate` takes in addition to the files of an earlier start."""
        size, there = sum(shard.tensor.nbytes for shard in held), 0
        for name in IMAGES:
            with suppress(OSError):
                there += min(size, (self._folder / name / file_name(self._control.rank)).stat().st_size)
        return len(IMAGES) * size - there

    def begin(self, base: LocalCheckpoint | None) -> None:
        """Records that the run's local checkpoints are now those of this start; collective.

        Raises:
            RanksFailed: the run's folder cannot be written to.
        """
        record = _RunsLocal(self._start, base.saved if base is not None else None)

        def write() -> None:
            with atomic_writer(self._run_dir / RECORD_FILE) as file:
                file.write(json.dumps(asdict(record)).encode())

        on_first(self._control, write, type(None))

    def next_image(self, keep: int | None) -> int:
        """Number of the image to copy the state into, the older one, which is a local checkpoint no more.

        Args:
            keep: number of an image that is not replaced: a writer on any rank reads it, or it is the newest one with
                complete replicas of all ranks; None: none.
        """
        number = self.last_image if keep == 1 - self.last_image else 1 - self.last_image
        invalidate_image(self._folder / IMAGES[number])
        self.last_image = number
        return number

    def complete(self, number: int, image: StateBuffer, run: RunRecord, step_on_disk: int) -> Path:
        """Turns a copied image into a local checkpoint: writes its header with the checksums, then commits it.

        Args:
            number: number of the image.
            image: the image.
            run: record of the run for the manifest.
            step_on_disk: step of the newest committed checkpoint when the state was copied; 0: none.

        Returns:
            The folder of the image.

        Raises:
            OSError: the node's memory is full.
        """
        folder, rank, record = self._folder / IMAGES[number], self._control.rank, image.seal()
        files = {file_name(rank): record} if image.shards else {}
        tensors = {shard.key: TensorRecord(tuple(shard.global_shape), (rank,)) for shard in image.shards}
        text = Manifest(run, self._software, 0, files, tensors).encode().decode()
        commit_image(folder, LocalCommit(self._start, self._control.world_size, self._computation, step_on_disk, text))
        return folder

    def sweep(self) -> None:
        """Frees the memory of ranks that are no longer on this node; called by one rank per node, after all have called
        `open`."""
        for folder in held_folders(self.node):
            with suppress(OSError):
                os.close(lock_folder(folder, wait=False))
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Frees the memory, once the state is on disk."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            self.node.rmdir()
        self.close()

    def close(self) -> None:
        """Releases the lock of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def newest_step(run_dir: Path, history: History = EVERYTHING) -> int:
    """Step of the newest checkpoint on disk that counts and whose manifest is readable; 0 if there is none."""
    newest = newest_manifest(run_dir, history)
    return newest.run.state["step"] if newest is not None else 0


def forget(run_dir: Path) -> None:
    """Invalidates all local checkpoints of the run; called by one rank of a start that writes none."""
    (run_dir / RECORD_FILE).unlink(missing_ok=True)


def first_reason(reasons: Iterable[str]) -> str:
    """The first non-empty reason; empty if there is none."""
    return next(filter(None, reasons), "")
