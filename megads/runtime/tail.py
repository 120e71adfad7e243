"""Reads what is appended to a file of JSON lines while another process writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megads.runtime.regular_file import parse_json

_CHUNK_BYTES = 4 * 2**20


class Tail:
    """Follows one file.

    Args:
        path: the file; it need not exist yet.
        position: byte to start from, the start of a line; None is the end that the file has now.
    """

    def __init__(self, path: Path, position: int | None = None):
        self._path = path
        if position is None:
            position = path.stat().st_size if path.is_file() else 0
        self.position = position

    def read(self) -> list[dict[str, Any]]:
        """Returns the objects of the lines completed since the last call, a few megabytes at most; [] at the end."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            # A resume cuts the file back to its checkpoint.
            self.position = min(self.position, file.seek(0, os.SEEK_END))
            file.seek(self.position)
            text = file.read(_CHUNK_BYTES)
        complete = text[: text.rfind(b"\n") + 1]
        self.position += len(complete)
        return _objects(complete)


def read_end(path: Path, num_bytes: int) -> list[dict[str, Any]]:
    """Returns the objects of the whole lines within the last `num_bytes` of a file; no file, no objects."""
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
    """Parses lines, passing over those cut short by a kill."""
    records = []
    for line in text.splitlines():
        try:
            records.append(parse_json(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict)]


def last_line(path: Path) -> str:
    """Returns the last line of a small text file that says something; empty where there is none."""
    if not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
