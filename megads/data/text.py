"""Documents out of raw text files: JSON lines, plain text and parquet, the first two also compressed.

A line that is no document is counted and reported; only what spoils a whole file is fatal.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from zstandard import ZstdError

from megads.data.config import ReaderConfig
from megads.data.long_text import Text
from megads.data.parquet import parquet_rows
from megads.data.plain_text import LastCut, cut_pieces, text_pieces, utf8_fault
from megads.data.record_text import Fields, NotText, filled, json_turns
from megads.data.text_files import (
    PARQUET_ENDINGS,
    TEXT_ENDINGS,
    decompressed,
    find_text_files,
    first_names,
    kind,
)
from megads.errors import DataError, MegadsError
from megads.runtime.registry import READERS

KEPT_EXAMPLES = 100


class Document(NamedTuple):
    """One document, or a piece of a long one, and where it came from."""

    text: str
    source: str
    line: int
    continues: bool = False
    """More of the same document follows."""
    turn: bool = False
    """The next sequence of the same document follows: this is a prompt, and its response comes."""


class RejectedLine(NamedTuple):
    """A line that gave no document."""

    source: str
    line: int
    why: NotText

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.why}"


def rows_of(
    texts: tuple[Text, ...] | NotText, source: str, line: int, last_cut: LastCut | None = None
) -> Iterator[Document | RejectedLine]:
    """Yields the sequences of one record, or that it has none; long ones in pieces, see `text_pieces`."""
    if isinstance(texts, NotText):
        yield RejectedLine(source, line, texts)
        return
    for number, text in enumerate(texts, start=1):
        turn = number < len(texts)
        if isinstance(text, str):
            yield Document(text, source, line, turn=turn)
        else:
            yield from _pieces(cut_pieces(text.stretches(), last_cut), source, line, turn)


def _pieces(texts: Iterator[str], source: str, line: int, turn: bool = False) -> Iterator[Document]:
    piece = ""
    for following in texts:
        if piece:
            yield Document(piece, source, line, continues=True, turn=turn)
        piece = following
    if piece:
        yield Document(piece, source, line, turn=turn)


@dataclass
class Rejections:
    """Lines that gave no document.

    Attributes:
        reasons: number of lines by reason.
        examples: "<file>:<line>: <reason>" of the first hundred.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Lines rejected in all."""
        return self.reasons.total()

    def add(self, rejected: RejectedLine) -> None:
        """Counts one line."""
        self.reasons[rejected.why.reason] += 1
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(str(rejected))

    def __str__(self) -> str:
        if not self.count:
            return "no lines rejected"
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"{self.count} lines rejected: {reasons}; first: {self.examples[0]}"


TextReader = Callable[[Path], Iterable[str]]
"""A plugin's: the texts of a file's documents."""


def custom_reader(config: ReaderConfig) -> TextReader | None:
    """Returns the reader of a plugin that the config names; None where files are read by their kinds."""
    if config.name == "auto":
        return None
    part = READERS.find(config.name, "reader.name")
    return functools.partial(part.make, READERS.options_of(part, config.options))


class DocumentReader:
    """Iterates over the documents of files, once.

    Args:
        patterns: files, folders or globs: .jsonl or .json (one JSON object a line), .txt or .md (one document a
            file), each also .gz or .zst; .parquet.
        fields: JSON fields, or columns, that hold the document.
        key: the config key that the patterns come from, for messages.
        custom: reads all files, whatever kinds they are.

    Attributes:
        files: the files that match, each once: patterns in the order given, the matches of one in order of name.
        total_bytes: size of the files as they are on disk.
        bytes_read: how much of that has been read.
        rejected: lines that gave no document.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches nothing, or a file of an unknown kind or, for pairs, one without fields.
    """

    def __init__(
        self, patterns: Sequence[str], fields: Fields, key: str = "input", custom: TextReader | None = None
    ) -> None:
        self.files = find_text_files(patterns, key, any_kind=custom is not None)
        plain = next((path for path in self.files if kind(path) in TEXT_ENDINGS or custom is not None), None)
        if len(fields) > 1 and plain is not None:
            raise DataError(f"{plain}: plain text has no fields {', '.join(fields)}: leave it out of {key}")
        self.custom = custom
        self.total_bytes = sum(path.stat().st_size for path in self.files)
        self.bytes_read = 0
        self.rejected = Rejections()
        self.fields = fields
        self.key = key

    def __iter__(self) -> Iterator[Document]:
        """Yields documents in order.

        Raises:
            DataError: a file cannot be read, or all files together have no document.
        """
        found = False
        for path in self.files:
            for row in self.read(path):
                if isinstance(row, RejectedLine):
                    self.rejected.add(row)
                else:
                    found = True
                    yield row
        if not found:
            raise no_documents(self.files, self.rejected, self.fields)

    def read(self, path: Path, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields what one file holds, in order; `bytes_read` counts on from the files read before.

        Args:
            path: the file.
            last_cut: where long texts may be cut, see `text_pieces`.

        Raises:
            DataError: the file cannot be read.
        """
        finished_bytes = self.bytes_read
        with readable(path, self.key, lambda: self.bytes_read - finished_bytes):
            if self.custom is not None:
                yield from self._custom(self.custom, path)
            elif kind(path) in PARQUET_ENDINGS:
                yield from self._parquet(path, finished_bytes, last_cut)
            elif kind(path) in TEXT_ENDINGS:
                yield from self._plain_text(path, finished_bytes, last_cut)
            else:
                yield from self._json_lines(path, finished_bytes, last_cut)
            self.bytes_read = finished_bytes + path.stat().st_size

    def _json_lines(
        self, path: Path, finished_bytes: int, last_cut: LastCut | None
    ) -> Iterator[Document | RejectedLine]:
        with path.open("rb") as raw, decompressed(raw, path) as file:
            for number, line in enumerate(file, start=1):
                # The position in the raw file is known for compressed files too, whose whole size is not.
                self.bytes_read = finished_bytes + raw.tell()
                for texts in json_turns(line, self.fields):
                    yield from rows_of(texts, str(path), number, last_cut)

    def _parquet(self, path: Path, finished_bytes: int, last_cut: LastCut | None) -> Iterator[Document | RejectedLine]:
        size = path.stat().st_size
        for number, (share, texts) in enumerate(parquet_rows(path, self.fields), start=1):
            self.bytes_read = finished_bytes + int(share * size)
            yield from rows_of(texts, str(path), number, last_cut)

    def _custom(self, read: TextReader, path: Path) -> Iterator[Document | RejectedLine]:
        number = 0
        try:
            for number, text in enumerate(read(path), start=1):
                yield from rows_of(_checked(text), str(path), number)
        except (MegadsError, OSError):
            raise
        except Exception as error:
            raise DataError(
                f"{path}: the reader of a plugin failed after document {number}: {type(error).__name__}: {error}"
            ) from error

    def _plain_text(
        self, path: Path, finished_bytes: int, last_cut: LastCut | None
    ) -> Iterator[Document | RejectedLine]:
        # Read twice: a file with a bad byte at its end gives no document, and none is taken back.
        with path.open("rb") as raw, decompressed(raw, path) as file:
            fault = utf8_fault(file)
        if fault is not None:
            yield RejectedLine(str(path), fault[0], NotText("not UTF-8", f"byte {fault[1]:#04x}"))
            return
        empty = True
        with path.open("rb") as raw, decompressed(raw, path) as file:
            for piece in _pieces(text_pieces(file, last_cut), str(path), 1):
                self.bytes_read = finished_bytes + raw.tell()
                empty = False
                yield piece
        if empty:
            yield RejectedLine(str(path), 1, NotText("empty text"))


def _checked(text: str) -> tuple[str, ...] | NotText:
    if not isinstance(text, str):
        return NotText("not text", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError:
        return NotText("not Unicode: half a surrogate pair")
    return filled(("text",), (text,))


@contextmanager
def readable(path: Path, key: str, done_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns what reading a file raises into a DataError with the place in the file and the config key it comes from."""
    try:
        yield
    except (OSError, EOFError, zlib.error, ZstdError) as error:
        raise DataError(
            f"{path}: reading failed after {done_bytes()} bytes: {error}; "
            f"the file is truncated, damaged or not readable: make it again or leave it out of {key}"
        ) from error


def no_documents(files: Sequence[Path], rejected: Rejections, fields: Fields) -> DataError:
    """Returns the error of an input without a document."""
    wanted = f"want text, or JSON lines or parquet with the field {fields[0]!r} (another is named with text_field)"
    if len(fields) > 1:
        wanted = f"want JSON lines or parquet with the fields {fields} (prompt_field, response_field)"
    return DataError(f"{first_names(files)}: no documents, {rejected}; {wanted}")
