"""The raw text files: finds them by name, folder and glob, determines their kinds, and decodes them to UTF-8.

Streams are decompressed and converted from their encoding. Encodings are never guessed. A file is UTF-8, or its first
bytes show that it is UTF-16 or UTF-32, or it has the encoding that the user names.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import zstandard

from megads.api import ConfigError, DataError, is_run_dir, is_url
from megads.data.config import DEFAULT_EXTENSIONS

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED_ENDINGS = (".gz", ".zst")
UTF8 = "utf-8"
DAMAGED = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""Exceptions raised when a compressed file is damaged."""
# Corpora are often compressed with `zstd --long=31`, which the library rejects by default.
_MAX_WINDOW_BYTES = 1 << 31
_READ_BYTES = 1 << 17
_HEAD_BYTES = 1 << 16
# Longer marks first, since the UTF-32 mark begins with the UTF-16 mark.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# Minimum share of byte pairs with a zero byte in UTF-16; text of any script with spaces and line ends has more.
_ZERO_SHARE = 0.1
_LINE_CONTROLS = "\t\n\r\f\v\x1b"


def marked_encoding(head: bytes) -> str | None:
    """Returns the encoding that the first bytes of a file show, by a byte order mark or by the zero bytes of UTF-16.

    Args:
        head: the first bytes, at most some thousands.

    Returns:
        utf-16-le, utf-16-be, utf-32-le or utf-32-be; None for anything else.
    """
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    pairs = len(head) // 2
    zeros = {"utf-16-be": head[0 : 2 * pairs : 2].count(0), "utf-16-le": head[1 : 2 * pairs : 2].count(0)}
    for encoding, other in (("utf-16-le", "utf-16-be"), ("utf-16-be", "utf-16-le")):
        if pairs and zeros[encoding] >= _ZERO_SHARE * pairs and not zeros[other] and _reads_as(head, encoding):
            return encoding
    return None


def _reads_as(head: bytes, encoding: str) -> bool:
    """Whether all bytes decode in an encoding, without control characters that do not occur in text."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in _LINE_CONTROLS for character in text)


def first_encoding(path: Path) -> str | None:
    """Returns the encoding that the first bytes of a file show, see `marked_encoding`; None for a damaged file."""
    with suppress(*DAMAGED):
        return marked_encoding(_head(path))
    return None


def encoding_of(path: Path, wanted: str) -> str:
    """Returns the encoding in which to read a file.

    Args:
        path: the file.
        wanted: `auto`, or the encoding of files that are neither UTF-8 nor marked; `utf-8` converts nothing.

    Returns:
        The encoding; utf-8 also for a file in an unknown encoding, which then fails when it is read.
    """
    if wanted == UTF8:
        return UTF8
    with suppress(*DAMAGED):
        marked = marked_encoding(_head(path))
        if marked is not None or wanted == "auto":
            return marked or UTF8
        with opened(path) as (_, file):
            return UTF8 if text_fault(file) is None else wanted
    # Damaged: the error is reported when the file is read.
    return UTF8


def binary_fault(path: Path) -> str:
    """Returns the position in the first bytes that shows that a file is not text, in words; empty if there is none."""
    with suppress(*DAMAGED):
        head = _head(path)
        if marked_encoding(head) is None and 0 in head:
            return f"byte 0x00 at position {head.index(0):,}"
    return ""


def _head(path: Path) -> bytes:
    with opened(path) as (_, file):
        return file.read(_HEAD_BYTES)


@contextmanager
def opened(path: Path, encoding: str = UTF8) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading.

    Args:
        path: the file; its extension determines the compression.
        encoding: its encoding; anything except utf-8 is converted.

    Yields:
        The file as it is on disk, whose position tells how much has been read, and its text in UTF-8.
    """
    with path.open("rb") as raw:
        file = _decompressed(raw, path)
        yield raw, file if encoding == UTF8 else io.BufferedReader(_Transcoder(file, encoding), _READ_BYTES)


