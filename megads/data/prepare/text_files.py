"""The files of raw text: finds them by names, folders and globs, tells their kinds and decompresses them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
import glob
import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from megads.errors import ConfigError, DataError

JSONL_ENDINGS = (".jsonl", ".json")
TEXT_ENDINGS = (".txt", ".md")
PARQUET_ENDINGS = (".parquet",)
COMPRESSED_ENDINGS = (".gz", ".zst")
_KNOWN_KINDS = (
    f"{', '.join((*TEXT_ENDINGS, *JSONL_ENDINGS))}, each also with {' or '.join(COMPRESSED_ENDINGS)}, "
    f"and {', '.join(PARQUET_ENDINGS)}"
)
# Bytes of text in a byte of file, roughly.
_EXPANSION = {".gz": 3, ".zst": 3, ".parquet": 2}
# Corpora are often compressed with `zstd --long=31`, which the library refuses unless told.
_MAX_WINDOW_BYTES = 1 << 31
_READ_BYTES = 1 << 18


def kind(path: Path) -> str:
    """Returns the ending that says how a file is read, without the one that says how it is compressed."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_ENDINGS else suffix


def is_text_file(path: Path) -> bool:
    """True for a kind of file that can be read."""
    if kind(path) in PARQUET_ENDINGS:
        return path.suffix.lower() in PARQUET_ENDINGS
    return kind(path) in JSONL_ENDINGS + TEXT_ENDINGS


def find_text_files(patterns: Sequence[str], key: str, *, any_kind: bool = False) -> list[Path]:
    """Lists the files that hold the text.

    Args:
        patterns: files, folders and globs. Folders are read to their depth; hidden names, other kinds of files and
            plain .json files, which are settings more often than text, are left out there.
        key: the config key that they come from, for messages.
        any_kind: take every file that is not hidden, of folders too: a plugin reads them.

    Returns:
        Each file once: patterns in the order given, the files of one in order of name.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches no file, or a file of an unknown kind.
    """
    if not patterns:
        raise ConfigError(f"{key} is empty: give files, folders or globs, for example {key}='[corpus/*.jsonl]'")
    # A file that two patterns reach, or a link and its target, would be read twice.
    files: dict[str, Path] = {}
    for pattern in patterns:
        for path in _matches(pattern, key, any_kind):
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def _matches(pattern: str, key: str, any_kind: bool) -> list[Path]:
    name = str(Path(pattern).expanduser())
    # A name that exists is meant literally, even with brackets in it.
    names = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
    found: list[Path] = []
    for path in map(Path, names):
        if path.is_dir():
            # `**` also matches the folders whose files it matches.
            found += [] if "**" in name else _files_of_folder(path, any_kind)
        elif path.is_file():
            if not any_kind and not is_text_file(path):
                raise DataError(f"{path}: unknown kind of file; {key} takes {_KNOWN_KINDS}")
            found.append(path)
    if found:
        return found
    folders = [path for path in names if Path(path).is_dir()]
    if folders:
        raise DataError(
            f"{key} {pattern}: {folders[0]} has no file of a known kind; {key} takes {_KNOWN_KINDS} (in a folder, "
            "plain .json files only by a glob)"
        )
    raise DataError(f"{key} {pattern}: matches no file in {Path.cwd()}; check the path and quote globs")


def _files_of_folder(folder: Path, any_kind: bool) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file() and (any_kind or _is_text_of_folder(path))]
    return sorted(found)


def _is_text_of_folder(path: Path) -> bool:
    return is_text_file(path) and path.suffix.lower() != ".json"


def text_bytes_estimate(files: Sequence[Path]) -> int:
    """Returns about how much text the files hold, from their sizes and kinds alone."""
    return sum(path.stat().st_size * _EXPANSION.get(path.suffix.lower(), 1) for path in files)


def decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    """Returns the content of an open file as its name says it is compressed."""
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(ZstdReader(raw), 1 << 18)
    return raw


def first_names(files: Sequence[Path], count: int = 3) -> str:
    """Returns the first few names, for messages."""
    return ", ".join(map(str, files[:count])) + (f" and {len(files) - count} more" if len(files) > count else "")


class ZstdReader(io.RawIOBase):
    """Decompresses a file of one or more frames; unlike the library's own reader, notices a truncated one.

    Args:
        file: the compressed file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame = self._decompressor.decompressobj()
        self._inside_frame = False
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills the buffer with what is decompressed next; 0 at the end.

        Raises:
            EOFError: the file ends inside a frame.
            zstandard.ZstdError: the file is damaged, or is none of this kind.
        """
        target = memoryview(buffer).cast("B")
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(_READ_BYTES)
            if not self._compressed:
                if self._inside_frame:
                    raise EOFError("the file ends before the end of its last frame")
                return 0
            self._decompress()
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self) -> None:
        """Feeds what was read to the current frame, and keeps what lies beyond the frame's end."""
        self._ready = memoryview(self._frame.decompress(self._compressed))
        self._inside_frame = not self._frame.eof
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()
