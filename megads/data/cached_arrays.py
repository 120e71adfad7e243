"""Large arrays that follow from their name: cached on disk, memory-mapped, shared by the processes of a node."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megads.data.verified_once import verify_once
from megads.errors import ConfigError, DataError
from megads.runtime.environment import user_cache_dir
from megads.runtime.files import atomic_writer, read_json

Arrays = dict[str, npt.NDArray[Any]]
OpenArray = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens the file of one array, by its name, which must be written in NumPy's format."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedArrays:
    """Which arrays.

    Attributes:
        name: of their files; differs wherever their content may.
        key: all that determines them, which is recorded for those who wonder.
        arrays: their names.
        what: they are, in words, for messages.
    """

    name: str
    key: Mapping[str, Any]
    arrays: Sequence[str]
    what: str


class ArrayCache:
    """Arrays on disk: memory-mapped, shared by the ranks of a node, rebuilt where damaged.

    One process of a node builds, the others wait for it. Each array is a `.npy` file; a `.json` with their sizes and
    checksums is written last, to which they are held once a node and boot. All are renamed into place and their content
    is determined by the name, so builders on several nodes that share a disk do no harm.

    Args:
        prefix: a dataset's; the cache is `<prefix>.cache/`, or the user's cache where that is not writable.
        cache_dir: takes its place; must be writable.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._configured = cache_dir
        self._directories = [Path(cache_dir)] if cache_dir is not None else [Path(f"{prefix}.cache"), user_cache_dir()]

    def get(self, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> Arrays | None:
        """Returns the arrays, from the cache or written to it first; None where no folder takes them.

        Args:
            wanted: which.
            write: writes them all; may be called for a second folder, or not at all.

        Raises:
            ConfigError: data.cache_dir was given and cannot be written.
        """
        for directory in self._directories:
            found = _load(directory, wanted)
            if found is not None:
                return found
        for directory in self._directories:
            try:
                with _one_builder(directory, wanted):
                    # Another rank of this node may have built them while this one waited.
                    found = _load(directory, wanted)
                    if found is None:
                        _save(directory, wanted, write)
            except OSError as error:
                if self._configured is not None:
                    raise ConfigError(
                        f"data.cache_dir = {self._configured}: cannot write the {wanted.what} there "
                        f"({error.strerror}); give a writable folder, or null"
                    ) from error
                log.info("no %s cache in %s: %s", wanted.what, directory, error)
                continue
            return found or _load(directory, wanted)
        return None


@contextmanager
def _one_builder(directory: Path, wanted: CachedArrays) -> Iterator[None]:
    """Lets one process of a node build while the others wait; a killed builder's lock goes with it.

    Where the file system has no locks several build the same thing, which does no harm.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{wanted.name}.lock"
    with path.open("ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # A process that still waits holds the open file: it finds the arrays, or builds them once more.
    path.unlink(missing_ok=True)


def _save(directory: Path, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> None:
    write(lambda name: atomic_writer(_array_path(directory, wanted, name)))
    files = {name: _file_record(_array_path(directory, wanted, name)) for name in wanted.arrays}
    with atomic_writer(_record_path(directory, wanted)) as file:
        file.write(json.dumps({"key": wanted.key, "files": files}, indent=1).encode())


def _load(directory: Path, wanted: CachedArrays) -> Arrays | None:
    """Returns cached arrays, memory-mapped, or None when there are none or they are damaged."""
    record_path = _record_path(directory, wanted)
    if not record_path.is_file():
        return None
    try:
        expected = read_json(record_path)["files"]
        paths = {name: _array_path(directory, wanted, name) for name in wanted.arrays}

        def verify() -> None:
            for name, path in paths.items():
                if _file_record(path) != expected[name]:
                    raise ValueError(f"{path.name} does not match its checksum")

        verify_once(list(paths.values()), f"checksums: {json.dumps(expected, sort_keys=True)}", verify)
        # Plain arrays over the maps: slicing np.memmap objects costs several times as much.
        return {name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()}
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        log.warning("%s: the cached %s is damaged (%s) and will be rebuilt", record_path, wanted.what, error)
        return None


def _file_record(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _array_path(directory: Path, wanted: CachedArrays, name: str) -> Path:
    return directory / f"{wanted.name}-{name}.npy"


def _record_path(directory: Path, wanted: CachedArrays) -> Path:
    return directory / f"{wanted.name}.json"
