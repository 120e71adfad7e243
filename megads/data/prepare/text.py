"""Documents out of raw text files: plain text, JSON lines, tables and parquet, all but the last also compressed.

What is no document is counted and reported, a line or a whole file that is in another encoding; only a damaged file is
fatal. Long documents come in pieces, cut where the pieces tokenize to what the whole would.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tokenizers import Tokenizer

from megads.data.config import AUTO_ENCODING, DEFAULT_EXTENSIONS, ReaderConfig
from megads.data.indexed.sidecar import KEPT_EXAMPLES
from megads.data.prepare.chat import Conversations
from megads.data.prepare.decoding import COMPRESSED_ENDINGS, DAMAGED, UTF8, encoding_of, opened, text_fault
from megads.data.prepare.records import Fields, NotText, Text, filled, json_turns, parquet_rows, table_rows
from megads.data.prepare.text_files import (
    TABLE_DELIMITERS,
    Kind,
    find_text_files,
    first_names,
    kind,
    uncompressed_ending,
)
from megads.errors import DataError, MegadsError
from megads.runtime.registry import READERS

PIECE_CHARACTERS = 1 << 17
"""Of a piece of a long text: few enough that a batch of pieces keeps every core busy."""
REACH = 512
"""Characters on either side of a place that `TextCutter` looks at."""
_TRIES, _CANDIDATES, _SHIFTS = 8, 4, 4
_READ_BYTES = 1 << 17
LastCut = Callable[[str, int, int], int | None]
"""Returns a place to cut a text between two positions; see `TextCutter.last_cut`."""
TextReader = Callable[[Path], Iterable[str]]
"""A plugin's: the texts of a file's documents."""


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
    """A line that gave no document, or a whole file, whose line is 0."""

    source: str
    line: int
    why: NotText

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.why}" if self.line else f"{self.source}: {self.why}"


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
            yield from _pieces(_cut_pieces(text.stretches(), last_cut), source, line, turn)


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
    """Lines and whole files that gave no document.

    Attributes:
        reasons: number of them by reason.
        examples: "<file>:<line>: <reason>" of the first hundred.
        files: how many are whole files.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    files: int = 0

    @property
    def count(self) -> int:
        """Lines and files rejected in all."""
        return self.reasons.total()

    def add(self, rejected: RejectedLine) -> None:
        """Counts one line or file."""
        self.reasons[rejected.why.reason] += 1
        self.files += not rejected.line
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(str(rejected))

    def __str__(self) -> str:
        if not self.count:
            return "no lines rejected"
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common())
        return f"{rejected_count(self.count, self.files)} rejected: {reasons}; first: {self.examples[0]}"


