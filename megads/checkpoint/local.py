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
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.checkpoint.config import EVERYTHING, History, list_checkpoints
from megads.checkpoint.local_files import LocalCommit, Saved, committed, image_to_replace, verify_image
from megads.checkpoint.manifest import newest_manifest
from megads.checkpoint.rank_file import STRICT, Count
from megads.checkpoint.read import CheckpointHandle
from megads.checkpoint.replication import Replication
from megads.checkpoint.store import RanksFailed, agreed, on_first
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


@dataclass(frozen=True)
class LocalStart:
    """What a start looks for in local checkpoints, and records in its own.

    Attributes:
        run_dir: folder of the run.
        number: lease number of the start.
        world_size: number of ranks.
        computation: digest of everything that affects the run's results, and of its layout; if it has changed, the run
            continues from disk.
        software: software versions, see `manifest.software`.
        history: the checkpoints on disk that count.
    """

    run_dir: Path
    number: int
    world_size: int
    computation: str
    software: dict[str, str]
    history: History

    def record(self, base: LocalCheckpoint | None) -> None:
        """Records that the run's local checkpoints are now those of this start; called by one rank. Raises OSError."""
        record = _RunsLocal(self.number, base.saved if base is not None else None)
        with atomic_writer(self.run_dir / RECORD_FILE) as file:
            file.write(json.dumps(asdict(record)).encode())

    def state_of_run(self) -> tuple[_RunsLocal | None, int, list[int]]:
        """Record of the start whose local checkpoints are valid, None if there is none; newest readable step on disk, 0
        if there is none; all steps with a checkpoint folder on disk, including damaged ones."""
        on_disk, folders = newest_step(self.run_dir, self.history), list(list_checkpoints(self.run_dir))
        try:
            return _RUNS_LOCAL.validate_json(read_regular(self.run_dir / RECORD_FILE)), on_disk, folders
        except (OSError, ValidationError):
            return None, on_disk, folders

    def unfit(self, commit: LocalCommit, on_disk: int, folders: Collection[int]) -> str:
        """Why this start cannot continue from a local checkpoint; empty if it can. See `state_of_run`."""
        manifest = commit.contents()
        step, before = manifest.run.state["step"], commit.step_on_disk
        # A user who removes a checkpoint wants to continue from an earlier one; a damaged one still has its folder.
        removed = on_disk < before and before not in folders
        for wrong, why in (
            (commit.computation != self.computation, "what the run computes, or its layout, has changed since"),
            (commit.world_size != self.world_size, f"they are of {commit.world_size} ranks"),
            (manifest.software != self.software, "they are of other software"),
            (step < on_disk, f"the disk has a later one, step {on_disk}"),
            (removed, f"the checkpoint of step {before} has left the disk since"),
        ):
            if wrong:
                return why
        return ""


def find_local(
    folder: Path, start: LocalStart, replicas: Replication, control: ControlPlane
) -> tuple[LocalCheckpoint | None, list[str]]:
    """The newest local checkpoint that all ranks have, verified; collective.

    Args:
        folder: this rank's folder in its node's memory.
        start: this start.
        replicas: fetches missing or damaged parts from another node.
        control: control plane of all ranks.

    Returns:
        This rank's part, None if there is none; and why later ones are not used.
    """
    valid, on_disk, folders = on_first(control, start.state_of_run, tuple[_RunsLocal | None, int, list[int]])
    if valid is None:
        return None, []

    def counts(commit: LocalCommit) -> bool:
        return commit.start == valid.start or commit.saved == valid.base

    def unfit(commit: LocalCommit) -> str:
        return start.unfit(commit, on_disk, folders)

    there = {saved: at for saved, at in committed(folder).items() if counts(at[1])}
    own = {saved: at for saved, at in there.items() if not unfit(at[1])}
    reason = first_reason(unfit(commit) for _, commit in there.values())
    found = control.gather((sorted(own), reason), tuple[list[tuple[int, int]], str])
    held = [set(saved) for saved, _ in found]
    holders = replicas.find(held, lambda commit: counts(commit) and not unfit(commit))

    def take(saved: Saved) -> tuple[Path, LocalCommit, bool]:
        """This rank's image, verified, its commit record, and whether it was fetched. Raises CheckpointError."""
        if saved in own:
            try:
                verify_image(*own[saved])
                return *own[saved], False
            except CheckpointError:
                if saved not in holders:
                    raise
        image = own[saved][0] if saved in own else image_to_replace(folder, start.number, saved)
        return image, replicas.fetch(saved, holders.get(saved, []), image), True

    skipped: list[str] = []
    for saved in sorted(set.intersection(*held), reverse=True):
        try:
            image, commit, fetched = agreed(control, partial(take, saved))
        except RanksFailed as error:
            skipped.append(f"step {saved[1]} in memory: {error}")
            continue
        fetching = tuple(rank for rank, was in enumerate(control.gather(fetched, bool)) if was)
        found_here = LocalCheckpoint(image, commit.contents(), tuple(skipped))
        return replace(found_here, run_dir=start.run_dir, start=saved[0], from_replicas=fetching), []
    if not skipped:
        nobody = ", and no other node holds a copy" if replicas.is_on else ""
        lacking = [f"rank {rank} has none on its node{nobody}" for rank, saved in enumerate(held) if not saved]
        why = first_reason([*(reason for _, reason in found), *lacking, "the ranks have none of the same step"])
        skipped.append(f"checkpoints in memory: {why}")
    return None, skipped


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
