"""Downloads checkpoints from a store: into a run directory that lost its own, or into a folder for reading.

A checkpoint is downloaded into a hidden folder; files that are already there and intact are not downloaded again. Its
checksums are verified, and the folder is renamed last.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    list_checkpoints,
    open_checkpoint,
    read_manifest,
    sync_directory,
    template_path,
    temporary_path,
)
from megads.checkpoint.config import LATEST_FILE, step_folder, step_of
from megads.checkpoint.rank_file import read_rank_file, verify_tensors
from megads.checkpoint.store import hidden_folder
from megads.runtime.metrics import begins_as
from megads.tools.remote.store import RemoteError, RemoteStore
from megads.tools.remote.upload import RemoteCheckpoint, remote_checkpoints, remote_folder

_FILES_AT_A_TIME = 4


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was downloaded.

    Attributes:
        folder: folder of the checkpoint.
        manifest: its manifest.
        skipped: newer checkpoints in the store that are not usable, each with the reason.
    """

    folder: Path
    manifest: Manifest
    skipped: tuple[str, ...]


def newest_first(found: Mapping[int, RemoteCheckpoint]) -> list[RemoteCheckpoint]:
    """Checkpoints without a known problem, by descending sequence."""
    usable = [checkpoint for checkpoint in found.values() if checkpoint.sequence]
    return sorted(usable, key=lambda checkpoint: (checkpoint.sequence, checkpoint.step), reverse=True)


def newest_intact_sequence(run_dir: Path) -> int:
    """Sequence of a run directory's newest checkpoint with complete files and intact headers; 0 if there is none.

    Tensors are verified by the ranks, since reading all of them here would take as long as loading.
    """
    best = 0
    for folder in list_checkpoints(run_dir).values():
        with suppress(CheckpointError):
            manifest = read_manifest(folder)
            if manifest.sequence > best:
                for name in manifest.files:
                    manifest.stored_in(folder, name)
                    if (folder / name).stat().st_size != manifest.files[name].bytes:
                        raise CheckpointError(f"{folder / name} has another size")
                best = manifest.sequence
    return best


def has_usable(run_dir: Path) -> bool:
    """Whether a run directory has a checkpoint with valid checksums; reads its files."""
    for folder in list_checkpoints(run_dir).values():
        with suppress(CheckpointError):
            return bool(open_checkpoint(folder))
    return False


def restore_newest(
    store: RemoteStore,
    run_dir: Path,
    candidates: Sequence[RemoteCheckpoint],
    begin: Callable[[RemoteCheckpoint], None] = lambda _: None,
    tell: Callable[[int], None] = lambda _: None,
) -> Restored:
    """Downloads the first intact checkpoint of the candidates; no other process may write to the run directory.

    Args:
        store: store of the run.
        run_dir: the run's folder, which need not exist.
        candidates: checkpoints to try, in this order.
        begin: called with each checkpoint before its download.
        tell: called with the number of its bytes that are complete.

    Raises:
        CheckpointError: no candidate is intact; gives the reasons.
        RemoteError: the store fails.
    """
    skipped: list[str] = []
    for found in candidates:
        begin(found)
        try:
            manifest = _fetch(store, found, run_dir, tell)
        except DamagedError as error:
            skipped.append(f"{step_folder(Path(), found.step).name}: {error}")
            continue
        _fetch_records(store, run_dir)
        _fetch_ledger(store, found, manifest, run_dir)
        _commit(run_dir, found.step)
        return Restored(step_folder(run_dir, found.step), manifest, tuple(skipped))
    raise CheckpointError(f"no checkpoint in {store.url} is usable: " + ("; ".join(skipped) or "there is none"))


class DamagedError(CheckpointError):
    """A checkpoint in a store does not match its checksums."""


def _fetch(store: RemoteStore, found: RemoteCheckpoint, run_dir: Path, tell: Callable[[int], None]) -> Manifest:
    """Downloads and verifies the files of a checkpoint.

    Raises:
        DamagedError: a file does not match its checksums; the partial download is removed.
        RemoteError: the store fails; the partial download is kept for the next attempt.
    """
    assert found.manifest is not None
    manifest, partial = found.manifest, hidden_folder(step_folder(run_dir, found.step), "partial")
    partial.mkdir(parents=True, exist_ok=True)
    done: dict[str, int] = dict.fromkeys(manifest.files, 0)

    def fetch(name: str) -> None:
        def received(num_bytes: int) -> None:
            done[name] += num_bytes
            tell(sum(done.values()))

        if not _is_intact(manifest, partial, name):
            try:
                fetch_file(store, found, partial, name, received)
            except RemoteError:
                raise
            except CheckpointError:
                # Download again, in case the file was damaged in transit and not in the store.
                fetch_file(store, found, partial, name)
            _sync(partial / name)
        done[name] = manifest.files[name].bytes
        tell(sum(done.values()))

    try:
        with ThreadPoolExecutor(_FILES_AT_A_TIME, "fetch") as pool:
            for result in [pool.submit(fetch, name) for name in sorted(manifest.files)]:
                result.result()
        with atomic_writer(partial / MANIFEST_FILE) as file:
            file.write(store.read(f"{remote_folder(found.step)}/{MANIFEST_FILE}") or b"")
        if Manifest.decode((partial / MANIFEST_FILE).read_bytes()) != manifest:
            raise RemoteError(f"{store.url}: the checkpoint of step {found.step} was replaced meanwhile")
    except RemoteError:
        raise
    except CheckpointError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DamagedError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be written: {error.strerror}") from error
    return manifest


