"""The text of one record, or why it has none: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from megads.data.long_text import LONG_BYTES, Text, long_strings_apart

T = TypeVar("T", str, Text)
UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class NotText:
    """Why a record gives no document.

    Attributes:
        reason: one of a few, to count by.
        detail: what is particular to this record.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return self.reason + (f" ({self.detail})" if self.detail else "")


Fields = tuple[str, ...]
"""Names of a record's fields that make a document: the text, or what is given and what is learnt by turns."""


def json_turns(line: bytes, fields: Fields) -> Iterator[tuple[Text, ...] | NotText]:
    """Yields the texts of one line of JSON, or why it has none; nothing for a blank line.

    Files that are joined by `cat` keep their byte order marks, which then stand at the start of some line, or between
    two records where a file did not end with a newline. Marks within a text are part of it.

    Args:
        line: the line, its newline included or not.
        fields: those of the object that hold the texts. The last one must not be empty.
    """
    yield from _long_turns(line, fields) or _turns(line, fields)


def _turns(line: bytes, fields: Fields) -> Iterator[tuple[str, ...] | NotText]:
    for record in _records_between_marks(line) if UTF8_MARK in line else (line,):
        if record.strip():
            yield _record_turns(record, fields)


def _long_turns(line: bytes, fields: Fields) -> list[tuple[Text, ...]]:
    """Texts of a line with long ones; none where it has no long ones, or has a fault: that is described by its place
    in the line, which is read whole for it."""
    short, long = long_strings_apart(line) if len(line) > LONG_BYTES else (line, {})
    if not long or not all(text.is_valid() for text in long.values()):
        return []
    found: list[tuple[Text, ...]] = []
    for turns in _turns(short, fields):
        if isinstance(turns, NotText):
            return []
        found.append(tuple(long.get(text, text) for text in turns))
    return found


def _records_between_marks(line: bytes) -> Iterator[bytes]:
    while True:
        while (line := line.lstrip()).startswith(UTF8_MARK):
            line = line.removeprefix(UTF8_MARK)
        try:
            text = line.decode()
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            yield line
            return
        record, rest = text[:end].encode(), text[end:].lstrip().encode()
        if not rest.startswith(UTF8_MARK):
            yield line
            return
        yield record
        line = rest


def _record_turns(line: bytes, fields: Fields) -> tuple[str, ...] | NotText:
    try:
        record = json.loads(line.decode())
        if not isinstance(record, dict):
            return NotText("not a JSON object", type(record).__name__)
        for field in fields:
            text = record.get(field)
            if text is None:
                return NotText(f"no field {field!r}")
            if not isinstance(text, str):
                return NotText(f"field {field!r} is not text", type(text).__name__)
            # JSON can spell half a surrogate pair, which is no character and which no tokenizer takes.
            text.encode()
    except UnicodeDecodeError as error:
        return NotText("not UTF-8", f"byte {line[error.start]:#04x}")
    except UnicodeEncodeError:
        return NotText("not Unicode: half a surrogate pair")
    except (ValueError, RecursionError) as error:
        return NotText("not JSON", str(error)[:100])
    return filled(fields, tuple(record[field] for field in fields))


def filled(fields: Fields, texts: tuple[T, ...]) -> tuple[T, ...] | NotText:
    """Returns the texts unless there is nothing to learn; a prompt may be empty."""
    if texts[-1]:
        return texts
    return NotText("empty text" if len(fields) == 1 else f"empty field {fields[-1]!r}")
