"""Writes checkpoints such that a kill at any time leaves the previous one usable.

A `Save` describes one checkpoint. Ranks write it while training waits, or hand it to their writer processes (`writer`),
which write it while training continues.

checkpoints/.step_00000100.partial/   being written
checkpoints/step_00000100/            committed: manifest.json is written last, then the folder is renamed
checkpoints/.step_00000100.replaced/  being replaced by a new checkpoint of the same step
checkpoints/.step_00000100.removed/   being deleted
checkpoints/latest                    names the last committed one, for people and scripts

An operation that fails on one rank fails on all ranks, so that no rank waits for another forever.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from torch import Tensor

from megads.checkpoint.config import (
    KEEP_ALL,
    LATEST_FILE,
    Retention,
    checkpoints_folder,
    list_checkpoints,
    named_by_latest,
    step_folder,
)
from megads.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    RunRecord,
    TensorRecord,
    newest_sequence,
    read_sequence,
    software,
)
from megads.checkpoint.rank_file import (
    FileRecord,
    WrittenPart,
    add_cover_sums,
    cover_sum,
    file_name,
    whole,
    write_rank_file,
)
from megads.engine.interface import Shard
from megads.errors import DISK_FULL, CheckpointError, Fenced
from megads.runtime.distributed import ALONE, ControlPlane
from megads.runtime.files import atomic_writer, sync_directory
from megads.runtime.lease import Fence
from megads.runtime.metrics import LedgerRecord

T = TypeVar("T")

_NAMED_FAILURES = 3


class SaveError(CheckpointError):
    """A checkpoint could not be written; its files are removed, and the error is raised on every rank.

    Attributes:
        previous: folder name of the newest existing checkpoint, None if there is none.
        disk_full: whether the disk was full on a rank.
    """

    def __init__(self, message: str, previous: str | None, disk_full: bool = False) -> None:
        super().__init__(message)
        self.previous, self.disk_full = previous, disk_full


@dataclass(frozen=True)
class Save:
    """A checkpoint to be written: by the ranks (`save_checkpoint`), or by their writer processes (`writer`).

    Attributes:
        folder: folder of the committed checkpoint; its hidden "partial" folder exists.
        run: record of the run for the manifest.
        software: software versions for the manifest.
        keys: keys of all shards that this rank holds, including copies that another rank owns; needed to detect a key
            that no rank owns.
        keep: which checkpoints are kept once this one is committed.
        fence: fence of the start that writes; None: no other start can write.
    """

    folder: Path
    run: RunRecord
    software: dict[str, str]
    keys: Sequence[str] = ()
    keep: Retention = KEEP_ALL
    fence: Fence | None = None

    @property
    def partial(self) -> Path:
        """Folder that the ranks write to."""
        return hidden_folder(self.folder, "partial")

    def commit(self, parts: Sequence[WrittenPart]) -> None:
        """Commits the written files: manifest, rename, `latest`, each on disk before the next; called by one process.

        Then removes the checkpoints that are not kept.

        Args:
            parts: what `write_rank_file` has returned for all ranks, in rank order.

        Raises:
            CheckpointError: a file or a part is missing, or the parts are inconsistent.
            OSError: an error of the file system.
        """
        run_dir, step = self.folder.parent.parent, self.run.state["step"]
        manifest = self._manifest(parts, newest_sequence(run_dir) + 1)
        manifest.check(step)
        with atomic_writer(self.partial / MANIFEST_FILE) as file:
            file.write(manifest.encode())
        replaced = hidden_folder(self.folder, "replaced")
        if os.path.lexists(self.folder):
            self.folder.rename(replaced)
        self.partial.rename(self.folder)
        sync_directory(self.folder.parent)
        if os.path.lexists(replaced):
            with suppress(OSError):
                _remove(replaced)
        _name_latest(self.folder)
        remove_old(run_dir, step, self.keep)

    def _manifest(self, parts: Sequence[WrittenPart], sequence: int) -> Manifest:
        """The manifest of the written files.

        Raises:
            CheckpointError: a file is missing, a part of a tensor is missing or duplicate, or its shapes differ.
        """
        files: dict[str, FileRecord] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        holders: dict[str, list[int]] = defaultdict(list)
        sums: dict[str, list[int]] = defaultdict(list)
        for rank, part in enumerate(parts):
            if part.record is not None:
                _require_seen(self.partial / file_name(rank), part.record)
                files[file_name(rank)] = part.record
            for key, shape in part.shapes.items():
                if shapes.setdefault(key, shape) != shape:
                    raise CheckpointError(f"{key} is stored with several global shapes: {sorted({shapes[key], shape})}")
                holders[key].append(rank)
                sums[key].append(int(part.cover_sums[key], 16))
        unowned = {key for part in parts for key in part.held} - shapes.keys()
        if unowned:
            raise CheckpointError(f"no rank owns {', '.join(sorted(unowned))}")
        tensors = {key: TensorRecord(shape, tuple(holders[key])) for key, shape in shapes.items()}
        manifest = Manifest(self.run, self.software, sequence, files, tensors)
        faulty = [key for key, shape in shapes.items() if add_cover_sums(sums[key]) != cover_sum(key, [whole(shape)])]
        if faulty:
            explained = manifest.explain_coverage(self.partial, faulty[:1])
            raise CheckpointError(explained or f"{faulty[0]} is not stored once")
        return manifest


def save_checkpoint(
    run_dir: Path,
    shards: Sequence[Shard],
    run: RunRecord,
    keep: Retention = KEEP_ALL,
    keys: Collection[str] = (),
    fence: Fence | None = None,
    control: ControlPlane = ALONE,
    ledger: Callable[[], LedgerRecord | None] = lambda: None,
    in_background: Callable[[Save], bool] = lambda _: False,
) -> Path:
    """Writes one checkpoint; collective over all ranks, which return once it is committed and on disk.

    Args:
        run_dir: the run's folder, shared by all ranks.
        shards: shards that this rank owns; over all ranks they cover every key exactly once.
        run: record of the run, the same on all ranks; run.state["step"] names the checkpoint.
        keep: which checkpoints are kept.
        keys: see `Save`.
        fence: fence of the start that writes; None: no other start can write.
        control: control plane of all ranks.
        ledger: syncs the run's metrics.jsonl to disk and returns its record; called on rank 0 before anything is
            written, since the checkpoint must not include metrics of later steps.
        in_background: hands the save to the writer processes of all ranks and returns True, upon which the ranks return
            at once; False on all ranks: they write it themselves.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: on every rank, with the failing rank's reason.
        Fenced: on every rank, when another start took over; its files are not touched.
    """
    _require_lease(fence, control)
    final = step_folder(run_dir, run.state["step"])
    partial = hidden_folder(final, "partial")

    def begin() -> LedgerRecord | None:
        prepare(partial)
        return ledger()

    try:
        run = replace(run, ledger=on_first(control, begin, LedgerRecord | None))
        save = Save(final, run, software(), sorted(keys), keep, fence)
        if in_background(save):
            return final
        part = agreed(control, lambda: write_rank_file(partial, control.rank, shards, save.keys))
        parts = control.gather_to_first(part, WrittenPart)
        _require_lease(fence, control)
        on_first(control, lambda: save.commit(parts or []), NoneType)
    except RanksFailed as error:
        previous = on_first(control, lambda: _give_up(partial), str | None)
        state = f"{previous} remains the last one" if previous else "there is no earlier one"
        message = f"checkpoint of step {run.state['step']} not saved, {state}: {error}"
        raise SaveError(message, previous, bool(error.errnos.intersection(DISK_FULL))) from error
    return final


def save_parts(
    run_dir: Path,
    parts: Iterable[Sequence[Shard]],
    run: RunRecord,
    read: Callable[[Shard], Iterator[Tensor]] | None = None,
    versions: dict[str, str] | None = None,
) -> Path:
    """Writes a checkpoint in one process, one file per part; each part is requested after the previous one is on disk.

    Args:
        run_dir: the run's folder, to which no other process writes.
        parts: shards per file; together they cover every key exactly once.
        run: record of the run; run.state["step"] names the checkpoint.
        read: yields a shard's values in blocks of rows, for parts that are larger than memory; the shards' tensors may
            then be on the meta device. None: the shards' tensors hold the values.
        versions: software that computed the values; None: the current software.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: it could not be written; its files are removed.
    """
    save = Save(step_folder(run_dir, run.state["step"]), run, software() if versions is None else versions)
    try:
        prepare(save.partial)
        save.commit([write_rank_file(save.partial, number, part, read=read) for number, part in enumerate(parts)])
    except BaseException as error:
        shutil.rmtree(save.partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{save.folder} cannot be written: {error.strerror}") from error
        raise
    return save.folder


def _require_lease(fence: Fence | None, control: ControlPlane) -> None:
    """Raises Fenced on every rank if rank 0 finds that another start holds the run directory."""
    lost = control.broadcast(fence.reason() if fence is not None and control.rank == 0 else "", str)
    if lost:
        raise Fenced(lost)


def recover(run_dir: Path) -> None:
    """Restores a checkpoint whose replacement was interrupted, and updates `latest` if a kill came between the commit
    and its update; called by one rank."""
    folder = checkpoints_folder(run_dir)
    for replaced in folder.glob(".step_*.replaced"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists() and replaced.is_dir():
            replaced.rename(final)
    sequences = {path: read_sequence(path) or 0 for path in list_checkpoints(run_dir).values()}
    newest = max(sequences, key=lambda path: sequences[path], default=None)
    # Not essential, so errors of a full or read-only disk are ignored.
    with suppress(OSError):
        for leftover in folder.glob(f".{LATEST_FILE}.*"):
            leftover.unlink()
        if newest is not None and sequences[newest] and named_by_latest(folder) != newest.name:
            _name_latest(newest)


def _name_latest(final: Path) -> None:
    with atomic_writer(final.parent / LATEST_FILE) as file:
        file.write(f"{final.name}\n".encode())


def hidden_folder(final: Path, suffix: str) -> Path:
    """Hidden folder next to the checkpoint's folder, with a suffix: "partial", "replaced" or "removed"."""
    return final.with_name(f".{final.name}.{suffix}")


