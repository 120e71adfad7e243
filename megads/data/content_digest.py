"""Digests of files' contents, remembered, so that a file that did not change is not read again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from megads.data.progress import ByteProgress
from megads.errors import DataError
from megads.runtime.files import atomic_writer, read_json

_BLOCK_BYTES = 1 << 22
# A file written a moment ago may be written again within the same tick of the clock: its times prove nothing yet.
SETTLED_NS = 2 * 10**9

FileState = tuple[int, int, int, int]
"""Size, times of the last change of content and of inode, inode number: no write leaves all four as they were."""


class ContentDigests:
    """Computes digests; the content decides, size and times only say whether it must be read.

    Args:
        memory: file that remembers digests from one process to the next.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known = _read_memory(memory)
        self._learnt = False

    def of(self, files: Sequence[Path]) -> list[tuple[FileState, str]]:
        """Returns the state and the digest of every file, in order.

        Raises:
            DataError: a file cannot be read, or is being written to.
        """
        found: dict[Path, tuple[FileState, str]] = {}
        unknown: list[Path] = []
        for path in files:
            state = file_state(path)
            known = self._known.get(str(path.absolute()))
            if known is not None and tuple(known[:4]) == state:
                found[path] = state, str(known[4])
            else:
                unknown.append(path)
        with ByteProgress("reading", sum(path.stat().st_size for path in unknown)) as progress:
            done_bytes = 0
            for path in unknown:
                state = file_state(path)
                found[path] = state, _digest(path, progress, done_bytes)
                require_unchanged(path, state)
                done_bytes += state[0]
                self._remember(path, *found[path])
        return [found[path] for path in files]

    def save(self) -> None:
        """Writes what was learnt; a disk that does not take it costs only the next start's time."""
        if self._learnt:
            with suppress(OSError), atomic_writer(self._memory) as file:
                file.write(json.dumps(self._known).encode())

    def _remember(self, path: Path, state: FileState, digest: str) -> None:
        if time.time_ns() - max(state[1], state[2]) > SETTLED_NS:
            self._known[str(path.absolute())] = [*state, digest]
            self._learnt = True


def file_state(path: Path) -> FileState:
    """Returns what changes whenever the file does; raises DataError where it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def require_unchanged(path: Path, state: FileState) -> None:
    """Raises DataError where a file is no longer as it was."""
    if file_state(path) != state:
        raise DataError(f"{path}: changed while it was read: start again when nothing writes to it")


def _digest(path: Path, progress: ByteProgress, done_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done_bytes += len(block)
                progress.update(done_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; make it readable or leave it out") from error
    return str(digest.hexdigest())


def _read_memory(memory: Path) -> dict[str, list[Any]]:
    """Returns what is remembered, nothing where the file is missing or damaged."""
    try:
        content = read_json(memory)
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {path: entry for path, entry in content.items() if isinstance(entry, list) and len(entry) == 5}