def _decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(ZstdReader(raw), 1 << 18)
    return raw


def text_fault(file: BinaryIO, encoding: str = UTF8) -> tuple[int, int] | None:
    """Returns the line (from 1) and the value of the first byte that is invalid in an encoding; None if all are
    valid."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    while True:
        block = file.read(_READ_BYTES)
        try:
            line += decoder.decode(block, final=not block).count("\n")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(encoding, "ignore")
            return line + before.count("\n"), error.object[error.start]
        if not block:
            return None


class _Transcoder(io.RawIOBase):
    """Converts a stream to UTF-8; raises UnicodeDecodeError on bytes that are invalid in its encoding."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = memoryview(b"")
        self._over = False

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills the buffer with the next converted bytes; returns 0 at the end."""
        target = memoryview(buffer).cast("B")
        while not self._ready and not self._over:
            block = self._file.read(_READ_BYTES)
            self._over = not block
            self._ready = memoryview(self._decoder.decode(block, final=self._over).encode())
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


class ZstdReader(io.RawIOBase):
    """Decompresses a file of one or more frames; unlike the library's reader, it detects a truncated one.

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
        """Fills the buffer with the next decompressed bytes; returns 0 at the end.

        Raises:
            EOFError: the file ends inside a frame.
            zstandard.ZstdError: the file is damaged, or is not a zstd file.
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
        """Decompresses the bytes read with the current frame, and keeps those after the frame's end."""
        self._ready = memoryview(self._frame.decompress(self._compressed))
        self._inside_frame = not self._frame.eof
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()


# Delimiters of tables by file extension.
TABLE_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES_ENDINGS = (".jsonl", ".ndjson", ".json")
_PARQUET_ENDING = ".parquet"
_DOCUMENT_ENDINGS = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ppt", ".pptx", ".xls", ".xlsx")
# Approximate bytes of text per byte of file.
_EXPANSION = {".gz": 3, ".zst": 3, ".parquet": 2}
# The standard marker of cache folders: https://bford.info/cachedir/
CACHE_TAG = "CACHEDIR.TAG"
DATA_CACHE = "data-cache"
_NEVER_ENTERED = ("runs", DATA_CACHE, "__pycache__", "node_modules")
_HIDDEN, _RUN, _CACHE, _VIRTUAL = "hidden", "run directories", "caches", "virtual environments"
_SHOWN_EXTENSIONS, _SHOWN_FOLDERS = 8, 6
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
_FROM_HUB = "write its texts to a file first, as datasets' to_json does"


class Kind(Enum):
    """How a file is read."""

    text = "text"
    json_lines = "json_lines"
    parquet = "parquet"
    table = "table"


def kind(path: Path) -> Kind:
    """Returns the kind of a file by its extension; unknown extensions are plain text."""
    ending = extension_without_compression(path)
    if ending in _JSON_LINES_ENDINGS:
        return Kind.json_lines
    if ending == _PARQUET_ENDING:
        return Kind.parquet
    return Kind.table if ending in TABLE_DELIMITERS else Kind.text


