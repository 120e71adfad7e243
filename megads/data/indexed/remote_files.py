"""Reads files of a store through fsspec: byte ranges of one version of a file, with retries.

Only fsspec is imported here. The user installs the driver of a URL's scheme (s3fs, gcsfs, huggingface_hub), which reads
credentials from its own environment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
from fsspec.config import conf as settings

from megads.data.indexed.block_cache import Bytes
from megads.errors import DataError

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
