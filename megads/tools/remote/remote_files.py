"""Remote files of a store, read through fsspec with retries, and a disk cache of their blocks.

Only fsspec is imported here. The user installs the driver of a URL's scheme (s3fs, gcsfs, huggingface_hub), which reads
credentials from its own environment.

The cache is bounded and shared by the processes of a node; each block is fetched by one of them. A block is a separate
file with its bytes and their XXH3. It is written under a temporary name and renamed, so a killed process leaves no
partial block; the checksum detects blocks torn when a machine is lost. An open block stays readable after its eviction.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
import numpy.typing as npt
import xxhash
from fsspec.config import conf as settings

from megads.api import ConfigError, DataError, make_own, reason_of
from megads.errors import DISK_FULL

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
            folder.parent.mkdir(parents=True, exist_ok=True)
            make_own(folder.resolve())
            self._file = os.open(folder / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"data.stream.cache_dir = {folder}: cannot be used: {reason_of(error)}; give a folder of your own on "
                "a disk of the node"
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
            raise ConfigError(f"data.stream.cache_dir: {self._folder} cannot be written: {reason_of(error)}") from error

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


_S3 = ("s3", "s3a")
# Retries happen in this module, which counts them, and start sooner than the driver's.
_S3_TIMES = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "total_max_attempts": 1}}
# Metadata that changes whenever a file's content does; the first that the store reports is used.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "sha256", "blob_id", "content_md5")
_TIMES = ("mtime", "LastModified", "last_modified", "last_commit", "updated", "created")
_HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "GatedRepoError")
_OTHER_VERSION = "FileExpired"
"""Exception of s3fs when S3 refuses to read another version."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CONTACT_S = 30.0
"""How long a start waits for a store that does not answer, because its URL may be wrong."""
_RECHECK_S = 30.0
"""How often the version is checked in a store that does not refuse to read another version."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileVersion:
    """One version of a file in a store.

    Attributes:
        url: URL of the file.
        num_bytes: size of the file.
        version: identifier that changes with the content.
    """

    url: str
    num_bytes: int
    version: str


class RemoteFiles:
    """The files of a dataset, whose URLs start with the dataset's.

    Args:
        url: URL of the dataset, already checked; its files are <url>.bin and so on.
        connections: concurrent requests.
        retry_s: how long a failed request is retried.

    Raises:
        DataError: the driver cannot be initialized.
    """

    def __init__(self, url: str, connections: int = 8, retry_s: float = 300.0) -> None:
        self.url, self.retry_s = url, retry_s
        self._scheme = urlsplit(url).scheme
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._scheme in _S3:
            own = settings.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = _S3_TIMES | {"max_pool_connections": max(connections, 10)} | own
        try:
            self.fs, self._path = fsspec.core.url_to_fs(url, **options)
        # Drivers raise exceptions of their libraries, which have no common base class.
        except Exception as error:
            raise DataError(f"{url}: {said(error)}") from error
        self.refuses_other_versions = self._scheme in _S3

    def path(self, ending: str) -> str:
        """Returns the driver's path of a file."""
        return f"{self._path}{ending}"

    def find(self, ending: str) -> FileVersion | None:
        """Returns a file; None if it does not exist.

        Raises:
            DataError: the store did not answer in time.
        """
        url = f"{self.url}{ending}"

        def info() -> FileVersion | None:
            try:
                self.fs.invalidate_cache()
                about = self.fs.info(self.path(ending))
            except FileNotFoundError:
                return None
            return None if about.get("type") == "directory" else _described(url, about)

        return persistently(info, url, min(self.retry_s, _CONTACT_S))

    def describe(self, ending: str, about: dict[str, Any] | None) -> FileVersion:
        """Returns the current version of a file, from the metadata of an open file or from the store; raises driver
        errors."""
        return _described(f"{self.url}{ending}", about or self.fs.info(self.path(ending)))


