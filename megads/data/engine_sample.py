"""The documents on which the fast engine is held to the reference before it is used: from all over the corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from megads.data.blocks import Block, LineRange
from megads.data.record_text import Fields
from megads.data.text import Document, DocumentReader, RejectedLine
from megads.data.text_files import COMPRESSED_ENDINGS, JSONL_ENDINGS, TEXT_ENDINGS, kind

FIRST_DOCUMENTS = 100
"""From the first block."""
PLACES, DOCUMENTS_OF_PLACE = 40, 5
"""Evenly spaced over the bytes of all files, and documents from each place on."""
WINDOW_BYTES = 1 << 18
"""Read at each place; a longer line is passed over."""
LARGEST_TEXT_CHARACTERS = 1 << 18
"""Of a document; memory for more would grow with the longest."""
LARGEST_PLAIN_BYTES = 1 << 24
"""A plain text is one document, which is checked to its end before it is believed to be text."""


def texts_of_places(source: DocumentReader, fields: Fields) -> list[str]:
    """Returns up to 200 texts from all over the files.

    Of uncompressed JSON lines they come from evenly spaced places; of other files, which cannot be entered in their
    middle, from the beginnings of those in which such places lie; of files that a plugin reads, from the first block.

    Args:
        source: the files.
        fields: of a record that hold its text.
    """
    found: list[str] = []
    for path, position in _places(source) if source.custom is None else ():
        found += islice(_texts(_rows_at(path, position, fields)), DOCUMENTS_OF_PLACE)
    return found


def first_texts(blocks: Sequence[Block], fields: Fields) -> list[str]:
    """Returns up to 100 texts of the first block: all that there is of a pipe.

    Args:
        blocks: the first ones.
        fields: of a record that hold its text.
    """
    rows = chain.from_iterable(block.load().rows(fields) for block in blocks[:1])
    return list(islice(_texts(rows), FIRST_DOCUMENTS))


def _places(source: DocumentReader) -> Iterator[tuple[Path, int]]:
    """Files and positions in them; the beginning of a file that is entered there only comes once."""
    sizes = np.array([path.stat().st_size for path in source.files], np.int64)
    ends = np.cumsum(sizes)
    begun: set[Path] = set()
    if not ends[-1]:
        return
    for byte in np.linspace(0, int(ends[-1]) - 1, PLACES).astype(np.int64):
        number = int(np.searchsorted(ends, byte, side="right"))
        path = source.files[number]
        plain = kind(path) in TEXT_ENDINGS and path.stat().st_size > LARGEST_PLAIN_BYTES
        if kind(path) in JSONL_ENDINGS and path.suffix.lower() not in COMPRESSED_ENDINGS:
            yield path, int(byte - (ends[number] - sizes[number]))
        elif path not in begun and not plain:
            begun.add(path)
            yield path, 0


def _rows_at(path: Path, position: int, fields: Fields) -> Iterator[Document | RejectedLine]:
    if kind(path) in JSONL_ENDINGS and path.suffix.lower() not in COMPRESSED_ENDINGS:
        return LineRange(str(path), position, position + WINDOW_BYTES).load().rows(fields)
    # A reader of its own: the one that feeds the workers counts what it has read.
    return DocumentReader([str(path)], fields).read(path)


def _texts(rows: Iterator[Document | RejectedLine]) -> Iterator[str]:
    return (row.text[:LARGEST_TEXT_CHARACTERS] for row in rows if not isinstance(row, RejectedLine))
