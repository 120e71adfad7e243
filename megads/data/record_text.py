"""The text of one record, or why it has none: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

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


def json_turns(line: bytes, fields: Fields) -> Iterator[tuple[str, ...] | NotText]:
    """Yields the texts of one line of JSON, or why it has none; nothing for a blank line.

    Files that are joined by `cat` keep their byte order marks, which then stand at the start of some line, or between
    two records where a file did not end with a newline. Marks within a text are part of it.

    Args:
        line: the line, its newline included or not.
        fields: those of the object that hold the texts. The last one must not be empty.
    """
    for record in _records_between_marks(line) if UTF8_MARK in line else (line,):
        if record.strip():
            yield _record_turns(record, fields)


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


def filled(fields: Fields, texts: tuple[str, ...]) -> tuple[str, ...] | NotText:
    """Returns the texts unless there is nothing to learn; a prompt may be empty."""
    if texts[-1]:
        return texts
    return NotText("empty text" if len(fields) == 1 else f"empty field {fields[-1]!r}")
