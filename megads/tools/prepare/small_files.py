"""Reads small files of text or records whole, by the rules of `megads preprocess`: prompts, and texts to evaluate.

Unlike a corpus, where faulty records are counted, such a file must be correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megads.api import DataError
from megads.tools.prepare.records import NoDocument, json_records
from megads.tools.prepare.text import Document, DocumentReader, readable
from megads.tools.prepare.text_files import Kind, kind, opened


def whole_texts(path: Path, field: str, key: str, field_key: str) -> Iterator[str]:
    """Yields the texts of a file: of every record, or of the whole file.

    Args:
        path: the file.
        field: JSON field, or column, that holds the text.
        key: config key of the file, for messages.
        field_key: config key of the field, for messages.

    Raises:
        DataError: the file cannot be read, or a record has no text; an empty record is skipped.
    """
    text = ""
    for row in DocumentReader([str(path)], (field,), key).read(path):
        if isinstance(row, Document):
            text += row.text
            if not row.continues:
                yield text
                text = ""
        elif row.loses_text:
            where = f"{row.source}:{row.line}: has no text in {field!r}: {row.why}" if row.line else str(row)
            raise DataError(f"{where}: correct it, or give {field_key}=<name>")


def lines_of(path: Path, field: str, key: str, field_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the texts of a file, of which plain text has one in each line, with the JSON record of each, if any.

    Args:
        path: the file.
        field: JSON field, or column, that holds the text.
        key: config key of the file, for messages.
        field_key: config key of the field, for messages.

    Raises:
        DataError: there is no such file, it cannot be read, or a record has no text. Blank lines are skipped.
    """
    if not path.is_file():
        raise DataError(f"{key} = {path}: there is no such file")
    if kind(path) in (Kind.table, Kind.parquet):
        yield from ((text, {}) for text in whole_texts(path, field, key, field_key))
        return
    reader = DocumentReader([str(path)], (field,), key)
    with readable(path, key, lambda: 0):
        fault = reader.encoding_fault(path)
        if fault is not None:
            raise DataError(f"{key} = {path}: cannot be read as UTF-8 text: {fault.why}")
        with opened(path, reader.encoding(path)) as (_, file):
            yield from _records(file, path, field, field_key) if kind(path) is Kind.json_lines else _lines(file)


def _lines(file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file):
        # Only a line feed ends a line: form feeds and U+2028 are characters of a text.
        text = line.decode("utf-8" if number else "utf-8-sig").removesuffix("\n").removesuffix("\r")
        if text.strip():
            yield text, {}


def _records(file: BinaryIO, path: Path, field: str, field_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        for record in json_records(line):
            if isinstance(record, NoDocument) and record.reason == "not JSON":
                raise DataError(f"{path}:{number}: {record}; put plain text in a .txt file")
            if isinstance(record, NoDocument) or not isinstance(record.get(field), str):
                found = "it is not an object" if isinstance(record, NoDocument) else f"it has {', '.join(record)}"
                raise DataError(f"{path}:{number}: has no text in {field!r}, {found}: give {field_key}=<name>")
            yield record[field], record