def fetch_file(
    store: RemoteStore,
    found: RemoteCheckpoint,
    folder: Path,
    name: str,
    received: Callable[[int], None] = lambda _: None,
) -> None:
    """Downloads and verifies a file of a checkpoint.

    Raises:
        CheckpointError: the file does not match the manifest.
        RemoteError: the store fails.
        OSError: the file cannot be written.
    """
    assert found.manifest is not None
    (folder / name).unlink(missing_ok=True)
    store.get(f"{remote_folder(found.step)}/{name}", folder / name, received)
    _verify(found.manifest, folder, name)


def _is_intact(manifest: Manifest, partial: Path, name: str) -> bool:
    try:
        _verify(manifest, partial, name)
    except CheckpointError:
        return False
    return True


def _verify(manifest: Manifest, folder: Path, name: str) -> None:
    """Raises CheckpointError if a file does not match the manifest."""
    if manifest.stored is None:
        read_rank_file(folder / name, manifest.files[name])
    if not (folder / name).is_file() or (folder / name).stat().st_size != manifest.files[name].bytes:
        raise CheckpointError(f"{folder / name} has another size than {manifest.files[name].bytes} bytes")
    verify_tensors(folder / name, manifest.stored_in(folder, name))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _fetch_records(store: RemoteStore, run_dir: Path) -> None:
    """Downloads the records of the run that a start needs; existing ones are kept."""
    template = template_path(run_dir / TOKENIZER_FILE).name
    wanted = {CONFIG_FILE, DATA_FILE, TOKENIZER_FILE, template}
    for name in store.files(""):
        path = Path(name)
        kept = len(path.parts) == 1 and (name in wanted or path.match("tokenizer*.json"))
        kept = kept or (len(path.parts) == 2 and path.parts[0] in (STARTS_FOLDER, HUGGING_FACE_FOLDER))
        if kept and not (run_dir / name).exists():
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(run_dir / name) as file:
                file.write(store.read(name) or b"")


def _fetch_ledger(store: RemoteStore, found: RemoteCheckpoint, manifest: Manifest, run_dir: Path) -> None:
    """Downloads metrics.jsonl unless the local one begins with the content that the checkpoint recorded.

    If it is damaged in the store, it is not used: the run continues without these lines, and reports it.
    """
    local, ledger = run_dir / METRICS_FILE, manifest.run.ledger
    if ledger is None or METRICS_FILE not in found.files or (local.is_file() and begins_as(local, ledger)):
        return
    fetched = temporary_path(local)
    try:
        store.get(f"{remote_folder(found.step)}/{METRICS_FILE}", fetched)
        if not begins_as(fetched, ledger):
            return
        if local.is_file():
            local.rename(_aside(local))
        _sync(fetched)
        fetched.rename(local)
    finally:
        fetched.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return aside


def _commit(run_dir: Path, step: int) -> None:
    """Commits a downloaded checkpoint by renaming it; replaces a damaged one of the same step."""
    final = step_folder(run_dir, step)
    partial, replaced = hidden_folder(final, "partial"), hidden_folder(final, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if os.path.lexists(final):
        final.rename(replaced)
    partial.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    with atomic_writer(final.parent / LATEST_FILE) as file:
        file.write(f"{final.name}\n".encode())


def fetch_description(url: str, folder: Path) -> Path:
    """Downloads the manifest of the newest complete checkpoint at a URL and the records of its run, without tensors.

    Args:
        url: see `open_remote_run`.
        folder: run folder to create with this checkpoint; replaced if it exists.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: there is no complete checkpoint, or the folder cannot be written.
        RemoteError: the store fails.
    """
    store, (newest, *_) = open_remote_run(url)
    fresh = temporary_path(folder)
    try:
        checkpoint = step_folder(fresh, newest.step)
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST_FILE).write_bytes(store.read(f"{remote_folder(newest.step)}/{MANIFEST_FILE}") or b"")
        read_manifest(checkpoint)
        _fetch_records(store, fresh)
        _put_in_place(fresh, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return step_folder(folder, newest.step)


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Renames a folder into place, and replaces an existing one; safe if other processes do so at the same time."""
    former = temporary_path(folder)
    while True:
        with suppress(FileNotFoundError):
            folder.rename(former)
        try:
            fresh.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        finally:
            shutil.rmtree(former, ignore_errors=True)


def open_remote_run(url: str) -> tuple[RemoteStore, list[RemoteCheckpoint]]:
    """The store of a run, and the checkpoints to try, newest first, for the URL of a run or of one of its checkpoints.

    Raises:
        CheckpointError: there is no complete checkpoint.
        RemoteError: the store fails.
    """
    store, step = remote_run(url)
    found = remote_checkpoints(store)
    usable = newest_first({step: found[step]} if step in found else {} if step is not None else found)
    if not usable:
        why = "; ".join(f"{step_folder(Path(), at).name}: {one.problem}" for at, one in found.items() if one.problem)
        raise CheckpointError(f"{url}: there is no complete checkpoint" + (f" ({why})" if why else ""))
    return store, usable


def remote_run(url: str) -> tuple[RemoteStore, int | None]:
    """The store of the run that a URL names, and the step if the URL names a checkpoint, else None."""
    url = url.rstrip("/")
    head, _, last = url.rpartition("/")
    step = step_of(Path(last))
    if step is not None:
        url = head
        last = head.rpartition("/")[2]
    return RemoteStore(url.removesuffix("/checkpoints") if last == "checkpoints" else url), step
