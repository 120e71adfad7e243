"""Remote stores through fsspec: files are uploaded, verified by a digest, listed, downloaded and removed.

Only fsspec is imported here; the user installs the driver of a URL's scheme (s3fs, gcsfs). The driver reads credentials
from its own environment: no URL, file or message of megads contains any.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import xxhash
from fsspec.callbacks import Callback
from fsspec.config import conf as settings

from megads.api import CheckpointError, atomic_writer, open_regular, temporary_path
from megads.runtime.url import LOCAL_SCHEMES as _LOCAL

T = TypeVar("T")

_PART_BYTES = 32 * 2**20
_PARTS_AT_A_TIME = 8
_MOST_PARTS = 9000
"""Below S3's limit of 10,000 parts per file."""
_BLOCK_BYTES = 8 * 2**20
_S3 = ("s3", "s3a")
# Uploads to these are atomic; elsewhere a file is uploaded under a temporary name and renamed.
_OBJECT_STORES = (*_S3, "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "r2")
_S3_TIMES = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "max_attempts": 3}}
_MOST_TEXT_BYTES = 2**30
_NEXT_PAGE = ("NextKeyMarker", "NextUploadIdMarker", "NextPartNumberMarker")
_ETAG = re.compile(r"[0-9a-f]{32}(-\d+)?")


