"""Text files as UTF-8 streams: decompressed, and converted from their encoding.

Encodings are never guessed. A file is UTF-8, or its first bytes show that it is UTF-16 or UTF-32, or it has the
encoding that the user names.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import zstandard

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
