"""Reads small files that may hold anything: only regular ones, so that no reader waits for a pipe or reads for ever."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from megads.errors import ConfigError

_MOST_BYTES = 1 << 30
_MOST_YAML, _MOST_DEPTH = 1 << 20, 100


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a regular file.

    Raises:
        OSError: as the system reports it; EINVAL for a pipe, a socket or a device, EFBIG for more than 1 GiB.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if state.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    except OSError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Returns what a JSON text says.

    Raises:
        ValueError: it is no JSON, or nested more deeply than anything of ours.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested without end") from None


def read_json(path: Path) -> Any:
    """Returns what a JSON file says; raises OSError and ValueError as the two above do."""
    return parse_json(read_regular(path))


def require_bounded_yaml(text: str, most_characters: int = _MOST_YAML) -> None:
    """Refuses a YAML text that takes minutes to parse: PyYAML reads some 100 KB a second, and brackets within brackets
    in a time that grows with the square of their depth.

    Raises:
        ValueError: it is too long, or too deep.
    """
    if len(text) > most_characters:
        raise ValueError(f"it is longer than {most_characters:,} characters, which no config is")
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(depth - 1, 0)
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested without end")


def is_readable(path: Path) -> bool:
    """Whether something is there to read; False where there is nothing.

    Raises:
        ConfigError: something else than a regular file has the name.
    """
    if path.is_file():
        return True
    if not os.path.lexists(path):
        return False
    raise ConfigError(f"{path} is no regular file: remove it, or put the file in its place, and start again")
