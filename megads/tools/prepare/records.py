"""Extracts the texts of records of JSON lines, CSV tables and parquet, or the reason why there are none.

Texts of hundreds of megabytes are decoded in pieces, because a `str` needs up to four bytes for a character of one
byte, and a record is copied several times while it is decoded.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import json
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from megads.api import ConfigError, DataError
from megads.tools.prepare.chat import Conversations, TemplateFault, messages_of, tools_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

LONG_BYTES = 1 << 20
"""Texts up to this size are decoded as a whole."""
_STRETCH_BYTES = 1 << 17
# Matches complete characters and escapes, with surrogate pairs as one; stops before anything else.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_INDENTED = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{[ \t]*\r?\n\s*\"[^\"\n]*\"\s*:")
_UTF8_MARK = b"\xef\xbb\xbf"
Names = tuple[str, ...]
Fields = Names | Conversations
"""Fields of a record that make up a document: the text; prompt and response; prompt, input and response; or the
messages."""
_INSTRUCTION, _INPUT = "instruction", "input"
"""Fields of Alpaca's format, where the input is a part of the prompt."""
_ROWS, _BATCH_BYTES = 256, 1 << 24
"""Maximum number of parquet rows decoded at a time, and their maximum size for the row group with the longest rows."""
_READ_BYTES = 1 << 20
_LARGEST_CELL = 1 << 29
"""Maximum number of characters of a table cell; the library's default limit is 131,072."""
_DELIMITERS = ",;\t|"
_HEADER_LINES = 100
"""Maximum number of lines of a table's header, if a quote in it is never closed."""


@dataclass(frozen=True)
class LongText:
    """A text that is not in memory as one `str`.

    Attributes:
        stretches: decodes the text in pieces, from the beginning, whenever it is called.
    """

    stretches: Callable[[], Iterator[str]]

    def is_valid(self) -> bool:
        """Whether the whole text can be decoded; `stretches` may only be used if it can."""
        try:
            for _ in self.stretches():
                pass
        except ValueError:
            return False
        return True


Text = str | LongText
T = TypeVar("T", str, Text)


def _utf8_stretches(content: memoryview) -> Iterator[str]:
    """Decodes UTF-8 in pieces; raises UnicodeDecodeError on invalid bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(content), _STRETCH_BYTES):
        yield decoder.decode(content[begin : begin + _STRETCH_BYTES])
    yield decoder.decode(b"", final=True)


def _extract_long_strings(line: bytes) -> tuple[bytes, dict[str, LongText]]:
    """Replaces the long strings in a line of JSON by placeholders.

    Args:
        line: the line; it need not be valid JSON.

    Returns:
        The line with a placeholder for every long string, and the text of each placeholder. An unterminated string
        stays.
    """
    parts: list[bytes] = []
    found: dict[str, LongText] = {}
    name = uuid.uuid4().hex
    copied, begin = 0, line.find(b'"')
    while begin >= 0 and (end := _closing_quote(line, begin + 1)) >= 0:
        if end - begin > LONG_BYTES:
            placeholder = f"{name}-{len(found)}"
            found[placeholder] = _json_string(line, begin + 1, end)
            parts += [line[copied : begin + 1], placeholder.encode()]
            copied = end
        begin = line.find(b'"', end + 1)
    return b"".join([*parts, line[copied:]]), found


def _closing_quote(line: bytes, begin: int) -> int:
    """Position of the first unescaped quote from `begin` on; -1 if there is none."""
    end = line.find(b'"', begin)
    while end >= 0:
        backslashes = end
        while backslashes > begin and line[backslashes - 1] == ord("\\"):
            backslashes -= 1
        if (end - backslashes) % 2 == 0:
            break
        end = line.find(b'"', end + 1)
    return end


def _json_string(line: bytes, begin: int, end: int) -> LongText:
    return LongText(lambda: _unescaped(line, begin, end))


def _unescaped(line: bytes, begin: int, end: int) -> Iterator[str]:
    """Decodes the content of a JSON string in pieces; raises ValueError if it is invalid."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while begin < end:
        whole = _WHOLE.match(line, begin, min(begin + _STRETCH_BYTES, end))
        assert whole is not None
        if whole.end() == begin:
            raise ValueError("half a surrogate pair, or an invalid escape")
        begin = whole.end()
        text: str = json.loads(f'"{decoder.decode(whole[0], final=begin == end)}"')
        yield text


