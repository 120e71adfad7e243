"""Documents out of raw text files: JSON lines, plain text and parquet, the first two also compressed.

A line that is no document is counted and reported; only what spoils a whole file is fatal. Long documents come in
pieces, cut where the pieces tokenize to what the whole would.
"""

from __future__ import annotations

import codecs
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tokenizers import Tokenizer
from zstandard import ZstdError

from megads.data.config import ReaderConfig
from megads.data.indexed.sidecar import KEPT_EXAMPLES
from megads.data.prepare.records import Fields, NotText, Text, filled, json_turns, parquet_rows
from megads.data.prepare.text_files import (
    PARQUET_ENDINGS,
    TEXT_ENDINGS,
    decompressed,
    find_text_files,
    first_names,
    kind,
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


def utf8_fault(file: BinaryIO) -> tuple[int, int] | None:
    """Returns the line, from 1, and the value of the first byte that is no UTF-8, None where all of it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    while True:
        block = file.read(_READ_BYTES)
        try:
            line += decoder.decode(block, final=not block).count("\n")
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            return line + before.count(b"\n"), error.object[error.start]
        if not block:
            return None


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
