"""Reads documents from raw text files: plain text, JSON lines, tables and parquet, all but the last also compressed.

Invalid lines, and whole files in another encoding, are counted and reported; only damaged files raise. Long documents
are read in pieces, cut where tokenizing the pieces gives the same ids as tokenizing the whole.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tokenizers import Tokenizer

from megads.api import DataError, MegadsError
from megads.data.config import AUTO_ENCODING, DEFAULT_EXTENSIONS, ReaderConfig
from megads.runtime.registry import READERS
from megads.tools.prepare.chat import Conversations
from megads.tools.prepare.records import (
    Fields,
    NoDocument,
    Text,
    filled,
    json_turns,
    parquet_rows,
    require_json_lines,
    table_rows,
)
from megads.tools.prepare.rejections import RejectedLine, Rejections
from megads.tools.prepare.text_files import (
    COMPRESSED_ENDINGS,
    DAMAGED,
    TABLE_DELIMITERS,
    UTF8,
    Kind,
    encoding_of,
    extension_without_compression,
    find_text_files,
    first_names,
    kind,
    opened,
    text_fault,
)

PIECE_CHARACTERS = 1 << 17
"""Length of a piece of a long text: small enough that a batch of pieces keeps every core busy."""
REACH = 512
"""Characters on either side of a possible cut that `TextCutter` examines."""
_TRIES, _CANDIDATES, _SHIFTS = 8, 4, 4
_READ_BYTES, _HEAD_BYTES = 1 << 17, 1 << 12
LastCut = Callable[[str, int, int], int | None]
"""Returns a position at which to cut a text between two positions; see `TextCutter.last_cut`."""
TextReader = Callable[[Path], Iterable[str]]
"""Reader of a plugin: returns the texts of a file's documents."""


class Document(NamedTuple):
    """One document, or a piece of a long one, and its origin."""

    text: str
    source: str
    line: int
    continues: bool = False
    """Whether more of the same sequence follows."""
    turn: bool = False
    """Whether another sequence of the same document follows, as a response follows a prompt."""
    begins: bool = True
    """Whether it is the beginning of a document."""


def rows_of(
    texts: tuple[Text, ...] | NoDocument, source: str, line: int, last_cut: LastCut | None = None
) -> Iterator[Document | RejectedLine]:
    """Yields the sequences of one record, long ones in pieces (see `text_pieces`), or its rejection."""
    if isinstance(texts, NoDocument):
        yield RejectedLine(source, line, texts)
        return
    for number, text in enumerate(texts, start=1):
        turn = number < len(texts)
        if isinstance(text, str):
            yield Document(text, source, line, turn=turn, begins=number == 1)
        else:
            whole = Document("", source, line, turn=turn, begins=number == 1)
            yield from _pieces(_cut_pieces(text.stretches(), last_cut), whole)


def _pieces(texts: Iterator[str], whole: Document) -> Iterator[Document]:
    """Yields a document that is given without its text, with one piece of the text each."""
    piece, begins = "", whole.begins
    for following in texts:
        if piece:
            yield whole._replace(text=piece, continues=True, begins=begins)
            begins = False
        piece = following
    if piece:
        yield whole._replace(text=piece, begins=begins)


def converted_text(encodings: Mapping[str, str]) -> str:
    """Returns a one-line summary of converted files; empty if there are none.

    Args:
        encodings: encodings by file.
    """
    counts = Counter(encodings.values())
    examples = {encoding: name for name, encoding in reversed(list(encodings.items()))}
    parts = [f"{count:,} from {encoding} ({examples[encoding]})" for encoding, count in counts.most_common()]
    return f"converted: {', '.join(parts)}" if parts else ""


def custom_reader(config: ReaderConfig) -> TextReader | None:
    """Returns the plugin's reader that the config names; None if files are read by their kind."""
    if config.name == "auto":
        return None
    part = READERS.find(config.name, "reader.name")
    return _PluginReader(config.name, READERS.options_of(part, config.options))


@dataclass(frozen=True)
class _PluginReader:
    """A plugin's reader, identified by its name and options."""

    name: str
    options: Any

    def __call__(self, path: Path) -> Iterable[str]:
        found: Iterable[str] = READERS.find(self.name, "reader.name").make(self.options, path)
        return found


