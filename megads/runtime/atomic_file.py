"""Files that are either complete under their name or not there at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def temporary_path(path: Path) -> Path:
    """Returns a name beside `path` that nobody else uses, not even on another host that shares the folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary beside `path` that takes its name once it is complete and on disk.

    Concurrent writers are harmless: each has its own temporary, and the last one to finish wins.

    Args:
        path: the file to make or replace; its folder must exist.

    Yields:
        The temporary, open for binary writing. An exception removes it and leaves `path` as it was.

    Raises:
        OSError: as the system reports it (full disk, no permission).
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            yield file
            sync(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync(file: BinaryIO) -> None:
    """Forces what was written to `file` onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Forces renames in `directory` onto the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