def extension_without_compression(path: Path) -> str:
    """Returns the extension without that of the compression; empty if there is none."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_ENDINGS else suffix


@dataclass(frozen=True)
class FoundFiles:
    """Result of a search by patterns.

    Attributes:
        files: files to read, without duplicates, in the order of the patterns and by name within a pattern.
        extensions: number of files in folders and behind globs that were skipped, by extension.
        folders: number of folders there that were not entered, by name.
    """

    files: list[Path]
    extensions: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)

    @property
    def passed_over(self) -> str:
        """Description of skipped files and folders, with counts; empty if there are none."""
        shown = self.extensions.most_common(_SHOWN_EXTENSIONS)
        parts = [f"{count:,} {extension}" for extension, count in shown]
        rest = self.extensions.total() - sum(count for _, count in shown)
        parts += [f"{rest:,} others"] if rest else []
        names = [f"{name} ({count:,})" if count > 1 else name for name, count in self.folders.most_common()]
        if names:
            more = f" and {len(names) - _SHOWN_FOLDERS} more" if len(names) > _SHOWN_FOLDERS else ""
            parts.append(f"folders {', '.join(names[:_SHOWN_FOLDERS])}{more}")
        return f"skipped: {', '.join(parts)}" if parts else ""


def find_text_files(
    patterns: Sequence[str], key: str, extensions: Sequence[str] = DEFAULT_EXTENSIONS, *, any_kind: bool = False
) -> FoundFiles:
    """Finds the text files.

    Folders are searched recursively. In folders, and behind a glob without an extension, files are selected by the list
    of extensions. Hidden names, run directories, caches, virtual environments and folders named runs are never entered.
    A file that is named, or whose extension is part of a glob, is text unless its content shows otherwise.

    Args:
        patterns: files, folders and globs.
        key: config key of the patterns, for messages.
        extensions: extensions of files to select from folders, compressed or not.
        any_kind: select every file that is not hidden, also from folders, for a plugin's reader.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches no file, or names a file that is not text, or a run directory.
    """
    if not patterns:
        raise ConfigError(f"{key} is empty: give files, folders or globs, for example {key}='[corpus/*.jsonl]'")
    search = _Search(key, tuple(f".{extension.lower().lstrip('.')}" for extension in extensions), any_kind)
    for pattern in patterns:
        search.add(pattern)
    return search.found()


class _Search:
    """Collects the files of the patterns, one pattern at a time."""

    def __init__(self, key: str, extensions: tuple[str, ...], any_kind: bool) -> None:
        self._key, self._any_kind = key, any_kind
        self._listed = tuple(ending + packed for ending in extensions for packed in ("", *COMPRESSED_ENDINGS))
        # Keyed by real path, so that a file that two patterns match, or a link and its target, are not read twice.
        self._files: dict[str, Path] = {}
        self._passed: dict[str, str] = {}
        self._closed: dict[str, str] = {}
        self._labels: dict[Path, str] = {}

    def found(self) -> FoundFiles:
        """Returns the files of all patterns."""
        extensions = Counter(name for path, name in self._passed.items() if path not in self._files)
        return FoundFiles(list(self._files.values()), extensions, Counter(self._closed.values()))

    def add(self, pattern: str) -> None:
        """Adds the files of one pattern; raises DataError if there are none."""
        name = str(Path(pattern).expanduser())
        if is_url(pattern):
            raise DataError(
                f"{self._key} {pattern}: text is not read from URLs: download it (curl -LO {pattern}) and give the "
                "file; only datasets of megads preprocess are streamed, with data.train='[{path: s3://bucket/prefix}]'"
            )
        # An existing path is taken literally, even with brackets in it.
        literal = Path(name).exists()
        names = [name] if literal else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        taken, folders = 0, []
        for path in map(Path, names):
            if path.is_dir():
                folders.append(path)
                # `**` also matches the folders whose files it matches.
                taken += 0 if not literal and "**" in name else self._add_folder(path, literal)
            elif path.is_file() and (literal or self._is_reached(name, path)):
                taken += self._add_file(path, named=literal or _spells(name, path))
        if not taken:
            raise DataError(f"{self._key} {pattern}: {self._why_nothing(pattern, folders)}")

    def _why_nothing(self, pattern: str, folders: list[Path]) -> str:
        passed = self.found().passed_over
        if not folders and not passed:
            hub = f"; a dataset of a hub is not downloaded: {_FROM_HUB}" if _HUB_NAME.fullmatch(pattern) else ""
            return f"matches no file in {Path.cwd()}; check the path and quote globs{hub}"
        where = str(folders[0]) if folders else "what it matches"
        section = self._key.rpartition(".")[0]
        extensions = f"{section}.extensions" if section else "extensions"
        return (
            f"{where} has no text{f' ({passed})' if passed else ''}: a file is read if it is named, by itself or "
            f"by a glob such as '*.log', or if its extension is in {extensions}"
        )

    def _add_folder(self, folder: Path, named: bool) -> int:
        if named and _why_closed(folder) == _RUN:
            raise DataError(f"{self._key} {folder}: is the directory of a run, which holds no text to train on")
        if not named and self._is_closed(folder):
            return 0
        found = []
        for parent, folders, names in os.walk(folder):
            folders[:] = list(self._open(parent, folders))
            found += [Path(parent, name) for name in names]
        return sum(self._add_file(path, named=False) for path in sorted(found) if path.is_file())

    def _open(self, parent: str, names: list[str]) -> Iterator[str]:
        for name in names:
            if not self._is_closed(Path(parent, name)):
                yield name

    def _is_closed(self, folder: Path) -> bool:
        if folder not in self._labels:
            self._labels[folder] = _why_closed(folder)
            if self._labels[folder]:
                self._closed[os.path.realpath(folder)] = self._labels[folder]
        return bool(self._labels[folder])

    def _is_reached(self, pattern: str, path: Path) -> bool:
        """Whether no folder between the literal part of the glob and the file is excluded."""
        spelled = next(number for number, part in enumerate(Path(pattern).parts) if glob.has_magic(part))
        return not any(self._is_closed(Path(*path.parts[:depth])) for depth in range(spelled + 1, len(path.parts)))

    def _add_file(self, path: Path, named: bool) -> int:
        real = os.path.realpath(path)
        if not named and path.name.startswith("."):
            self._passed[real] = _HIDDEN
            return 0
        packed_parquet = kind(path) is Kind.parquet and path.suffix.lower() != _PARQUET_ENDING
        if self._any_kind or (path.name.lower().endswith(self._listed) and not packed_parquet):
            self._files.setdefault(real, path)
            return 1
        if not named:
            self._passed[real] = path.suffix.lower() or "without extension"
            return 0
        if packed_parquet:
            raise DataError(f"{path}: parquet is compressed in itself: decompress the file, or leave it out")
        self._require_text(path)
        self._files.setdefault(real, path)
        return 1

    def _require_text(self, path: Path) -> None:
        """Raises DataError if a named file is plain text by its name but not by its content."""
        if kind(path) is not Kind.text:
            return
        if extension_without_compression(path) in _DOCUMENT_ENDINGS:
            raise DataError(f"{path}: is a document of another program: save it as plain text first")
        fault = binary_fault(path)
        if fault:
            raise DataError(f"{path}: is not text ({fault}): leave it out of {self._key}")


def _spells(pattern: str, path: Path) -> bool:
    """Whether a glob includes the extension of a file, or its whole name; every glob selects .json files."""
    last, suffix = Path(pattern).name.lower(), path.suffix.lower()
    return not glob.has_magic(last) or suffix == ".json" or (bool(suffix) and last.endswith(suffix))


def _why_closed(folder: Path) -> str:
    """Returns the reason why a folder that was found is excluded; empty if it is entered."""
    name = folder.name
    if name in ("", "..") or not (name.startswith(".") or name in _NEVER_ENTERED):
        if is_run_dir(folder):
            return _RUN
        if (folder / CACHE_TAG).is_file():
            return _CACHE
        return _VIRTUAL if (folder / "pyvenv.cfg").is_file() else ""
    return name


def size_text(num_bytes: int) -> str:
    """Returns the size of a text with its unit: the smallest texts of a first try have less than 0.1 MB."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"


def text_bytes_estimate(files: Sequence[Path]) -> int:
    """Returns the approximate size of the files' text, from their sizes and kinds alone."""
    return sum(path.stat().st_size * _EXPANSION.get(path.suffix.lower(), 1) for path in files)


def first_names(files: Sequence[Path], count: int = 3) -> str:
    """Returns the names of the first few files, for messages."""
    return ", ".join(map(str, files[:count])) + (f" and {len(files) - count} more" if len(files) > count else "")