class DocumentReader:
    """Iterates once over the documents of files.

    Args:
        patterns: files, folders or globs. JSON lines, tables and parquet have one document per record; any other file
            is one document.
        fields: JSON fields, or columns, that hold the document.
        key: config key of the patterns, for messages; the other keys are in the same section.
        custom: reader to use for all files, whatever their kind.
        extensions: extensions of the files to read from folders.
        encoding: encoding of files that are neither UTF-8 nor marked with another encoding.
        max_rejected: largest share of rejected records of a whole iteration, see `Rejections.check`.

    Attributes:
        files: the matching files without duplicates, in the order of the patterns and by name within a pattern.
        passed_over: description of the other files in the folders; empty if there are none.
        total_bytes: total size of the files on disk.
        bytes_read: bytes of the files read so far.
        rejected: lines and files without a document.
        converted: encodings of the files that were read and are not UTF-8.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches nothing, a file is not text, or a file has no fields although pairs are wanted.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        fields: Fields,
        key: str = "input",
        custom: TextReader | None = None,
        extensions: Sequence[str] = DEFAULT_EXTENSIONS,
        encoding: str = AUTO_ENCODING,
        max_rejected: float = 1.0,
    ) -> None:
        found = find_text_files(patterns, key, extensions, any_kind=custom is not None)
        self.files, self.passed_over = found.files, found.passed_over
        plain = next((path for path in self.files if kind(path) is Kind.text or custom is not None), None)
        if has_prompts(fields) and plain is not None:
            raise DataError(f"{plain}: plain text has no fields {_shown(fields)}: leave it out of {key}")
        table = next((path for path in self.files if kind(path) in (Kind.table, Kind.parquet)), None)
        if isinstance(fields, Conversations) and table is not None:
            raise DataError(f"{table}: messages are read from JSON lines only: convert it, or leave it out of {key}")
        self.custom = custom
        self.total_bytes = sum(path.stat().st_size for path in self.files)
        self.bytes_read = 0
        self.rejected = Rejections()
        self.converted: dict[str, str] = {}
        self.fields = fields
        self.key = key
        self._encoding = encoding
        self._max_rejected = max_rejected
        self._encodings: dict[Path, str] = {}

    @property
    def how(self) -> str:
        """The settings, other than the file's kind, that determine how files are read."""
        return f"{self._encoding} {self.custom or ''}"

    @property
    def section(self) -> str:
        """The config section of the files, with a trailing dot; or empty."""
        return "".join(self.key.rpartition(".")[:2])

    @property
    def _columns(self) -> tuple[str, ...]:
        assert not isinstance(self.fields, Conversations), "tables are refused"
        return self.fields

    def alone(self, path: Path) -> DocumentReader:
        """Returns a reader of one of the files, with separate counts."""
        return DocumentReader([str(path)], self.fields, self.key, self.custom, encoding=self._encoding)

    def encoding(self, path: Path) -> str:
        """Returns the encoding of a file, see `encoding_of`; the result is cached.

        Raises:
            DataError: the file is one JSON document instead of lines.
        """
        if path not in self._encodings:
            reads_bytes = self.custom is not None or kind(path) is Kind.parquet
            self._encodings[path] = UTF8 if reads_bytes else encoding_of(path, self._encoding)
            if self.custom is None and kind(path) is Kind.json_lines:
                self._require_lines(path)
        return self._encodings[path]

    def _require_lines(self, path: Path) -> None:
        # A damaged file is reported when it is read.
        with suppress(*DAMAGED, UnicodeDecodeError), opened(path, self._encodings[path]) as (_, file):
            require_json_lines(file.read(_HEAD_BYTES), str(path))

    def is_line_file(self, path: Path) -> bool:
        """Whether a file is JSON lines that can be read from any byte, without this reader."""
        plain = kind(path) is Kind.json_lines and path.suffix.lower() not in COMPRESSED_ENDINGS
        return plain and self.custom is None and self.encoding(path) == UTF8

    def encoding_fault(self, path: Path) -> RejectedLine | None:
        """Reads a file to its end; returns a rejection if its bytes do not fit its encoding, else None."""
        encoding = self.encoding(path)
        with opened(path) as (_, file):
            fault = text_fault(file, encoding)
        if fault is None:
            if encoding != UTF8:
                self.converted[str(path)] = encoding
            return None
        line, byte = fault
        remedy = f"where it is Western European text, {self.section}encoding=cp1252 or latin-1 reads it"
        if encoding != UTF8:
            remedy = f"name another {self.section}encoding"
        shown = "UTF-8" if encoding == UTF8 else encoding
        return RejectedLine(str(path), 0, NoDocument(f"not {shown}", f"byte {byte:#04x} in line {line}; {remedy}"))

    def __iter__(self) -> Iterator[Document]:
        """Yields documents in order.

        Raises:
            DataError: a file cannot be read, or all files together have no document, or too many records are rejected.
        """
        found = 0
        for path in self.files:
            for row in self.read(path):
                if isinstance(row, RejectedLine):
                    self.rejected.add(row)
                else:
                    found += not (row.continues or row.turn)
                    yield row
        if not found:
            raise no_documents(self.files, self.rejected, self.fields, self.section)
        self.rejected.check(found, self._max_rejected, self.files, self.section)

    def read(self, path: Path, last_cut: LastCut | None = None) -> Iterator[Document | RejectedLine]:
        """Yields the documents of one file, in order, and adds its size to `bytes_read`.

        Args:
            path: the file.
            last_cut: finds positions at which long texts may be cut, see `text_pieces`.

        Raises:
            DataError: the file cannot be read.
        """
        finished_bytes = self.bytes_read
        with readable(path, self.key, lambda: self.bytes_read - finished_bytes):
            if self.custom is not None:
                yield from self._custom(self.custom, path)
            elif kind(path) is Kind.parquet:
                yield from self._parquet(path, finished_bytes, last_cut)
            elif kind(path) is Kind.json_lines and self.encoding(path) == UTF8:
                # A line in another encoding is rejected alone.
                yield from self._json_lines(path, finished_bytes, last_cut)
            # Checked before it is read: a file with a bad byte at its end gives no document.
            elif (fault := self.encoding_fault(path)) is not None:
                yield fault
            else:
                read = {Kind.json_lines: self._json_lines, Kind.table: self._table, Kind.text: self._plain_text}
                yield from read[kind(path)](path, finished_bytes, last_cut)
            self.bytes_read = finished_bytes + path.stat().st_size

    def _json_lines(
        self, path: Path, finished_bytes: int, last_cut: LastCut | None
    ) -> Iterator[Document | RejectedLine]:
        with opened(path, self.encoding(path)) as (raw, file):
            for number, line in enumerate(file, start=1):
                # The position in the raw file is also known for compressed files, unlike their uncompressed size.
                self.bytes_read = finished_bytes + raw.tell()
                for texts in json_turns(line, self.fields):
                    yield from rows_of(texts, str(path), number, last_cut)

    def _table(self, path: Path, finished_bytes: int, last_cut: LastCut | None) -> Iterator[Document | RejectedLine]:
        delimiter = TABLE_DELIMITERS[extension_without_compression(path)]
        with opened(path, self.encoding(path)) as (raw, file):
            for number, texts in table_rows(file, path, self._columns, delimiter, self.section):
                self.bytes_read = finished_bytes + raw.tell()
                yield from rows_of(texts, str(path), number, last_cut)

    def _parquet(self, path: Path, finished_bytes: int, last_cut: LastCut | None) -> Iterator[Document | RejectedLine]:
        size = path.stat().st_size
        for number, (share, texts) in enumerate(parquet_rows(path, self._columns, self.section), start=1):
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
        empty = True
        with opened(path, self.encoding(path)) as (raw, file):
            for piece in _pieces(text_pieces(file, last_cut), Document("", str(path), 1)):
                self.bytes_read = finished_bytes + raw.tell()
                empty = False
                yield piece
        if empty:
            yield RejectedLine(str(path), 0, NoDocument("empty text"))