def prepare(partial: Path) -> None:
    """Removes leftovers of killed writers and creates the folder to write to."""
    folder = partial.parent
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder.parent)
    for suffix in ("partial", "replaced", "removed"):
        for leftover in folder.glob(f".step_*.{suffix}"):
            _remove(leftover)
    partial.mkdir()


def _remove(path: Path) -> None:
    """Removes a folder, or a file or link in its place."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _require_seen(path: Path, record: FileRecord) -> None:
    """Raises CheckpointError if another rank's file is missing here, or its size differs from what that rank wrote."""
    try:
        seen = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is not in {path.parent} as rank 0 sees it: run.dir must be shared by all ranks"
        ) from None
    if seen != record.bytes:
        raise CheckpointError(f"{path} has {seen} bytes as rank 0 sees it, and {record.bytes} as its rank does")


def _give_up(partial: Path) -> str | None:
    """Removes the partial checkpoint, to free space on a full disk; returns the name of the newest checkpoint left."""
    shutil.rmtree(partial, ignore_errors=True)
    run_dir = partial.parent.parent
    recover(run_dir)
    committed = [path.name for path in list_checkpoints(run_dir).values() if (path / MANIFEST_FILE).exists()]
    return committed[-1] if committed else None


def remove_old(run_dir: Path, step: int, keep: Retention) -> list[str]:
    """Deletes checkpoints up to `step` that the retention does not keep; later steps are of an abandoned part of the
    run. Called by one rank.

    Args:
        run_dir: the run's folder.
        step: step of the newest checkpoint.
        keep: which checkpoints are kept.

    Returns:
        The names of the deleted checkpoints.
    """
    if not keep.recent:
        return []
    return [name for at in keep.surplus(_sequences(run_dir, step)) if (name := _delete(step_folder(run_dir, at)))]


