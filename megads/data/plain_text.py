"""Plain text files of any size, in pieces that tokenize to what the whole would."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

# Small enough that a batch of pieces keeps every core busy.
PIECE_CHARACTERS = 1 << 17
_BLOCK_BYTES = 1 << 17


def utf8_fault(file: BinaryIO) -> tuple[int, int] | None:
    """Returns the line, from 1, and the value of the first byte that is no UTF-8, None where all of it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    while True:
        block = file.read(_BLOCK_BYTES)
        try:
            line += decoder.decode(block, final=not block).count("\n")
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            return line + before.count(b"\n"), error.object[error.start]
        if not block:
            return None


def text_pieces(file: BinaryIO) -> Iterator[str]:
    """Yields a UTF-8 text in pieces, most of them a little longer than PIECE_CHARACTERS.

    A cut is made before a newline, or else a space, that a word follows. GPT-2's pattern, which byte-level tokenizers
    split text by, begins a new token at such a place, whatever stands before it: the ids are those of the whole text.

    Args:
        file: the text, a byte order mark allowed.

    Yields:
        Pieces that joined give the text; none for an empty one.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    while block := file.read(_BLOCK_BYTES):
        text += decoder.decode(block)
        if len(text) > PIECE_CHARACTERS:
            cut = _last_cut(text)
            yield text[:cut]
            text = text[cut:]
    text += decoder.decode(b"", final=True)
    if text:
        yield text


def _last_cut(text: str) -> int:
    """Returns the position of the last newline, or else space, that a word follows; the end, where there is none."""
    for separator in "\n ":
        position = len(text) - 1
        while (position := text.rfind(separator, 0, position)) > 0:
            if not text[position + 1].isspace():
                return position
    return len(text)
