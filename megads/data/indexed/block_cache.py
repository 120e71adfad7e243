"""Disk cache of blocks of remote files: bounded, shared by the processes of a node, each block fetched by one of them.

A block is a separate file with its bytes and their XXH3. It is written under a temporary name and renamed, so a killed
process leaves no partial block; the checksum detects blocks torn when a machine is lost. An open block stays readable
after its eviction. This module does not fetch blocks.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megads.errors import DISK_FULL, ConfigError

Bytes = npt.NDArray[np.uint8]
_DIGEST_BYTES = 8
_FOLDER_BLOCKS = 1000
"""Blocks per folder, since listing a folder with many more is slow."""
_KEPT_SHARE = 0.9
"""Share of the limit that remains after an eviction; evicting several blocks at once amortizes listing all of them."""
_ABANDONED_S = 600.0
_LOCK = struct.Struct("hhqqi4x")
"""struct flock of Linux, 64 bit."""


@dataclass(frozen=True)
class StreamCounters:
    """Counters of remote reads by all processes of a node, since the cache folder was made.

    Attributes:
        used_bytes: current size of the blocks on disk.
        fetched_bytes: bytes received over the network.
        requests: number of successful requests.
        retries: failed requests that were repeated.
        evicted_bytes: bytes removed to free space.
        hits: blocks that were in the cache when a batch needed them.
        waits: blocks that were not.
        wait_us: microseconds that dataloaders waited for these. Dataloaders read ahead, so training need not have
            waited.
    """

    used_bytes: int = 0
    fetched_bytes: int = 0
    requests: int = 0
    retries: int = 0
    evicted_bytes: int = 0
    hits: int = 0
    waits: int = 0
    wait_us: int = 0

    def since(self, before: StreamCounters) -> StreamCounters:
        """Returns the increase of each counter after `before`; used_bytes is the current value."""
        differences = (now - then for now, then in zip(astuple(self)[1:], astuple(before)[1:], strict=True))
        return StreamCounters(self.used_bytes, *differences)


_NUMBERS = struct.Struct(f"<{len(fields(StreamCounters))}q")


class CacheFolder:
    """The cache folder of all remote data of a node, with a size limit.

    Args:
        folder: folder on a disk of the node; created if missing.
        most_bytes: maximum size of the blocks.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(folder / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"data.stream.cache_dir = {folder}: cannot be written: {error.strerror}; give a folder on a disk of "
                "the node"
            ) from error
        self._thread_lock = threading.Lock()

    def close(self) -> None:
        """Closes the file of the counters."""
        os.close(self._file)

    def counters(self) -> StreamCounters:
        """Returns the counters of all processes of the node."""
        with self._locked():
            return self._read()

    def count(self, **more: int) -> None:
        """Adds to counters, given by name."""
        with self._locked():
            self._write(self._added(self._read(), more))

    def reserve(self, size: int) -> None:
        """Frees space for more bytes; the least recently used blocks are evicted first."""
        with self._locked():
            now = self._read()
            if now.used_bytes + size > self.most_bytes:
                now = self._evict(now, int(self.most_bytes * _KEPT_SHARE) - size)
            self._write(self._added(now, {"used_bytes": size}))

    def make_room(self) -> None:
        """Evicts half of the blocks, because the disk is full."""
        with self._locked():
            now = self._read()
            self._write(self._evict(now, None))

    def _added(self, now: StreamCounters, more: dict[str, int]) -> StreamCounters:
        return StreamCounters(**{item.name: getattr(now, item.name) + more.get(item.name, 0) for item in fields(now)})

    def _evict(self, now: StreamCounters, target_bytes: int | None) -> StreamCounters:
        """Evicts blocks down to a size, or half of them.

        The size of all blocks is computed again, because killed processes may have reserved space without using it.
        """
        found = sorted(_blocks(self.folder))
        used = sum(size for _, size, _ in found)
        target_bytes = used // 2 if target_bytes is None else target_bytes
        evicted = 0
        for changed, size, path in found:
            if used - evicted <= target_bytes:
                break
            if path.endswith(".partial") and time.time() - changed < _ABANDONED_S:
                continue
            with suppress(FileNotFoundError):
                Path(path).unlink()
            evicted += size
        return self._added(now, {"used_bytes": used - evicted - now.used_bytes, "evicted_bytes": evicted})

    def _read(self) -> StreamCounters:
        content = os.pread(self._file, _NUMBERS.size, 0)
        return StreamCounters(*_NUMBERS.unpack(content)) if len(content) == _NUMBERS.size else StreamCounters()

    def _write(self, counters: StreamCounters) -> None:
        os.pwrite(self._file, _NUMBERS.pack(*astuple(counters)), 0)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _blocks(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yields last use, size and path of every block, and of partial files of killed processes."""
    for blocks in folder.glob("*/*/blocks-*"):
        for inner in blocks.glob("*/"):
            with suppress(FileNotFoundError), os.scandir(inner) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        yield status.st_mtime, status.st_size, entry.path


class BlockCache:
    """The blocks of one version of a remote file.

    Args:
        root: cache folder of the node.
        folder: folder of these blocks, two levels below the root's.
        num_bytes: size of the file.
        block_bytes: size of a block; the last one may be smaller.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, root: CacheFolder, folder: Path, num_bytes: int, block_bytes: int) -> None:
        self.root, self._folder = root, folder / f"blocks-{block_bytes}"
        self.num_bytes, self.block_bytes = num_bytes, block_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._claims = os.open(self._folder / "claims", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"data.stream.cache_dir: {self._folder} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Releases all claims and closes their file."""
        os.close(self._claims)

    def size(self, block: int) -> int:
        """Returns the size of a block in bytes."""
        return min(self.block_bytes, self.num_bytes - block * self.block_bytes)

    def touch(self, block: int) -> bool:
        """Returns whether a block is cached, and marks it as used now."""
        try:
            os.utime(self._path(block))
        except FileNotFoundError:
            return False
        return True

    def read(self, block: int) -> Bytes | None:
        """Returns a block, uint8 [its size]; None if it is missing, or was damaged and has been removed.

        Raises:
            OSError: the disk cannot be read.
        """
        path = self._path(block)
        try:
            content = np.fromfile(path, np.uint8)
        except FileNotFoundError:
            return None
        held, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:].tobytes()
        if held.size == self.size(block) and xxhash.xxh3_64_digest(held.data) == digest:
            return held
        path.unlink(missing_ok=True)
        return None

    def put(self, block: int, content: Bytes) -> None:
        """Stores a block.

        Raises:
            ConfigError: the disk is full.
        """
        assert content.size == self.size(block)
        self.root.reserve(content.size + _DIGEST_BYTES)
        try:
            self._write(block, content)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self.root.make_room()
            try:
                self._write(block, content)
            except OSError as again:
                raise ConfigError(
                    f"data.stream.cache_dir = {self.root.folder}: {again.strerror}: free space there, give another "
                    "folder, or lower data.stream.cache_gib"
                ) from again

    def try_claim(self, block: int) -> bool:
        """Returns whether this process may fetch a block now; the claim ends with `release` or with the process."""
        # An open-file-description lock: it also excludes other caches of this process, and cannot deadlock.
        return self._lock(fcntl.F_WRLCK, block)

    def release(self, blocks: Sequence[int]) -> None:
        """Releases claims."""
        for block in blocks:
            self._lock(fcntl.F_UNLCK, block)

    def _lock(self, kind: int, block: int) -> bool:
        wanted = _LOCK.pack(kind, os.SEEK_SET, block, 1, 0)
        try:
            fcntl.fcntl(self._claims, fcntl.F_OFD_SETLK, wanted)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _path(self, block: int) -> Path:
        return self._folder / f"{block // _FOLDER_BLOCKS:06d}" / f"{block:010d}"

    def _write(self, block: int, content: Bytes) -> None:
        path = self._path(block)
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        path.parent.mkdir(exist_ok=True)
        try:
            with partial.open("wb", buffering=0) as file:
                for part in (content.data, xxhash.xxh3_64_digest(content.data)):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