@dataclass(frozen=True)
class NoDocument:
    """Reason why a record has no document.

    Attributes:
        reason: category, for counting.
        detail: detail of this record.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return self.reason + (f" ({self.detail})" if self.detail else "")


_NULL = NoDocument("null")


def require_json_lines(head: bytes, source: str) -> None:
    """Raises DataError if a file is one JSON document, an array or an indented object, instead of lines.

    Args:
        head: first bytes of the file, in UTF-8.
        source: its name, for the message.
    """
    if _ARRAY.match(head):
        what, program = "one JSON array", ".[]"
    elif _INDENTED.match(head):
        what, program = "indented JSON", "."
    else:
        return
    raise DataError(
        f"{source}: is {what}, not a record in each line: convert it with jq -c '{program}' (jq -c '{program}' "
        "old.json > new.jsonl) and give the new file"
    )


def json_turns(line: bytes, fields: Fields) -> Iterator[tuple[Text, ...] | NoDocument]:
    """Yields the texts of one JSON line, or why it has none; nothing for a blank line.

    Files joined by `cat` keep their byte order marks, which are then at the start of a line, or between two records if
    a file did not end with a newline. Marks within a text are part of it.

    Args:
        line: the line, with or without its newline.
        fields: fields of the object that hold the texts. The last one must not be empty.
    """
    if isinstance(fields, Conversations):
        yield from _turns(line, fields)
        return
    for texts in _long_turns(line, fields) or _turns(line, fields):
        yield texts if isinstance(texts, NoDocument) else with_input(texts)


def _turns(line: bytes, fields: Fields) -> Iterator[tuple[str, ...] | NoDocument]:
    for record in json_records(line):
        yield record if isinstance(record, NoDocument) else _record_turns(record, fields)


def json_records(line: bytes) -> Iterator[dict[str, Any] | NoDocument]:
    """Yields the objects of one JSON line, see `json_turns`, or why there is none; nothing for a blank line."""
    for record in _records_between_marks(line) if _UTF8_MARK in line else (line,):
        if record.strip():
            yield _json_record(record)


def _long_turns(line: bytes, fields: Names) -> list[tuple[Text, ...]]:
    """Returns the texts of a line with long ones; empty if it has no long ones, or is invalid. An invalid line is
    decoded as a whole by the caller, to report the position of the error."""
    short, long = _extract_long_strings(line) if len(line) > LONG_BYTES else (line, {})
    if not long or not all(text.is_valid() for text in long.values()):
        return []
    found: list[tuple[Text, ...]] = []
    for turns in _turns(short, fields):
        if isinstance(turns, NoDocument):
            return []
        found.append(tuple(long.get(text, text) for text in turns))
    return found


def _records_between_marks(line: bytes) -> Iterator[bytes]:
    while True:
        while (line := line.lstrip()).startswith(_UTF8_MARK):
            line = line.removeprefix(_UTF8_MARK)
        try:
            text = line.decode()
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            yield line
            return
        record, rest = text[:end].encode(), text[end:].lstrip().encode()
        if not rest.startswith(_UTF8_MARK):
            yield line
            return
        yield record
        line = rest


def _json_record(line: bytes) -> dict[str, Any] | NoDocument:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return NoDocument("not UTF-8", f"byte {line[error.start]:#04x}")
    except (ValueError, RecursionError) as error:
        return NoDocument("not JSON", str(error)[:100])
    return record if isinstance(record, dict) else NoDocument("not a JSON object", type(record).__name__)


def _record_turns(record: dict[str, Any], fields: Fields) -> tuple[str, ...] | NoDocument:
    try:
        if isinstance(fields, Conversations):
            return _conversation_turns(record, fields)
        if record.get(_INPUT):
            _require_input(fields, record, "field", "")
        if len(fields) == 3 and record.get(fields[1]) is None:
            record[fields[1]] = ""
        for field in fields:
            text = record.get(field)
            if text is None:
                return NoDocument(f"no field {field!r}")
            if not isinstance(text, str):
                return NoDocument(f"field {field!r} is not text", type(text).__name__)
            # JSON can spell half a surrogate pair, which is not a character and which tokenizers reject.
            text.encode()
    except UnicodeEncodeError:
        return NoDocument("not Unicode: half a surrogate pair")
    return filled(fields, tuple(record[field] for field in fields))


def _conversation_turns(record: dict[str, Any], fields: Conversations) -> tuple[str, ...] | NoDocument:
    """Raises UnicodeEncodeError on half a surrogate pair."""
    if record.get(fields.field) is None:
        return NoDocument(f"no field {fields.field!r}")
    try:
        turns = fields.template.turns(messages_of(record[fields.field]), tools_of(record.get("tools")))
    except TemplateFault as fault:
        return NoDocument("no conversation", str(fault)[:200])
    for text in turns:
        text.encode()
    return turns


def with_input(texts: tuple[Text, ...]) -> tuple[Text, ...]:
    """Returns prompt and response of three texts: prompt, input, which may be empty, and response; others unchanged."""
    if len(texts) != 3:
        return texts
    prompt, more, response = texts
    if isinstance(prompt, str) and isinstance(more, str):
        return "\n\n".join(filter(None, (prompt, more))), response

    def stretches() -> Iterator[str]:
        for text in (prompt, "\n\n", more):
            yield from (text,) if isinstance(text, str) else text.stretches()

    return LongText(stretches) if prompt and more else prompt or more, response


def _require_input(fields: Names, names: Iterable[str], where: str, section: str) -> None:
    """Raises DataError if prompts in Alpaca's format are read without the input, which is a part of them.

    Args:
        fields: names of the texts of a document.
        names: names of all fields of a record, or of all columns.
        where: the field or column, for the message.
        section: config section that names the fields, with a trailing dot; or empty.
    """
    if fields[0] == _INSTRUCTION and len(fields) == 2 and _INPUT not in fields and _INPUT in names:
        raise DataError(
            f"{where} {_INPUT!r} would be left out of the prompts: name it with {section}input_field={_INPUT}, "
            "or remove it"
        )


def filled(fields: Names, texts: tuple[T, ...]) -> tuple[T, ...] | NoDocument:
    """Returns the texts unless the last one, which is trained on, is empty; a prompt may be empty."""
    if texts[-1]:
        return texts
    return NoDocument("empty text" if len(fields) == 1 else f"empty field {fields[-1]!r}")


def table_rows(
    file: BinaryIO, path: Path, columns: Names, delimiter: str, section: str = ""
) -> Iterator[tuple[int, tuple[Text, ...] | NoDocument]]:
    """Reads columns of a CSV table whose first row has the column names; quoted cells may hold delimiters and line
    ends.

    Args:
        file: the table in UTF-8, optionally with a byte order mark.
        path: its path, for messages.
        columns: column names.
        delimiter: delimiter of cells; if it does not yield the columns, another common delimiter that does is used.
        section: config section that names the columns, with a trailing dot; or empty.

    Yields:
        The line, from 1, in which a row ends, and its texts or why there are none; line 0 for an empty file, nothing
        for a blank line.

    Raises:
        DataError: a column is missing.
    """
    csv.field_size_limit(_LARGEST_CELL)
    lines = _TableLines(io.TextIOWrapper(file, "utf-8-sig", newline=""))
    header = lines.header(delimiter)
    if not header:
        yield 0, NoDocument("empty text")
        return
    found = {sign: next(csv.reader(header, delimiter=sign), []) for sign in (delimiter, *_DELIMITERS)}
    delimiter = next((sign for sign, names in found.items() if set(columns) <= set(names)), delimiter)
    names = [" ".join(name.split()) for name in found[delimiter]]
    missing = next((column for column in columns if column not in names), None)
    if missing is not None:
        raise DataError(_no_column(path, missing, names, _naming_key(columns, section)))
    _require_input(columns, names, f"{path}: column", section)
    places = [names.index(column) for column in columns]
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin_record()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield lines.reject(str(error))
            continue
        if row:
            yield lines.number, _cells(row, names, columns, places)


def _cells(row: list[str], names: list[str], columns: Names, places: list[int]) -> tuple[Text, ...] | NoDocument:
    # A row of another length than the header's has its text cut at a delimiter, or in another column.
    if max(places) >= len(row):
        return NoDocument("too few cells")
    if len(row) > len(names):
        return NoDocument(
            "too many cells", f"{len(row)}, the header has {len(names)}: quote text that holds delimiters"
        )
    texts = filled(columns, tuple(row[place] for place in places))
    return texts if isinstance(texts, NoDocument) else with_input(texts)


class _TableLines:
    """The lines of a table, which are read again after the first line of a record that is not CSV.

    A quote that is never closed makes one record of everything up to the next quote, or to the end of the file.

    Args:
        text: the table, with its line ends.

    Attributes:
        number: number of the last line, from 1.
    """

    def __init__(self, text: Iterable[str]) -> None:
        self.number = 0
        self._text = iter(text)
        self._again = deque[str]()
        self._record: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._text)
        self.number += 1
        self._record.append(line)
        return line

    def header(self, delimiter: str) -> list[str]:
        """Returns the lines of the first record, whose quoted cells may hold line ends; empty for an empty file."""
        for _ in itertools.islice(self, _HEADER_LINES):
            if not _is_open(self._record, delimiter):
                return self._record
        first, self._record = self._record[:1], self._record[1:]
        self._read_again(self._record)
        return first

    def begin_record(self) -> None:
        """Forgets the lines of the last record."""
        self._record = []

    def reject(self, why: str) -> tuple[int, NoDocument]:
        """Rejects the first line of the record and reads the others again; returns the line's number and the reason."""
        first, *rest = self._record
        self._read_again(rest)
        if rest or first.count('"') % 2:
            return self.number, NoDocument("unclosed quote", "close it, or leave the quotes out")
        return self.number, NoDocument("not CSV", why)

    def _read_again(self, lines: Sequence[str]) -> None:
        self.number -= len(lines)
        self._again.extendleft(reversed(lines))


