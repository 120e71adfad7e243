"""Cuts the input into blocks that processes tokenize independently of each other.

Blocks depend only on the input and the tokenizer, so the same input gives the same blocks in every run. The engine is
chosen on documents sampled from the whole input, before the first block is tokenized.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megads.tools.prepare.records import Fields, json_turns, require_json_lines
from megads.tools.prepare.rejections import RejectedLine
from megads.tools.prepare.text import Document, DocumentReader, LastCut, has_prompts, readable, rows_of
from megads.tools.prepare.text_files import UTF8, Kind, kind, opened, text_bytes_estimate

STDIN = "-"
SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES = 1 << 20, 1 << 25
# Smaller, because blocks read by the feeding process wait in memory, several for every worker.
LARGEST_FED_BYTES = 1 << 23
_WANTED_BLOCKS = 64
_FIRST_DOCUMENTS = 100
"""Documents sampled from the first block."""
PLACES, DOCUMENTS_OF_PLACE = 40, 5
"""Positions evenly spaced over the bytes of all files, and documents sampled from each position on."""
_HEAD_BYTES = 1 << 12
_WINDOW_BYTES = 1 << 18
"""Bytes read at each position; a longer line is skipped."""
_LARGEST_TEXT_CHARACTERS = 1 << 18
"""Maximum length of a sampled document, since the memory for checking it grows with its length."""
_LARGEST_CHECKED_BYTES = 1 << 24
"""Larger plain text and tables are not sampled, because they would first be checked to their end for valid text."""


@dataclass(frozen=True)
class Lines:
    """Complete JSON lines.

    Attributes:
        source: file from which they come.
        content: the lines, each with its newline, except possibly the last one of the file.
        first: whether the first line is the first of the file.
        input_bytes: size of the input, as it is on disk.
    """

    source: str
    content: bytes
    first: bool
    input_bytes: int

    def digest(self) -> str:
        """Returns a hash of everything that determines the block's documents."""
        digest = xxhash.xxh3_128(b"%d" % self.first)
        digest.update(self.content)
        return str(digest.hexdigest())

    def rows(self, fields: Fields, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields the documents, long ones in pieces; lines are numbered from 1 at the block's start."""
        one_line = self.content.find(b"\n", 0, -1) < 0
        # Avoids a copy of a long line.
        for number, line in enumerate((self.content,) if one_line else io.BytesIO(self.content), start=1):
            for texts in json_turns(line, fields):
                yield from rows_of(texts, self.source, number, last_cut)

    def load(self) -> Lines:
        """Returns itself, since the lines are in memory."""
        return self

    @property
    def num_lines(self) -> int:
        """Number of lines, including blank ones."""
        return self.content.count(b"\n")


@dataclass(frozen=True)
class LineRange:
    """JSON lines that start in a range of bytes of an uncompressed file; read by the process that tokenizes them."""

    source: str
    begin: int
    end: int

    @property
    def first(self) -> bool:
        """Whether the range starts at the beginning of the file."""
        return self.begin == 0

    @property
    def input_bytes(self) -> int:
        """Size of the input."""
        return self.end - self.begin

    def load(self) -> Lines:
        """Reads the lines; the last one is read to its end beyond the range."""
        position, content = self.begin, b""
        with Path(self.source).open("rb") as file:
            if not self.first:
                # A line that starts before the range belongs to the previous range.
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
    """Documents of plain text or parquet that are in memory, and the rejections between them."""

    content: list[Document | RejectedLine]
    input_bytes: int

    first = True
    num_lines = 0

    def digest(self) -> str:
        """Returns a hash of everything that determines the block's documents."""
        digest = xxhash.xxh3_128()
        for row in self.content:
            digest.update(repr((row.source, row.line)).encode())
            how = (row.continues, row.turn, row.begins, len(row.text)) if isinstance(row, Document) else row.why
            digest.update(repr(how).encode())
            digest.update(row.text.encode() if isinstance(row, Document) else b"")
        return str(digest.hexdigest())

    def rows(self, fields: Fields, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields the documents with their lines in the file; long ones are in pieces already."""
        yield from self.content

    def load(self) -> Rows:
        """Returns itself, since the documents are in memory."""
        return self


def _whole_lines(file: BinaryIO, begin: int, end: int) -> bytes:
    """Reads from a line's start to the end of the line that contains `end - 1`.

    The end is located first, because reading a long line while it grows would hold it in memory several times.
    """
    file.seek(end - 1)
    while (part := file.readline(SMALLEST_BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass
    end = file.tell()
    file.seek(begin)
    return file.read(end - begin)


LoadedBlock = Lines | Rows


Block = LineRange | LoadedBlock


def block_bytes_of(reader: DocumentReader) -> int:
    """Returns the size of blocks, so that a large input has some dozens of them; depends only on the input."""
    wanted = text_bytes_estimate(reader.files) // _WANTED_BLOCKS
    return min(LARGEST_BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, 1 << wanted.bit_length()))


def blocks_of(reader: DocumentReader, block_bytes: int, last_cut: LastCut | None = None) -> Iterator[Block]:
    """Yields the blocks of the reader's files, in order.

    Args:
        reader: provides the files, and reads those that are not JSON lines.
        block_bytes: approximate size of a block's text.
        last_cut: finds positions at which long texts may be cut, see `text_pieces`.

    Raises:
        DataError: a file cannot be read.
    """
    pending: list[Document | RejectedLine] = []
    fed_bytes = min(block_bytes, LARGEST_FED_BYTES)
    pending_bytes = reported_bytes = 0
    for path in reader.files:
        if reader.custom is None and kind(path) is Kind.json_lines:
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
            # A prompt and its response stay in the same block.
            whole = isinstance(row, RejectedLine) or not (row.turn or (row.continues and has_prompts(reader.fields)))
            if pending_bytes >= fed_bytes and whole:
                yield Rows(pending, reader.bytes_read - reported_bytes)
                reported_bytes = reader.bytes_read
                pending, pending_bytes = [], 0
    if pending:
        yield Rows(pending, reader.bytes_read - reported_bytes)


def stdin_blocks() -> Iterator[Lines]:
    """Yields the blocks of JSON lines from the standard input."""
    yield from _streamed(sys.stdin.buffer, sys.stdin.buffer, STDIN, LARGEST_FED_BYTES)


def _line_blocks(path: Path, reader: DocumentReader, block_bytes: int, fed_bytes: int) -> Iterator[Block]:
    if not reader.is_line_file(path):
        with readable(path, reader.key, lambda: 0):
            encoding = reader.encoding(path)
            fault = None if encoding == UTF8 else reader.encoding_fault(path)
        if fault is not None:
            yield Rows([fault], path.stat().st_size)
            return
        with opened(path, encoding) as (raw, file), readable(path, reader.key, raw.tell):
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
        if first:
            require_json_lines(content[:_HEAD_BYTES], "the standard input" if source == STDIN else source)
        streamed_bytes += len(content)
        position = raw.tell() if raw.seekable() else streamed_bytes
        yield Lines(source, content, first, position - reported_bytes)
        first, reported_bytes = False, position


def texts_of_places(source: DocumentReader, fields: Fields) -> list[str]:
    """Returns up to 200 texts sampled from all files.

    From uncompressed JSON lines they are taken at evenly spaced positions. Other files cannot be read from the middle,
    so texts are taken from the beginning of those that contain such positions. From files that a plugin reads nothing
    is taken.

    Args:
        source: the files.
        fields: fields of a record that hold its text.
    """
    found: list[str] = []
    for path, position in _places(source) if source.custom is None else ():
        found += islice(_texts(_rows_at(source, path, position, fields)), DOCUMENTS_OF_PLACE)
    return found


def first_texts(blocks: Sequence[Block], fields: Fields) -> list[str]:
    """Returns up to 100 texts of the first block, the only sample of a pipe.

    Args:
        blocks: the first blocks.
        fields: fields of a record that hold its text.
    """
    rows = chain.from_iterable(block.load().rows(fields) for block in blocks[:1])
    return list(islice(_texts(rows), _FIRST_DOCUMENTS))


def _places(source: DocumentReader) -> Iterator[tuple[Path, int]]:
    """Yields files and positions in them; a file that is only read from its beginning is yielded once."""
    sizes = np.array([path.stat().st_size for path in source.files], np.int64)
    ends = np.cumsum(sizes)
    begun: set[Path] = set()
    if not ends[-1]:
        return
    for byte in np.linspace(0, int(ends[-1]) - 1, PLACES).astype(np.int64):
        number = int(np.searchsorted(ends, byte, side="right"))
        path = source.files[number]
        whole = kind(path) in (Kind.text, Kind.table) and path.stat().st_size > _LARGEST_CHECKED_BYTES
        if source.is_line_file(path):
            yield path, int(byte - (ends[number] - sizes[number]))
        elif path not in begun and not whole:
            begun.add(path)
            yield path, 0


def _rows_at(source: DocumentReader, path: Path, position: int, fields: Fields) -> Iterator[Document | RejectedLine]:
    if source.is_line_file(path):
        return LineRange(str(path), position, position + _WINDOW_BYTES).load().rows(fields)
    # A separate reader, because the reader that feeds the workers counts the bytes that it has read.
    return source.alone(path).read(path)


def _texts(rows: Iterator[Document | RejectedLine]) -> Iterator[str]:
    return (row.text[:_LARGEST_TEXT_CHARACTERS] for row in rows if not isinstance(row, RejectedLine))