def discard(run_dir: Path, steps: Collection[int]) -> None:
    """Deletes checkpoints that the run does not continue from, the latest step first, and updates `latest` to the
    newest of the others; called by one process, which holds the run directory."""
    for step in sorted(steps, reverse=True):
        _delete(step_folder(run_dir, step))
    if steps:
        recover(run_dir)


def make_room(run_dir: Path, step: int, keep: Retention, *, all_reasons: bool) -> str:
    """Deletes one checkpoint up to `step` to free space for another; see `Retention.expendable`.

    Called by one rank.

    Returns:
        Its name; empty if there is none to delete.
    """
    found = keep.expendable(_sequences(run_dir, step), all_reasons=all_reasons)
    return next(filter(None, (_delete(step_folder(run_dir, at)) for at in found)), "")


def _sequences(run_dir: Path, step: int) -> dict[int, int]:
    """Sequences of the checkpoints up to a step, by step."""
    return {at: read_sequence(folder) or 0 for at, folder in list_checkpoints(run_dir).items() if at <= step}


def _delete(folder: Path) -> str:
    """Deletes a checkpoint and returns its name; empty if that fails, which costs disk space only.

    It is renamed first, so that an interrupted deletion does not leave one that looks committed.
    """
    removed = hidden_folder(folder, "removed")
    try:
        folder.rename(removed)
    except OSError:
        return ""
    shutil.rmtree(removed, ignore_errors=True)
    return folder.name