def rejected_count(rejected: int, files: int) -> str:
    """Returns numbers of rejected lines and files in words.

    Args:
        rejected: lines and files.
        files: how many of them are whole files.
    """
    counts = {"line": rejected - files, "file": files}
    return " and ".join(f"{count:,} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)


def converted_text(encodings: Mapping[str, str]) -> str:
    """Returns which files were converted, in one line; empty where none was.

    Args:
        encodings: by file.
    """
    counts = Counter(encodings.values())
    examples = {encoding: name for name, encoding in reversed(list(encodings.items()))}
    parts = [f"{count:,} from {encoding} ({examples[encoding]})" for encoding, count in counts.most_common()]
    return f"converted: {', '.join(parts)}" if parts else ""


def custom_reader(config: ReaderConfig) -> TextReader | None:
    """Returns the reader of a plugin that the config names; None where files are read by their kinds."""
    if config.name == "auto":
        return None
    part = READERS.find(config.name, "reader.name")
    return _PluginReader(config.name, READERS.options_of(part, config.options))


@dataclass(frozen=True)
class _PluginReader:
    """A plugin's reader by its name and with its options, both of which determine what it reads."""

    name: str
    options: Any

    def __call__(self, path: Path) -> Iterable[str]:
        found: Iterable[str] = READERS.find(self.name, "reader.name").make(self.options, path)
        return found


class DocumentReader:
    """Iterates over the documents of files, once.

    Args:
        patterns: files, folders or globs. JSON lines, tables and parquet have a document a record, other files are one.
        fields: JSON fields, or columns, that hold the document.
        key: the config key that the patterns come from, for messages; the others stand beside it.
        custom: reads all files, whatever kinds they are.
        extensions: of files to take out of folders.
        encoding: of files that are neither UTF-8 nor marked as something else.

    Attributes:
        files: the files that match, each once: patterns in the order given, the matches of one in order of name.
        passed_over: what else the folders hold, for people; empty where that is nothing.
        total_bytes: size of the files as they are on disk.
        bytes_read: how much of that has been read.
        rejected: lines and files that gave no document.
        converted: encodings of the files that were read and are not UTF-8.

    Raises:
        ConfigError: no patterns.
        DataError: a pattern matches nothing, or a file that is no text or, for pairs, has no fields.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        fields: Fields,
        key: str = "input",
        custom: TextReader | None = None,
        extensions: Sequence[str] = DEFAULT_EXTENSIONS,
        encoding: str = AUTO_ENCODING,
    ) -> None:
        found = find_text_files(patterns, key, extensions, any_kind=custom is not None)
        self.files, self.passed_over = found.files, found.passed_over
        plain = next((path for path in self.files if kind(path) is Kind.text or custom is not None), None)
        if has_turns(fields) and plain is not None:
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
        self._encodings: dict[Path, str] = {}

    @property
    def how(self) -> str:
        """How files are read, beside what their kinds say."""
        return f"{self._encoding} {self.custom or ''}"

    @property
    def section(self) -> str:
        """The section of the config that the files come from, with a dot at its end; or empty."""
        return "".join(self.key.rpartition(".")[:2])

    @property
    def _columns(self) -> tuple[str, ...]:
        assert not isinstance(self.fields, Conversations), "tables are refused"
        return self.fields

    def alone(self, path: Path) -> DocumentReader:
        """Returns a reader of one of the files, which counts for itself."""
        return DocumentReader([str(path)], self.fields, self.key, self.custom, encoding=self._encoding)

    def encoding(self, path: Path) -> str:
        """Returns what a file is in, see `encoding_of`; looks once."""
        if path not in self._encodings:
            reads_bytes = self.custom is not None or kind(path) is Kind.parquet
            self._encodings[path] = UTF8 if reads_bytes else encoding_of(path, self._encoding)
        return self._encodings[path]

    def is_line_file(self, path: Path) -> bool:
        """Whether a file is JSON lines that can be entered at any byte, and read without this reader."""
        plain = kind(path) is Kind.json_lines and path.suffix.lower() not in COMPRESSED_ENDINGS
        return plain and self.custom is None and self.encoding(path) == UTF8

    def encoding_fault(self, path: Path) -> RejectedLine | None:
        """Returns that a whole file is in another encoding, None where it can be read; reads it to its end."""
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
        return RejectedLine(str(path), 0, NotText(f"not {shown}", f"byte {byte:#04x} in line {line}; {remedy}"))

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
            raise no_documents(self.files, self.rejected, self.fields, self.section)

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
            elif kind(path) is Kind.parquet:
                yield from self._parquet(path, finished_bytes, last_cut)
            elif kind(path) is Kind.json_lines and self.encoding(path) == UTF8:
                # Each line is for itself.
                yield from self._json_lines(path, finished_bytes, last_cut)
            # Read twice: a file with a bad byte at its end gives no document, and none is taken back.
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
                # The position in the raw file is known for compressed files too, whose whole size is not.
                self.bytes_read = finished_bytes + raw.tell()
                for texts in json_turns(line, self.fields):
                    yield from rows_of(texts, str(path), number, last_cut)

    def _table(self, path: Path, finished_bytes: int, last_cut: LastCut | None) -> Iterator[Document | RejectedLine]:
        delimiter = TABLE_DELIMITERS[uncompressed_ending(path)]
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
            for piece in _pieces(text_pieces(file, last_cut), str(path), 1):
                self.bytes_read = finished_bytes + raw.tell()
                empty = False
                yield piece
        if empty:
            yield RejectedLine(str(path), 0, NotText("empty text"))


def _checked(text: str) -> tuple[str, ...] | NotText:
    if not isinstance(text, str):
        return NotText("not text", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError:
        return NotText("not Unicode: half a surrogate pair")
    return filled(("text",), (text,))


def has_turns(fields: Fields) -> bool:
    """Whether documents have several sequences, what is given and what is learnt by turns."""
    return isinstance(fields, Conversations) or len(fields) > 1


def _shown(fields: Fields) -> str:
    return fields.field if isinstance(fields, Conversations) else ", ".join(fields)


@contextmanager
def readable(path: Path, key: str, done_bytes: Callable[[], int]) -> Iterator[None]:
    """Turns what reading a file raises into a DataError with the place in the file and the config key it comes from."""
    try:
        yield
    except DAMAGED as error:
        raise DataError(
            f"{path}: reading failed after {done_bytes()} bytes: {error}; "
            f"the file is truncated, damaged or not readable: make it again or leave it out of {key}"
        ) from error


def no_documents(files: Sequence[Path], rejected: Rejections, fields: Fields, section: str) -> DataError:
    """Returns the error of an input without a document.

    Args:
        files: which were read.
        rejected: what was in them.
        fields: which were looked for.
        section: of the config that the files come from, see `DocumentReader.section`.
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
        file: the text, a byte order mark allowed.
        last_cut: where to cut, so that the pieces tokenize to what the whole would; text is read on where there is no
            such place. None cuts between words, for a tokenizer that is yet to be learnt.

    Yields:
        Pieces that joined give the text; none for an empty one.
    """
    yield from _cut_pieces(_decoded(file), last_cut)


def _cut_pieces(stretches: Iterable[str], last_cut: LastCut | None = None) -> Iterator[str]:
    """Yields a text in pieces, see `text_pieces`.

    Args:
        stretches: the text, in parts of about PIECE_CHARACTERS or less that may end anywhere.
        last_cut: see there.
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
    """Returns the position of the last newline, or else space, that a word follows; the end, where there is none."""
    for separator in "\n ":
        position = end - 1
        while (position := text.rfind(separator, begin, position)) > begin:
            if not text[position + 1].isspace():
                return position
    return end


class TextCutter:
    """Finds places to cut for one tokenizer.

    Before it looks tokens up, a tokenizer splits text at added tokens and by the pattern of its pre-tokenizer. A place
    to cut is where it splits in several windows whose ends differ by a few characters: groups of three digits, say, or
    of four spaces are counted from somewhere, so windows split a long run of them at different places. On either side
    of the place the text must also give the tokens that it gives as part of the window: some tokenizers put a space
    before every text, or trim it.

    Args:
        tokenizer: loaded, set for special tokens as it is used. Its post-processor is removed: it falsifies the places
            of tokens, and adds nothing where special tokens are not added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = None
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yields a text in pieces of about PIECE_CHARACTERS; a text without places to cut is one piece."""
        begin = 0
        for end in range(PIECE_CHARACTERS, len(text) - REACH, PIECE_CHARACTERS):
            cut = self.last_cut(text, max(begin, end - PIECE_CHARACTERS), end)
            if cut is not None:
                yield text[begin:cut]
                begin = cut
        yield text[begin:]

    def last_cut(self, text: str, begin: int, end: int) -> int | None:
        """Returns a place between two positions, near the later one if there is one; None where none is found.

        Args:
            text: which begins where a document or a piece of it does.
            begin: the first position.
            end: the last one.
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
            # A document or a piece always begins at its first character.
            first = start + shift if start else 0
            places &= {first + split for split in self._splits(text[first : stop - shift])}
        for place in sorted(places)[: -_CANDIDATES - 1 : -1]:
            before, after = text[start:place], text[place:stop]
            # An added token may take all white space beside it, and stand beyond the window or across its end.
            known = not after[: REACH // 4].isspace() and not before[-REACH // 4 :].isspace()
            if place and known and self._ids(before) + self._ids(after) == whole:
                return place
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _splits(self, text: str) -> set[int]:
        """Positions at which the tokenizer splits before it looks tokens up."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        return {
            offsets[token][0]
            for token in range(1, len(words))
            # A character that is normalized to several can be split within.
            if words[token] != words[token - 1] and offsets[token - 1][1] <= offsets[token][0]
        }