class RemoteError(CheckpointError):
    """An operation on a store failed; the message gives the store's reason."""


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store.

    Attributes:
        bytes: size in bytes.
        digest: digest computed by the store, comparable with `expected_digest`; empty if the store reports none.
    """

    bytes: int
    digest: str


@dataclass(frozen=True)
class RemovedParts:
    """Parts of incomplete uploads that were removed.

    Attributes:
        count: number of incomplete uploads.
        bytes: total bytes of their parts.
    """

    count: int
    bytes: int


class RemoteStore:
    """A folder under a URL.

    Args:
        url: validated URL of the folder.
        limit_s: connect and read timeout, only for S3; None: connect 10 s, read 60 s, unless fsspec's config sets them.

    Raises:
        RemoteError: the driver cannot be initialized.
    """

    def __init__(self, url: str, limit_s: float | None = None):
        self.url = url.rstrip("/")
        self._scheme = urlsplit(url).scheme
        # No cached listings, since other processes write there, too.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._scheme in _S3:
            limits = {} if limit_s is None else {"read_timeout": limit_s, "connect_timeout": limit_s}
            options["config_kwargs"] = _S3_TIMES | settings.get("s3", {}).get("config_kwargs", {}) | limits
        self._fs, self._root = self._call(lambda: fsspec.core.url_to_fs(self.url, **options), "")
        self._root = self._root.rstrip("/")

    def _call(self, action: Callable[[], T], name: str) -> T:
        """Runs a driver call and converts its errors.

        Raises:
            RemoteError: any other error, with the driver's message.
            FileNotFoundError: passed through.
        """
        try:
            return action()
        except FileNotFoundError:
            raise
        # Drivers pass on exceptions of their libraries, which have no common base class.
        except Exception as error:
            said = " ".join(str(error).split())[:300] or "no reason given"
            where = f"{self.url}/{name}" if name else self.url
            raise RemoteError(f"{where}: {type(error).__name__}: {said}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def files(self, folder: str) -> dict[str, RemoteFile]:
        """Files in a folder and its subfolders, by relative path; empty if the folder does not exist.

        Raises:
            RemoteError: the store fails.
        """
        path = self._path(folder)

        def find() -> dict[str, dict[str, Any]]:
            self._fs.invalidate_cache()
            return dict(self._fs.find(path, detail=True))

        try:
            found = self._call(find, folder)
        except FileNotFoundError:
            return {}
        return {
            name.removeprefix(f"{path}/"): _remote_file(about)
            for name, about in found.items()
            if name.startswith(f"{path}/") and about.get("type") == "file"
        }

    def stat(self, name: str) -> RemoteFile | None:
        """Size and digest of a file, None if it does not exist.

        Raises:
            RemoteError: the store fails.
        """

        def info() -> RemoteFile:
            self._fs.invalidate_cache()
            return _remote_file(self._fs.info(self._path(name)))

        try:
            return self._call(info, name)
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if it does not exist.

        Raises:
            RemoteError: it cannot be read, or is larger than 1 GiB.
        """
        found = self.stat(name)
        if found is None:
            return None
        if found.bytes > _MOST_TEXT_BYTES:
            raise RemoteError(f"{self.url}/{name} has {found.bytes:,} bytes")
        with suppress(FileNotFoundError):
            return bytes(self._call(lambda: self._fs.cat_file(self._path(name)), name))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces a small file atomically.

        Raises:
            RemoteError: it cannot be written.
        """
        self._place(name, lambda path: self._fs.pipe_file(path, content), lambda file: file.write(content))

    def remove(self, name: str) -> None:
        """Removes a file; a missing file is not an error.

        Raises:
            RemoteError: it cannot be removed.
        """
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.rm_file(self._path(name)), name)

    def remove_folder(self, folder: str) -> None:
        """Removes an empty folder; does nothing in object stores, which have no folders."""
        if self._scheme not in _OBJECT_STORES:
            with suppress(RemoteError, FileNotFoundError):
                self._call(lambda: self._fs.rmdir(self._path(folder)), folder)

    def remove_parts(self, but: Collection[str] = ()) -> RemovedParts:
        """Aborts incomplete S3 uploads of killed processes in this folder and removes their parts.

        Uploads in progress lose the parts of the current file, too.

        Args:
            but: subfolders to skip, in which uploads are in progress.

        Raises:
            RemoteError: the store cannot list or remove them.
        """
        if self._scheme not in _S3:
            return RemovedParts(0, 0)
        bucket, _, folder = self._root.partition("/")
        spared = tuple(f"{folder}/{name}/" for name in but)

        def remove() -> RemovedParts:
            count = size = 0
            # Copied to a list, since aborting uploads changes the listing.
            for found in list(self._listed("list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=f"{folder}/")):
                key, of = str(found["Key"]), {"Bucket": bucket, "Key": found["Key"], "UploadId": found["UploadId"]}
                # Checked here too: a server that ignores Prefix would make us abort uploads of other runs.
                if not key.startswith(f"{folder}/") or key.startswith(spared):
                    continue
                with suppress(FileNotFoundError):
                    nbytes = sum(int(part["Size"]) for part in self._listed("list_parts", "Parts", **of))
                    self._fs.call_s3("abort_multipart_upload", **of)
                    count, size = count + 1, size + nbytes
            return RemovedParts(count, size)

        return self._call(remove, "")

    def _listed(self, method: str, what: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        """Entries of a paginated S3 listing."""
        while True:
            page = self._fs.call_s3(method, **arguments)
            yield from page.get(what) or ()
            following = {name.removeprefix("Next"): page[name] for name in _NEXT_PAGE if page.get(name)}
            if not page.get("IsTruncated") or not following:
                return
            arguments |= following

    def put(self, local: Path, name: str, sent: Callable[[int], None] = lambda _: None) -> RemoteFile:
        """Uploads a file and verifies it.

        The store's digest must equal that of the local file. If there is none, or it is of another kind (S3 with KMS
        keys), the file is read back and compared.

        Args:
            local: the local file.
            name: its path in the store.
            sent: called with the number of bytes sent, if the driver reports it.

        Raises:
            RemoteError: the upload fails, or the file in the store differs from the local one.
            OSError: the local file cannot be read.
        """
        size = local.stat().st_size
        with ThreadPoolExecutor(1, "digest") as pool:
            digest = pool.submit(self.expected_digest, local) if self._scheme in _OBJECT_STORES else None
            self._place(
                name,
                lambda path: self._fs.put_file(str(local), path, callback=_Sent(sent), **self._put_options(size)),
                lambda file: _copy(local, file, sent),
            )
            expected = "" if digest is None else digest.result()
        found = self.stat(name)
        if found is None or not self._is_copy(found, local, name, expected):
            raise RemoteError(f"{self.url}/{name} is not what was sent: what came back differs from {local}")
        return found

    def holds(self, found: RemoteFile, local: Path, name: str) -> bool:
        """Whether a file in the store is identical to a local one; verified as in `put`.

        Raises:
            RemoteError: the file in the store cannot be read.
            OSError: the local file cannot be read.
        """
        if found.bytes != local.stat().st_size:
            return False
        return self._is_copy(found, local, name, self.expected_digest(local) if found.digest else "")

    def _is_copy(self, found: RemoteFile, local: Path, name: str, expected: str) -> bool:
        if found.bytes != local.stat().st_size:
            return False
        # Equal digests prove equality; different digests may be of different kinds, so the file is read back.
        return (bool(expected) and found.digest == expected) or self._read_back(name) == _checksum(local)

    def _read_back(self, name: str) -> str:
        digest = xxhash.xxh3_128()

        def read() -> str:
            with self._fs.open(self._path(name), "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            return digest.hexdigest()

        try:
            return self._call(read, name)
        except FileNotFoundError:
            return ""

    def get(self, name: str, local: Path, received: Callable[[int], None] = lambda _: None) -> None:
        """Downloads a file; the caller verifies its content.

        Args:
            name: its path in the store.
            local: destination; replaced if it exists.
            received: called with the number of bytes received, if the driver reports it.

        Raises:
            RemoteError: it does not exist, or cannot be downloaded.
            OSError: the local file cannot be written.
        """
        try:
            self._call(lambda: self._fs.get_file(self._path(name), str(local), callback=_Sent(received)), name)
        except FileNotFoundError as error:
            raise RemoteError(f"{self.url}/{name} is not there") from error

    def expected_digest(self, local: Path) -> str:
        """The digest that a store reports for a local file: its MD5, or S3's multipart ETag (MD5 of the parts' MD5s,
        and their number).

        Raises:
            OSError: the file cannot be read.
        """
        size = local.stat().st_size
        part = _part_bytes(size) if self._scheme in _S3 and size >= 2 * _part_bytes(size) else None
        with open_regular(local) as file:
            digests = []
            while True:
                digest, left = hashlib.md5(usedforsecurity=False), part or size
                while left and (block := file.read(min(left, _BLOCK_BYTES))):
                    digest.update(block)
                    left -= len(block)
                digests.append(digest)
                if part is None:
                    return digest.hexdigest()
                if file.tell() >= size:
                    break
        joined = hashlib.md5(b"".join(digest.digest() for digest in digests), usedforsecurity=False)
        return f"{joined.hexdigest()}-{len(digests)}"

    def _put_options(self, size: int) -> dict[str, int]:
        if self._scheme not in _S3:
            return {}
        return {"chunksize": _part_bytes(size), "max_concurrency": _PARTS_AT_A_TIME}

    def _place(self, name: str, put: Callable[[str], object], write: Callable[[Any], object]) -> None:
        """Creates a file atomically: with `put` through a driver, with `write` in a local file system."""
        path = self._path(name)
        if self._scheme in _LOCAL:

            def place() -> None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with atomic_writer(Path(path)) as file:
                    write(file)

            self._call(place, name)
        elif self._scheme in _OBJECT_STORES:
            self._absent_is_an_error(lambda: put(path), name)
        else:

            def rename() -> None:
                parent, aside = path.rpartition("/")[0], str(temporary_path(Path(path)))
                self._fs.makedirs(parent, exist_ok=True)
                put(aside)
                self._fs.mv(aside, path)

            self._absent_is_an_error(rename, name)

    def _absent_is_an_error(self, action: Callable[[], object], name: str) -> None:
        """Converts FileNotFoundError to RemoteError: stores raise it for a missing bucket."""
        try:
            self._call(action, name)
        except FileNotFoundError as error:
            raise RemoteError(f"{self.url}/{name}: {' '.join(str(error).split())[:300]}") from error


class _Sent(Callback):  # type: ignore[misc]
    """fsspec callback that reports the bytes that a driver has transferred."""

    def __init__(self, tell: Callable[[int], None]):
        super().__init__()
        self._tell = tell

    def relative_update(self, inc: int = 1) -> None:
        self._tell(inc)


def _part_bytes(size: int) -> int:
    return max(_PART_BYTES, math.ceil(size / _MOST_PARTS))


def _copy(local: Path, file: Any, sent: Callable[[int], None]) -> None:
    with open_regular(local) as source:
        while block := source.read(_BLOCK_BYTES):
            file.write(block)
            sent(len(block))


def _checksum(local: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(local) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _remote_file(about: Mapping[str, Any]) -> RemoteFile:
    etag, md5 = str(about.get("ETag", "")).strip('"'), about.get("md5Hash")
    if isinstance(md5, str):
        etag = base64.b64decode(md5).hex()
    return RemoteFile(int(about["size"]), etag if _ETAG.fullmatch(etag) else "")


def within(limit_s: float, action: Callable[[], T], what: str) -> T:
    """Runs an action with a timeout, since a driver may hang.

    Args:
        limit_s: timeout in seconds.
        action: the action; after a timeout its thread keeps running.
        what: subject of the error message.

    Raises:
        RemoteError: the action timed out. Exceptions of the action are passed through.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise RemoteError(f"{what} has not answered within {limit_s:g} s")
    return results[0]
