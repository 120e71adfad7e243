"""The text of one record, or why it has none: lines of JSON."""

from __future__ import annotations

import json
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


def json_turns(line: bytes, fields: Fields, *, first: bool = False) -> tuple[str, ...] | NotText | None:
    """Returns the texts of one line of JSON, why it has none, or None for a blank line.

    Args:
        line: the line, its newline included or not.
        fields: those of the object that hold the texts. The last one must not be empty.
        first: the line is the first of its file, where a byte order mark may stand.
    """
    if first:
        line = line.removeprefix(UTF8_MARK)
    if not line.strip():
        return None
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