def _is_open(lines: Sequence[str], delimiter: str) -> bool:
    """Whether the last cell of a record begins with a quote that is not closed."""
    try:
        next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def _naming_key(columns: Names, section: str) -> str:
    return f"{section}text_field" if len(columns) == 1 else "prompt_field, response_field"


def _no_column(path: Path, column: str, names: list[str], key: str) -> str:
    shown = ", ".join(names) or "none"
    return f"{path}: no column {column!r}; it has {shown}: name the one that holds the text with {key}"


def parquet_rows(
    path: Path, columns: Names, section: str = ""
) -> Iterator[tuple[float, tuple[Text, ...] | NoDocument]]:
    """Reads text columns in constant memory, whatever the size of the row groups.

    Args:
        path: the file.
        columns: column names, at the top level of the schema.
        section: config section that names the columns, with a trailing dot; or empty.

    Yields:
        The share of rows read so far, and the texts or why there are none.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged or a text column is missing.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow, which is not installed ({error}): pip install 'megads[parquet]'"
        ) from error
    try:
        with pq.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
            for column in columns:
                _require_text(file, path, column, _naming_key(columns, section))
            _require_input(columns, file.schema_arrow.names, f"{path}: column", section)
            rows, done = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(
                _rows_of_batch(file.metadata, columns), columns=list(columns), use_threads=False
            ):
                for texts in zip(*(_texts(batch.column(column)) for column in columns), strict=True):
                    done += 1
                    yield done / rows, _record(columns, texts)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: reading parquet failed: {str(error).splitlines()[0]}; the file is truncated, damaged or no "
            "parquet: make it again or leave it out"
        ) from error


def _rows_of_batch(metadata: pq.FileMetaData, columns: Names) -> int:
    """Number of rows with a total size of about _BATCH_BYTES in the row group with the longest rows, at most _ROWS."""
    longest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        text_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema in columns)
        longest = max(longest, text_bytes // max(group.num_rows, 1))
    return max(1, min(_ROWS, _BATCH_BYTES // longest))


def _require_text(file: pq.ParquetFile, path: Path, column: str, key: str) -> None:
    import pyarrow as pa

    schema = file.schema_arrow
    index = schema.get_field_index(column)
    if index < 0:
        raise DataError(_no_column(path, column, schema.names, key))
    kind = schema.field(index).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    # Bytes are texts of writers that do not annotate them as UTF-8; a column of nulls only has no other type.
    texts = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    if not any(getattr(pa.types, name)(kind) for name in (*texts, "is_null")):
        raise DataError(
            f"{path}: column {column!r} holds {kind}, not text; it has {', '.join(schema.names)}: name another with "
            f"{key}"
        )


def _record(columns: Names, texts: tuple[Text | NoDocument, ...]) -> tuple[Text, ...] | NoDocument:
    if len(texts) == 3 and texts[1] == _NULL:
        texts = texts[0], "", texts[2]
    fault = next((text for text in texts if isinstance(text, NoDocument)), None)
    found = fault or filled(columns, tuple(text for text in texts if not isinstance(text, NoDocument)))
    return found if isinstance(found, NoDocument) else with_input(found)


def _texts(column: pa.Array) -> Iterator[Text | NoDocument]:
    """Yields the texts of a column from its buffer, because Arrow's scalars are copies."""
    import pyarrow as pa

    column = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
    column = column.cast(pa.large_binary())
    _, ends, content = column.buffers()
    bounds = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    everything = memoryview(content or b"")
    for valid, (begin, end) in zip(column.is_valid().to_pylist(), itertools.pairwise(bounds), strict=True):
        yield _text(everything[begin:end]) if valid else _NULL


def _text(content: memoryview) -> Text | NoDocument:
    if len(content) > LONG_BYTES:
        long = LongText(functools.partial(_utf8_stretches, content))
        return long if long.is_valid() else NoDocument("not UTF-8")
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        return NoDocument("not UTF-8")