class VersionedFile:
    """Reads one version of a file; thread-safe.

    Args:
        files: files of the dataset.
        ending: extension of the file's URL.
        expected: version to read.
    """

    def __init__(self, files: RemoteFiles, ending: str, expected: FileVersion) -> None:
        self._files, self._ending, self.expected = files, ending, expected
        self._of_thread = threading.local()
        self._checked_s = time.monotonic()
        self.retries = 0
        """Failed requests that were repeated."""

    def read(self, begin: int, end: int) -> Bytes:
        """Returns bytes of the file, uint8 [end - begin], with one request.

        Raises:
            DataError: the file is missing, has changed or may not be read, or the store does not answer.
        """
        return persistently(lambda: self._read(begin, end), self.expected.url, self._files.retry_s, self._failed)

    def _read(self, begin: int, end: int) -> Bytes:
        if not self._files.refuses_other_versions and time.monotonic() - self._checked_s > _RECHECK_S:
            self._require_same(None)
        file = getattr(self._of_thread, "file", None)
        if file is None:
            file = self._files.fs.open(self._files.path(self._ending), "rb", cache_type="none")
            self._require_same(getattr(file, "details", None))
            self._of_thread.file = file
        file.seek(begin)
        content = file.read(end - begin)
        if len(content) != end - begin:
            raise OSError(f"{len(content)} bytes received instead of {end - begin}")
        return np.frombuffer(content, np.uint8)

    def _failed(self, error: Exception) -> None:
        """Called before a retry: reopens the file and checks that its version has not changed."""
        self.retries += 1
        if self._files.refuses_other_versions and type(error).__name__ != _OTHER_VERSION:
            return
        self._of_thread.file = None
        self._require_same(None)

    def _require_same(self, about: dict[str, Any] | None) -> None:
        now = self._files.describe(self._ending, about)
        self._checked_s = time.monotonic()
        if now != self.expected:
            raise DataError(
                f"{now.url}: something wrote to it while this run read it: it had {self.expected.num_bytes:,} bytes "
                f"(version {self.expected.version}), now {now.num_bytes:,} ({now.version}); put it back, or start "
                "again, which checks whether its content is what the run was trained on"
            )


def persistently(
    action: Callable[[], T], url: str, retry_s: float, failed: Callable[[Exception], None] = lambda _: None
) -> T:
    """Calls a driver, and retries with growing pauses if the error may be temporary.

    Args:
        action: the driver call.
        url: URL for messages.
        retry_s: how long to retry.
        failed: called with the exception before each retry; its own exceptions are handled like those of `action`.

    Raises:
        DataError: the error is permanent, or retries took too long; includes the driver's message.
    """
    before: Exception | None = None
    until, pause_s = time.monotonic() + retry_s, _FIRST_PAUSE_S
    while True:
        try:
            if before is not None:
                failed(before)
            return action()
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{url}: is not there (any more); put it back and start again") from error
        except PermissionError as error:
            raise DataError(
                f"{url}: may not be read: {said(error)}; give this machine the store's credentials, as its driver "
                "reads them (AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN)"
            ) from error
        # Drivers raise exceptions of their libraries, which have no common base class.
        except Exception as error:
            if type(error).__name__ in _HOPELESS or time.monotonic() + pause_s > until:
                raise DataError(
                    f"{url}: cannot be read: {said(error)}; tried for {retry_s:g} s (data.stream.retry_s)"
                ) from error
            log.info("%s: %s; trying again in %.1f s", url, said(error), pause_s)
            before = error
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def said(error: Exception) -> str:
    """Returns a driver's error message on one line."""
    text = " ".join(str(error).split())[:300] or "no reason given"
    return f"{type(error).__name__}: {text}"


def _described(url: str, about: dict[str, Any]) -> FileVersion:
    told = next((f"{about[key]}" for key in _VERSIONS if about.get(key)), None)
    if told is None:
        told = ", ".join(f"{about[key]}" for key in (*_TIMES, "ino") if about.get(key))
    if len(told) > 64:
        told = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return FileVersion(url, int(about["size"]), told.strip('"'))