def _checked(text: str) -> tuple[str, ...] | NoDocument:
    if not isinstance(text, str):
        return NoDocument("not text", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError:
        return NoDocument("not Unicode: half a surrogate pair")
    return filled(("text",), (text,))


def has_prompts(fields: Fields) -> bool:
    """Whether documents have several sequences, alternating between prompts and responses."""
    return isinstance(fields, Conversations) or len(fields) > 1


def _shown(fields: Fields) -> str:
    return fields.field if isinstance(fields, Conversations) else ", ".join(fields)


@contextmanager
def readable(path: Path, key: str, done_bytes: Callable[[], int]) -> Iterator[None]:
    """Converts errors of reading a file to a DataError with the position in the file and the config key."""
    try:
        yield
    except DAMAGED as error:
        raise DataError(
            f"{path}: reading failed after {done_bytes()} bytes: {error}; "
            f"the file is truncated, damaged or not readable: restore it or leave it out of {key}"
        ) from error


def no_documents(files: Sequence[Path], rejected: Rejections, fields: Fields, section: str) -> DataError:
    """Returns the error for an input without documents.

    Args:
        files: files that were read.
        rejected: rejected lines and files.
        fields: fields that were looked for.
        section: config section of the files, see `DocumentReader.section`.
    """
    records = "JSON lines, CSV or parquet with the"
    if isinstance(fields, Conversations):
        wanted = f"want JSON lines with messages in {fields.field!r} (another is named with {section}messages_field)"
    elif len(fields) > 1:
        wanted = f"want {records} fields {_shown(fields)} ({section}prompt_field, {section}response_field)"
    else:
        wanted = f"want text, or {records} field {fields[0]!r} (another is named with {section}text_field)"
    return DataError(f"{first_names(files)}: no documents, {rejected}; {wanted}")


def text_pieces(file: BinaryIO, last_cut: LastCut | None = None) -> Iterator[str]:
    """Yields a UTF-8 text in pieces, most of them a little longer than PIECE_CHARACTERS.

    Args:
        file: the text; may begin with a byte order mark.
        last_cut: finds a position to cut so that tokenizing the pieces gives the ids of the whole text; if there is
            none, the piece grows. None cuts between words, for training a tokenizer.

    Yields:
        Pieces whose concatenation is the text; none for an empty text.
    """
    yield from _cut_pieces(_decoded(file), last_cut)


def _cut_pieces(stretches: Iterable[str], last_cut: LastCut | None = None) -> Iterator[str]:
    """Yields a text in pieces, see `text_pieces`.

    Args:
        stretches: the text, in parts of up to about PIECE_CHARACTERS that may end anywhere.
        last_cut: see `text_pieces`.
    """
    text, searched = "", 0
    for stretch in stretches:
        text += stretch
        if len(text) - searched > PIECE_CHARACTERS:
            cut = (last_cut or _between_words)(text, searched, len(text))
            if cut is not None:
                yield text[:cut]
                text = text[cut:]
            searched = len(text)
    if text:
        yield text


def _decoded(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while block := file.read(_READ_BYTES):
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _between_words(text: str, begin: int, end: int) -> int:
    """Returns the position of the last newline, or else space, before a word; `end` if there is none."""
    for separator in "\n ":
        position = end - 1
        while (position := text.rfind(separator, begin, position)) > begin:
            if not text[position + 1].isspace():
                return position
    return end


class TextCutter:
    """Finds positions at which a text can be cut without changing its token ids, for one tokenizer.

    A tokenizer first splits text at added tokens and by the pattern of its pre-tokenizer. A position qualifies if the
    tokenizer splits there in several windows whose ends differ by a few characters. Several windows are needed because,
    for example, groups of three digits or four spaces are counted from the start of the window, so windows split a long
    run of them at different positions. The text on either side must also give the ids that it has within the window,
    because some tokenizers add a space before every text, or strip it.

    Args:
        tokenizer: the tokenizer, configured for special tokens as it is used. Its post-processor is removed: it
            distorts offsets, and adds nothing if special tokens are not added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = None
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yields a text in pieces of about PIECE_CHARACTERS; a text that cannot be cut is one piece."""
        begin = 0
        for end in range(PIECE_CHARACTERS, len(text) - REACH, PIECE_CHARACTERS):
            cut = self.last_cut(text, max(begin, end - PIECE_CHARACTERS), end)
            if cut is not None:
                yield text[begin:cut]
                begin = cut
        yield text[begin:]

    def last_cut(self, text: str, begin: int, end: int) -> int | None:
        """Returns a position to cut between two positions, near the later one if possible; None if none is found.

        Args:
            text: a text that begins at the start of a document or a piece.
            begin: the first position.
            end: the last position.
        """
        last = min(end, len(text)) - REACH
        step = max(2 * REACH, (last - begin) // _TRIES)
        for middle in range(last, begin, -step):
            cut = self._cut_near(text, middle)
            if cut is not None and cut > begin:
                return cut
        return None

    def _cut_near(self, text: str, middle: int) -> int | None:
        start, stop = max(0, middle - REACH), middle + REACH
        whole = self._ids(text[start:stop])
        places = set(range(middle - REACH // 2, middle + REACH // 2))
        for shift in range(_SHIFTS):
            # A document or a piece always begins at its first character, so the window does too.
            first = start + shift if start else 0
            places &= {first + split for split in self._splits(text[first : stop - shift])}
        for place in sorted(places)[: -_CANDIDATES - 1 : -1]:
            before, after = text[start:place], text[place:stop]
            # An added token may strip all adjacent white space, and may lie outside the window or across its end.
            known = not after[: REACH // 4].isspace() and not before[-REACH // 4 :].isspace()
            if place and known and self._ids(before) + self._ids(after) == whole:
                return place
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _splits(self, text: str) -> set[int]:
        """Positions at which the tokenizer splits a text before it looks up tokens."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        return {
            offsets[token][0]
            for token in range(1, len(words))
            # A character that is normalized to several characters can be split within.
            if words[token] != words[token - 1] and offsets[token - 1][1] <= offsets[token][0]
        }
