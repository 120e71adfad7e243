"""Zstandard files as streams of bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_READ_BYTES = 1 << 18
# Corpora are often compressed with `zstd --long=31`, which the library refuses unless told.
_MAX_WINDOW_BYTES = 1 << 31


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
