"""File access: reading with size limits, following growing files, atomic writing."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megads.errors import ConfigError


def temporary_path(path: Path) -> Path:
    """Returns a unique path in the folder of `path`, also among other hosts that share the folder."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` once it is complete and on disk.

    Concurrent writers are safe: each has its own temporary file, and the last one to finish wins.

    Args:
        path: file to create or replace; its folder must exist.

    Yields:
        The temporary file, open for binary writing. An exception removes it and leaves `path` unchanged.

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


def create_once(path: Path, content: bytes) -> bool:
    """Creates a file with its content, on disk, unless it exists: atomic on network file systems too.

    Returns:
        Whether this call created it.

    Raises:
        OSError: as the system reports it; FileNotFoundError if the folder is gone.
    """
    draft = temporary_path(path)
    try:
        with draft.open("xb") as file:
            file.write(content)
            sync(file)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def sync(file: BinaryIO) -> None:
    """Flushes `file` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flushes renames in `directory` to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MOST_BYTES = 1 << 30
_MOST_YAML, _MOST_DEPTH = 1 << 20, 100


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading.

    Raises:
        OSError: as the system reports it; EINVAL for a pipe, a socket or a device.
    """
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: as `open_regular`; EFBIG for more than 1 GiB.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: the text is not JSON, or too deeply nested.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None


def read_json(path: Path) -> Any:
    """Parses a JSON file; raises as `read_regular` and `parse_json`."""
    return parse_json(read_regular(path))


def require_bounded_yaml(text: str, most_characters: int = _MOST_YAML) -> None:
    """Refuses a YAML text that would take minutes to parse.

    PyYAML parses some 100 KB per second, and its time for nested brackets grows with the square of their depth.

    Raises:
        ValueError: the text is too long or too deeply nested.
    """
    if len(text) > most_characters:
        raise ValueError(f"it is longer than {most_characters:,} characters, which no config is")
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested without end")


def is_readable(path: Path) -> bool:
    """Whether a regular file exists at a path.

    Raises:
        ConfigError: something else than a regular file exists there.
    """
    try:
        # A single stat(): the file may appear between two calls.
        regular = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        # A dangling symlink counts as something else.
        if not path.is_symlink():
            return False
        regular = False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        regular = False
    if regular:
        return True
    raise ConfigError(f"{path} is no regular file: remove it, or put the file in its place, and start again")


_CHUNK_BYTES = 4 * 2**20


class Tail:
    """Reads the lines of a growing JSON lines file incrementally.

    Args:
        path: the file; it need not exist yet.
        position: byte to start from, at the start of a line; None: the current end of the file.
    """

    def __init__(self, path: Path, position: int | None = None):
        self._path = path
        if position is None:
            position = path.stat().st_size if path.is_file() else 0
        self.position = position

    def read(self) -> list[dict[str, Any]]:
        """Returns the objects of the lines completed since the last call, at most a few megabytes; [] at the end."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            # A resume truncates the file to its checkpoint.
            self.position = min(self.position, file.seek(0, os.SEEK_END))
            file.seek(self.position)
            text = file.read(_CHUNK_BYTES)
        complete = text[: text.rfind(b"\n") + 1]
        self.position += len(complete)
        return _objects(complete)


def read_end(path: Path, num_bytes: int) -> list[dict[str, Any]]:
    """Returns the objects of the complete lines in the last `num_bytes` of a file; empty without a file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        file.seek(start)
        text = file.read(num_bytes)
    if start:
        text = text[text.find(b"\n") + 1 :]
    return _objects(text[: text.rfind(b"\n") + 1])


def _objects(text: bytes) -> list[dict[str, Any]]:
    """Parses lines and skips partial ones."""
    records = []
    for line in text.splitlines():
        try:
            records.append(parse_json(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict)]


def last_line(path: Path) -> str:
    """Returns the last non-blank line of a small text file; empty if there is none."""
    if not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
