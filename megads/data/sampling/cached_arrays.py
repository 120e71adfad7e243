"""Disk cache of large arrays that are determined by their name: memory-mapped and shared by the processes of a node.

`MapWriter` writes arrays in pieces, so that building an index map needs no more memory than one piece.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from megads.data.indexed.dataset import Array
from megads.data.indexed.verified_once import SETTLED_NS, verify_once
from megads.errors import ConfigError, DataError
from megads.runtime.claims import Claims
from megads.runtime.environment import user_cache_dir
from megads.runtime.files import atomic_writer, read_json

Arrays = dict[str, Array]
OpenArray = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens the file of an array, by its name; the caller must write NumPy's format."""
MOST_BYTES_IN_MEMORY = 1 << 30
"""Arrays up to this size are built in the memory of every rank if no folder can hold them."""
MOST_BYTES_VERIFIED_BY_ALL = 1 << 30
_ABANDONED_S = 3600.0
_POLL_S = 2.0
_HASH = "xxh3"
"""Hash of new records; those of earlier versions have sha256."""
Append = Callable[[Array], None]
"""Writes the next piece of an array, converted to its dtype."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedArrays:
    """Identity of a group of arrays.

    Attributes:
        name: name of their files; unique to their content.
        key: all values that determine them, recorded for inspection.
        arrays: names of the arrays.
        what: description for messages.
        size_bytes: total size; 0 if they are small or the size is unknown.
    """

    name: str
    key: Mapping[str, Any]
    arrays: Sequence[str]
    what: str
    size_bytes: int = 0


class ArrayCache:
    """Arrays on disk: memory-mapped, shared by the ranks of a node, rebuilt if damaged.

    One process of all nodes that see the folder builds, the others wait. Each array is a `.npy` file. A `.json` file
    with sizes and checksums is written last; the arrays are verified against it once per node and boot. All files are
    renamed into place and their content is determined by the name, so a builder that is wrongly considered dead does no
    harm.

    Args:
        prefix: prefix of a dataset; the cache is `<prefix>.cache/`, or the user's cache if that is not writable.
        cache_dir: cache folder to use instead; must be writable.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._configured = cache_dir
        self._directories = [Path(cache_dir)] if cache_dir is not None else [Path(f"{prefix}.cache"), user_cache_dir()]

    def get(self, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> Arrays | None:
        """Returns the arrays, which are built first if they are not cached; None if no folder can hold them.

        Args:
            wanted: the arrays.
            write: writes all of them; may be called again for a second folder, or not at all.

        Raises:
            ConfigError: no folder can hold them and they are too large for the memory of every rank, or data.cache_dir
                is set and cannot be written to.
        """
        for directory in self._directories:
            found = _load(directory, wanted)
            if found is not None:
                return found
        refusals = []
        for directory in self._directories:
            try:
                return self._built(directory, wanted, write)
            except OSError as error:
                refusals.append(self._refusal(directory, wanted, error))
        if wanted.size_bytes > MOST_BYTES_IN_MEMORY:
            raise ConfigError(
                f"no folder takes the {wanted.what} of {wanted.size_bytes / 1e9:.1f} GB: {'; '.join(refusals)}. Give "
                "data.cache_dir=<a folder with room that all nodes see>"
            )
        return None

    def _built(self, directory: Path, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> Arrays | None:
        """Returns the arrays from a folder, once this or another process has written them there."""
        while True:
            seen = _record_state(directory, wanted)
            found = _load(directory, wanted)
            if found is not None:
                return found
            with _one_builder(directory, wanted, wait=True) as chosen:
                # Arrays built by another process meanwhile are verified after the lock is released, since many nodes
                # may wait for it.
                builds = chosen and _record_state(directory, wanted) == seen
                if builds:
                    _save(directory, wanted, write)
            if builds:
                return _load(directory, wanted)

    def build_ahead(self, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> None:
        """Writes the arrays unless they exist or another process builds them; otherwise as `get`.

        Raises:
            ConfigError: data.cache_dir is set and cannot be written to.
        """
        if any(_record_path(directory, wanted).is_file() for directory in self._directories):
            return
        for directory in self._directories:
            try:
                with _one_builder(directory, wanted, wait=False) as chosen:
                    if chosen and not _record_path(directory, wanted).is_file():
                        _save(directory, wanted, write)
                return
            except OSError as error:
                self._refusal(directory, wanted, error)

    def _refusal(self, directory: Path, wanted: CachedArrays, error: OSError) -> str:
        """Returns why a folder cannot hold the arrays; raises ConfigError if the user chose the folder."""
        reason = error.strerror or str(error)
        if self._configured is not None:
            raise ConfigError(
                f"data.cache_dir = {self._configured}: cannot write the {wanted.what} there "
                f"({reason}); give a writable folder, or null"
            ) from error
        log.info("no %s cache in %s: %s", wanted.what, directory, reason)
        return f"{directory} ({reason})"


@contextmanager
def _one_builder(directory: Path, wanted: CachedArrays, wait: bool) -> Iterator[bool]:
    """Selects one process to build, while the others wait or continue.

    A lock selects one process of a node, or of all nodes if the file system has cluster-wide locks; otherwise a claim
    also selects one of the nodes. Both end with a killed builder: the lock at once, the claim after a timeout.

    Args:
        directory: folder of the arrays.
        wanted: the arrays.
        wait: wait until the arrays exist or no other process builds them.

    Yields:
        Whether this process is to build.
    """
    seen = _record_state(directory, wanted)
    with _one_of_a_node(directory, wanted, wait) as chosen:
        if not chosen or _record_state(directory, wanted) != seen:
            yield False
            return
        folder = directory / f"{wanted.name}.builders"
        with ExitStack() as stack:
            builds = False
            # The folder is removed after the build.
            with suppress(FileNotFoundError):
                claims = stack.enter_context(Claims(folder, [wanted.name]))
                builds = claims.take(wanted.name)
                if not builds and wait:
                    _log_waiting(claims.holder(wanted.name), directory, wanted)
                while not builds and wait and _record_state(directory, wanted) == seen:
                    time.sleep(_POLL_S)
                    builds = claims.take(wanted.name)
            if builds:
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
            yield builds


@contextmanager
def _one_of_a_node(directory: Path, wanted: CachedArrays, wait: bool) -> Iterator[bool]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{wanted.name}.lock"
    with path.open("a+b") as file:
        if not (chosen := _lock(file, wait=False)) and wait:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
            _log_waiting(holder, directory, wanted)
            chosen = _lock(file, wait=True)
        if chosen:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
            _remove_abandoned(directory, wanted)
        yield chosen
    if chosen:
        # A process that is still waiting has the file open; it then finds the arrays, or builds them again.
        path.unlink(missing_ok=True)


def _log_waiting(holder: str, directory: Path, wanted: CachedArrays) -> None:
    log.info("waiting for %s, which builds the %s %s", holder, wanted.what, directory / wanted.name)


def _lock(file: BinaryIO, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system has no locks.
        return True
    return True


def _remove_abandoned(directory: Path, wanted: CachedArrays) -> None:
    """Removes partial files of killed builders, which can be gigabytes for a large map."""
    for path in directory.glob(f".{wanted.name}-*.partial"):
        with suppress(OSError):
            # Without locks another node may still be writing, which updates the file every few seconds.
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _save(directory: Path, wanted: CachedArrays, write: Callable[[OpenArray], None]) -> None:
    room = shutil.disk_usage(directory)
    # Some network file systems do not report their size and return 0.
    if room.total and wanted.size_bytes > room.free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {wanted.size_bytes / 1e9:.1f} GB wanted, {room.free / 1e9:.1f} GB free",
        )
    paths = _array_paths(directory, wanted)
    start_s = time.monotonic()
    try:
        write(lambda name: atomic_writer(paths[name]))
        files = _file_records(paths, dict.fromkeys(paths, _HASH))
        with atomic_writer(_record_path(directory, wanted)) as file:
            file.write(json.dumps({"key": wanted.key, "files": files}, indent=1).encode())
        log.info("built the %s %s in %.1f s", wanted.what, directory / wanted.name, time.monotonic() - start_s)
    except BaseException:
        # Arrays without a record are useless, and may be gigabytes.
        if not _record_path(directory, wanted).is_file():
            for path in paths.values():
                path.unlink(missing_ok=True)
        raise
    if sum(path.stat().st_size for path in paths.values()) > MOST_BYTES_VERIFIED_BY_ALL:
        # Younger files are verified by every rank, see `computed_once`. These have just been hashed.
        time.sleep(SETTLED_NS / 1e9)
        verify_once(list(paths.values()), _claim(files), lambda: None)


def _load(directory: Path, wanted: CachedArrays) -> Arrays | None:
    """Returns cached arrays, memory-mapped; None if there are none or they are damaged."""
    record_path = _record_path(directory, wanted)
    if not record_path.is_file():
        return None
    try:
        expected = read_json(record_path)["files"]
        paths = _array_paths(directory, wanted)

        def verify() -> None:
            hashes = {name: "sha256" if "sha256" in expected[name] else _HASH for name in paths}
            for name, found in _file_records(paths, hashes).items():
                if found != expected[name]:
                    raise ValueError(f"{paths[name].name} does not match its checksum")

        verify_once(list(paths.values()), _claim(expected), verify)
        # Plain arrays over the maps, because slicing np.memmap objects is several times slower.
        return {name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()}
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        log.warning("%s: the cached %s is damaged (%s) and will be rebuilt", record_path, wanted.what, error)
        return None


def _claim(files: Mapping[str, Any]) -> str:
    return f"checksums: {json.dumps(files, sort_keys=True)}"


def _file_records(paths: Mapping[str, Path], hashes: Mapping[str, str]) -> dict[str, dict[str, int | str]]:
    """Returns size and checksum of every file; the files are read concurrently."""

    def record(name: str) -> dict[str, int | str]:
        with paths[name].open("rb") as file:
            digest = hashlib.file_digest(file, hashlib.sha256 if hashes[name] == "sha256" else xxhash.xxh3_128)
            return {"bytes": file.tell(), hashes[name]: digest.hexdigest()}

    with ThreadPoolExecutor(len(paths)) as threads:
        return dict(zip(paths, threads.map(record, paths), strict=True))


def _array_paths(directory: Path, wanted: CachedArrays) -> dict[str, Path]:
    return {name: directory / f"{wanted.name}-{name}.npy" for name in wanted.arrays}


def _record_state(directory: Path, wanted: CachedArrays) -> tuple[int, int] | None:
    """Returns a value that changes whenever the arrays are built; None if they do not exist."""
    try:
        status = _record_path(directory, wanted).stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


def _record_path(directory: Path, wanted: CachedArrays) -> Path:
    return directory / f"{wanted.name}.json"


class MapWriter:
    """Writes the arrays of a map.

    Args:
        open_array: opens the file of an array, by its name.
        threads: number of threads for building.
        report: called with the number of bytes written so far, every few MB; an exception ends the build.
    """

    def __init__(self, open_array: OpenArray, threads: int, report: Callable[[int], None]) -> None:
        self._open_array = open_array
        self.threads = threads
        self._report = report
        self._written = 0

    @contextmanager
    def pieces(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int]) -> Iterator[Append]:
        """Opens an array that is written in pieces along its first axis, until it is complete.

        Raises:
            OSError: the file cannot be written (full disk, no permission).
        """
        left = int(np.prod(shape))
        with self._open_array(name) as file:
            _write_header(file, dtype, shape)

            def append(piece: Array) -> None:
                nonlocal left
                cast = np.ascontiguousarray(piece, dtype)
                left -= cast.size
                file.write(cast.data)
                self._report_written(cast.nbytes)

            yield append
            assert not left, f"{name} lacks {left} of {shape}"

    @contextmanager
    def mapped(self, name: str, dtype: npt.DTypeLike, count: int) -> Iterator[Array]:
        """Opens a one-dimensional array that is written in any order, in pages that the system may write back to disk.

        Raises:
            OSError: as in `pieces`.
        """
        with self._open_array(name) as file:
            _write_header(file, dtype, (count,))
            begin = file.tell()
            # Without allocation, writing to a page for which the disk has no space raises SIGBUS.
            os.posix_fallocate(file.fileno(), begin, max(np.dtype(dtype).itemsize * count, 1))
            array = np.memmap(file.name, dtype, "r+", begin, (count,))
            yield array.view(np.ndarray)
            array.flush()
            self._report_written(array.nbytes)

    def _report_written(self, more_bytes: int) -> None:
        self._written += more_bytes
        self._report(self._written)


def _write_header(file: BinaryIO, dtype: npt.DTypeLike, shape: Sequence[int]) -> None:
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": description, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)
    file.flush()
