"""Cuts the input into blocks that processes tokenize independently of each other.

A block depends on the input and the tokenizer alone, not on who tokenizes it: the same input gives the same blocks in
every run.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from megads.data.plain_text import LastCut
from megads.data.record_text import Fields, json_turns
from megads.data.text import Document, DocumentReader, RejectedLine, readable, rows_of
from megads.data.text_files import COMPRESSED_ENDINGS, JSONL_ENDINGS, decompressed, kind, text_bytes_estimate

STDIN = "-"
SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES = 1 << 20, 1 << 25
# Blocks that the feeding process reads wait in memory, several for every worker.
LARGEST_FED_BYTES = 1 << 23
WANTED_BLOCKS = 64


@dataclass(frozen=True)
class Lines:
    """Whole lines of JSON.

    Attributes:
        source: file they come from.
        content: the lines, each with its newline, the file's last one perhaps without.
        first: the first of them is the first of the file.
        input_bytes: how much of the input it stands for, as it is on disk.
    """

    source: str
    content: bytes
    first: bool
    input_bytes: int

    def digest(self) -> str:
        """Hash of all that decides what the block gives."""
        digest = xxhash.xxh3_128(b"%d" % self.first)
        digest.update(self.content)
        return str(digest.hexdigest())

    def rows(self, fields: Fields, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields the documents, long ones in pieces; lines are counted from 1 at the block's start."""
        one_line = self.content.find(b"\n", 0, -1) < 0
        # A long line is not copied.
        for number, line in enumerate((self.content,) if one_line else io.BytesIO(self.content), start=1):
            for texts in json_turns(line, fields):
                yield from rows_of(texts, self.source, number, last_cut)

    def load(self) -> Lines:
        """Returns itself: the lines are here already."""
        return self

    @property
    def num_lines(self) -> int:
        """Lines, blank ones included."""
        return self.content.count(b"\n")


@dataclass(frozen=True)
class LineRange:
    """Lines of JSON that start in a range of bytes of an uncompressed file; read by whoever tokenizes them."""

    source: str
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """The range starts with the file."""
        return self.begin == 0

    @property
    def input_bytes(self) -> int:
        """How much of the input it stands for."""
        return self.end - self.begin

    def load(self) -> Lines:
        """Reads the lines, the last one to its end beyond the range."""
        position, content = self.begin, b""
        with Path(self.source).open("rb") as file:
            if not self.first:
                # The line that reaches into the range belongs to whoever has its start.
                file.seek(self.begin - 1)
                position = self.begin - 1
                while position < self.end:
                    part = file.readline(SMALLEST_BLOCK_BYTES)
                    position += len(part)
                    if part.endswith(b"\n") or not part:
                        break
            if position < self.end:
                content = _whole_lines(file, position, self.end)
        return Lines(self.source, content, self.first, self.input_bytes)


@dataclass(frozen=True)
class Rows:
    """Documents read already, of plain text or parquet, and what was no document between them."""

    content: list[Document | RejectedLine]
    input_bytes: int

    first = True
    num_lines = 0

    def digest(self) -> str:
        """Hash of all that decides what the block gives."""
        digest = xxhash.xxh3_128()
        for row in self.content:
            digest.update(repr((row.source, row.line)).encode())
            digest.update(repr((row.continues, len(row.text)) if isinstance(row, Document) else row.why).encode())
            digest.update(row.text.encode() if isinstance(row, Document) else b"")
        return str(digest.hexdigest())

    def rows(self, fields: Fields, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields the documents, with their lines in the file; they are in pieces already."""
        yield from self.content

    def load(self) -> Rows:
        """Returns itself: the documents are here already."""
        return self


def _whole_lines(file: BinaryIO, begin: int, end: int) -> bytes:
    """Reads from a line's start to the end of the line that reaches to `end`, which is measured first: a long one that
    grows as it is read is in memory several times."""
    file.seek(end - 1)
    while (part := file.readline(SMALLEST_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass
    end = file.tell()
    file.seek(begin)
    return file.read(end - begin)


LoadedBlock = Lines | Rows
Block = LineRange | LoadedBlock


def block_bytes_of(reader: DocumentReader) -> int:
    """Returns the size of blocks: some dozens of them where the input is large enough, a function of it alone."""
    wanted = text_bytes_estimate(reader.files) // WANTED_BLOCKS
    return min(LARGEST_BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, 1 << wanted.bit_length()))


def blocks_of(reader: DocumentReader, block_bytes: int, last_cut: LastCut | None = None) -> Iterator[Block]:
    """Yields the blocks of the reader's files, in order.

    Args:
        reader: names the files; what is not JSON lines is read through it.
        block_bytes: text in a block, about.
        last_cut: where long texts may be cut, see `text_pieces`.

    Raises:
        DataError: a file cannot be read.
    """
    pending: list[Document | RejectedLine] = []
    fed_bytes = min(block_bytes, LARGEST_FED_BYTES)
    pending_bytes = reported_bytes = 0
    for path in reader.files:
        if reader.custom is None and kind(path) in JSONL_ENDINGS:
            if pending:
                yield Rows(pending, reader.bytes_read - reported_bytes)
                pending, pending_bytes = [], 0
            yield from _line_blocks(path, reader, block_bytes, fed_bytes)
            reader.bytes_read += path.stat().st_size
            reported_bytes = reader.bytes_read
            continue
        for row in reader.read(path, last_cut):
            pending.append(row)
            pending_bytes += len(row.text) if isinstance(row, Document) else 100
            # A prompt stays with its response.
            whole = isinstance(row, RejectedLine) or not (row.turn or (row.continues and len(reader.fields) > 1))
            if pending_bytes >= fed_bytes and whole:
                yield Rows(pending, reader.bytes_read - reported_bytes)
                reported_bytes = reader.bytes_read
                pending, pending_bytes = [], 0
    if pending:
        yield Rows(pending, reader.bytes_read - reported_bytes)


def stdin_blocks() -> Iterator[Lines]:
    """Yields the blocks of JSON lines that come through a pipe."""
    yield from _streamed(sys.stdin.buffer, sys.stdin.buffer, STDIN, LARGEST_FED_BYTES)


def _line_blocks(path: Path, reader: DocumentReader, block_bytes: int, fed_bytes: int) -> Iterator[Block]:
    if path.suffix.lower() in COMPRESSED_ENDINGS:
        with path.open("rb") as raw, readable(path, reader.key, raw.tell), decompressed(raw, path) as file:
            yield from _streamed(file, raw, str(path), fed_bytes)
        return
    size = path.stat().st_size
    for begin in range(0, size, block_bytes):
        yield LineRange(str(path), begin, min(begin + block_bytes, size))


def _streamed(file: BinaryIO, raw: BinaryIO, source: str, fed_bytes: int) -> Iterator[Lines]:
    first, reported_bytes, streamed_bytes = True, 0, 0
    while content := file.read(fed_bytes):
        if not content.endswith(b"\n"):
            content += file.readline()
        streamed_bytes += len(content)
        position = raw.tell() if raw.seekable() else streamed_bytes
        yield Lines(source, content, first, position - reported_bytes)
        first, reported_bytes = False, position
