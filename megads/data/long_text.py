"""Texts of hundreds of megabytes in a record of JSON or parquet, decoded a stretch at a time.

A `str` has up to four bytes for a character of one, and a record is copied a few times on its way to one.
"""

from __future__ import annotations

import codecs
import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LONG_BYTES = 1 << 20
"""Shorter texts are read whole."""
_STRETCH_BYTES = 1 << 17
# Whole characters and escapes; both halves of a surrogate pair are one. It stops before what is none of these.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)


@dataclass(frozen=True)
class LongText:
    """A text that is not in memory as one `str`.

    Attributes:
        stretches: decodes it anew, from its begin to its end.
    """

    stretches: Callable[[], Iterator[str]]

    def is_valid(self) -> bool:
        """Whether all of it can be decoded; only then are its stretches for use."""
        try:
            for _ in self.stretches():
                pass
        except ValueError:
            return False
        return True


Text = str | LongText


def utf8_stretches(content: memoryview) -> Iterator[str]:
    """Decodes UTF-8; raises UnicodeDecodeError where it is none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(content), _STRETCH_BYTES):
        yield decoder.decode(content[begin : begin + _STRETCH_BYTES])
    yield decoder.decode(b"", final=True)


def long_strings_apart(line: bytes) -> tuple[bytes, dict[str, LongText]]:
    """Takes the long strings out of a line of JSON.

    Args:
        line: the line; it need not be JSON.

    Returns:
        The line with a placeholder for every long string, and the text that each placeholder stands for. A string that
        does not end stays.
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
    """Position of the first quote from `begin` on that no backslash escapes; -1 where there is none."""
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
    """Decodes what is between the quotes of a string; raises ValueError where that is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while begin < end:
        whole = _WHOLE.match(line, begin, min(begin + _STRETCH_BYTES, end))
        assert whole is not None
        if whole.end() == begin:
            raise ValueError("half a surrogate pair, or an escape that is none")
        begin = whole.end()
        text: str = json.loads(f'"{decoder.decode(whole[0], final=begin == end)}"')
        yield text
