"""Copies datasets to a node's own disk, once, so that a run reads a remote filesystem in one long sweep."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from megads.data.content_digest import file_state, require_unchanged
from megads.data.indexed import IndexedDataset, bin_path, idx_path
from megads.data.progress import ByteProgress
from megads.data.sidecar import sidecar_path
from megads.errors import ConfigError, DataError
from megads.runtime.files import atomic_writer, read_json

BLOCK_BYTES = 1 << 23

log = logging.getLogger(__name__)


def staged(prefix: str, folder: str) -> str:
    """Returns the prefix of a dataset's copy on this node, made by the first process that asks; the others wait.

    The copy's name follows from the index, and from size and time of the tokens, so changed data is copied anew. A
    process that is killed leaves nothing that passes for a copy: the record with the checksums is written last, after
    the copy was read back. A lock that the system releases with the process lets the next one begin.

    Args:
        prefix: the dataset.
        folder: on a disk of this node.

    Raises:
        ConfigError: the folder cannot be written to or has too little room.
        DataError: the dataset cannot be read, changes meanwhile, or the copy is not like it.
    """
    fingerprint = IndexedDataset(prefix).fingerprint()
    sources = [path for path in (bin_path(prefix), idx_path(prefix), sidecar_path(prefix)) if path.exists()]
    content = [fingerprint, *(file_state(path)[:2] for path in sources)]
    name = f"{Path(prefix).name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"
    copy = Path(folder) / name
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _locked(copy.with_name(f"{name}.lock")):
            if not _is_complete(copy):
                _copy(sources, prefix, copy)
    except OSError as error:
        raise ConfigError(
            f"data.stage_to = {folder}: {prefix} cannot be copied there: {error.strerror}; give a writable folder on a "
            "disk of the node, or null"
        ) from error
    return str(copy)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record_path(copy: Path) -> Path:
    return Path(f"{copy}.staged.json")


def _is_complete(copy: Path) -> bool:
    """Whether the record and files of the sizes that it tells are there."""
    try:
        sizes = read_json(_record_path(copy))["bytes"]
        return all(copy.with_name(name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _copy(sources: list[Path], prefix: str, copy: Path) -> None:
    # What a killed process left would fill the disk.
    for partial in copy.parent.glob(f".{copy.name}.*.partial"):
        partial.unlink(missing_ok=True)
    total = sum(path.stat().st_size for path in sources)
    free = shutil.disk_usage(copy.parent).free
    if total > free:
        raise ConfigError(
            f"data.stage_to = {copy.parent}: {prefix} takes {total / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free; make "
            "room, give another folder, or null"
        )
    sizes, digests, done_bytes = {}, {}, 0
    with ByteProgress(f"staging {Path(prefix).name}", total) as progress:
        for source in sources:
            target = Path(f"{copy}{source.name.removeprefix(Path(prefix).name)}")
            state = file_state(source)
            digests[target.name] = _copy_file(source, target, progress, done_bytes)
            require_unchanged(source, state)
            if (found := _digest(target)) != digests[target.name]:
                raise DataError(
                    f"{target}: reads back as {found}, {source} is {digests[target.name]}: the disk of "
                    f"data.stage_to = {copy.parent} is damaged; give another folder"
                )
            sizes[target.name] = state[0]
            done_bytes += state[0]
    with atomic_writer(_record_path(copy)) as file:
        file.write(json.dumps({"source": prefix, "bytes": sizes, "xxh3_128": digests}, indent=1).encode())
    log.info("staged %s to %s: %.1f MB", prefix, copy, total / 1e6)


def _copy_file(source: Path, target: Path, progress: ByteProgress, done_bytes: int) -> str:
    """Copies in large sequential reads; returns the digest of what was read."""
    digest = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as file, atomic_writer(target) as out:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            out.write(block)
            done_bytes += len(block)
            progress.update(done_bytes)
    return str(digest.hexdigest())


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return str(digest.hexdigest())