class RanksFailed(CheckpointError):
    """An action failed on some ranks; raised on all ranks.

    Attributes:
        errnos: errno values of the failures that have one.
    """

    def __init__(self, message: str, errnos: frozenset[int]) -> None:
        super().__init__(message)
        self.errnos = errnos


def agreed(control: ControlPlane, action: Callable[[], T]) -> T:
    """Runs `action`, which must not communicate, on every rank and waits for all ranks; collective.

    Raises:
        RanksFailed: on every rank, if the action failed on any; names the ranks and their reasons.
    """
    cause: Exception | None = None
    failure: tuple[str, int | None] | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:  # any exception: the other ranks wait for this rank's outcome
        cause, failure = error, failure_of(error)
    failed = [
        (rank, *found)
        for rank, found in enumerate(control.gather(failure, tuple[str, int | None] | None))
        if found is not None
    ]
    if failed:
        named = "; ".join(f"rank {rank}: {reason}" for rank, reason, _ in failed[:_NAMED_FAILURES])
        more = f" (and {len(failed) - _NAMED_FAILURES} more ranks)" if len(failed) > _NAMED_FAILURES else ""
        raise RanksFailed(named + more, frozenset(code for *_, code in failed if code is not None)) from cause
    return result  # type: ignore[no-any-return]


def on_first(control: ControlPlane, action: Callable[[], T], kind: Any) -> T:
    """Runs `action` on rank 0 and broadcasts its result to all ranks; collective.

    Args:
        control: control plane of all ranks.
        action: action that must not communicate.
        kind: type of its result, see megads.runtime.distributed.encode.

    Raises:
        RanksFailed: on every rank, if the action failed.
    """
    result = agreed(control, lambda: action() if control.rank == 0 else None)
    return control.broadcast(result, kind)  # type: ignore[return-value]


def failure_of(error: Exception) -> tuple[str, int | None]:
    """The reason as text, and the errno of the OSError that is its cause, if any."""
    return _reason(error), _errno(error)


def _errno(error: BaseException | None) -> int | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return None if error is None else error.errno


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
