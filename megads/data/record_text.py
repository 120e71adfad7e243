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


def json_text(line: bytes, text_field: str, *, first: bool = False) -> str | NotText | None:
    """Returns the text of one line of JSON, why it has none, or None for a blank line.

    Args:
        line: the line, its newline included or not.
        text_field: field of the object that holds the text.
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
        text = record.get(text_field)
        if text is None:
            return NotText(f"no field {text_field!r}")
        if not isinstance(text, str):
            return NotText(f"field {text_field!r} is not text", type(text).__name__)
        # JSON can spell half a surrogate pair, which is no character and which no tokenizer takes.
        text.encode()
    except UnicodeDecodeError as error:
        return NotText("not UTF-8", f"byte {line[error.start]:#04x}")
    except UnicodeEncodeError:
        return NotText("not Unicode: half a surrogate pair")
    except (ValueError, RecursionError) as error:
        return NotText("not JSON", str(error)[:100])
    return text or NotText("empty text")
