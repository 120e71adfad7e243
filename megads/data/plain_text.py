"""Plain text files of any size, in pieces."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from megads.data import text_cuts

_BLOCK_BYTES = 1 << 17

LastCut = Callable[[str, int, int], int | None]
"""Returns a place to cut a text between two positions; see `megads.data.text_cuts.TextCutter.last_cut`."""


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


def text_pieces(file: BinaryIO, last_cut: LastCut | None = None) -> Iterator[str]:
    """Yields a UTF-8 text in pieces, most of them a little longer than PIECE_CHARACTERS.

    Args:
        file: the text, a byte order mark allowed.
        last_cut: where to cut, so that the pieces tokenize to what the whole would; text is read on where there is no
            such place. None cuts between words, for a tokenizer that is yet to be learnt.

    Yields:
        Pieces that joined give the text; none for an empty one.
    """
    yield from cut_pieces(_decoded(file), last_cut)


def cut_pieces(stretches: Iterable[str], last_cut: LastCut | None = None) -> Iterator[str]:
    """Yields a text in pieces, see `text_pieces`.

    Args:
        stretches: the text, in parts of about PIECE_CHARACTERS or less that may end anywhere.
        last_cut: see there.
    """
    text, searched = "", 0
    for stretch in stretches:
        text += stretch
        if len(text) - searched > text_cuts.PIECE_CHARACTERS:
            cut = (last_cut or _between_words)(text, searched, len(text))
            if cut is not None:
                yield text[:cut]
                text = text[cut:]
            searched = len(text)
    if text:
        yield text


def _decoded(file: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while block := file.read(_BLOCK_BYTES):
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
