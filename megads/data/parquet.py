"""Parquet files, a column of text at a time and a few rows at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megads.data.long_text import LONG_BYTES, LongText, Text, utf8_stretches
from megads.data.record_text import Fields, NotText, filled
from megads.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS, _BATCH_BYTES = 256, 1 << 24
_READ_BYTES = 1 << 20


def parquet_rows(path: Path, columns: Fields) -> Iterator[tuple[float, tuple[Text, ...] | NotText]]:
    """Reads columns of text in constant memory, however large the row groups are.

    Args:
        path: the file.
        columns: their names, at the top level of the schema.

    Yields:
        The share of rows read so far, and the texts or why there are none.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is damaged or has no such column of text.
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
                _require_text(file, path, column, "text_field" if len(columns) == 1 else "prompt_field, response_field")
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


def _rows_of_batch(metadata: pq.FileMetaData, columns: Fields) -> int:
    """Rows that hold about _BATCH_BYTES where the rows are longest, and at most _ROWS."""
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
        raise DataError(
            f"{path}: no column {column!r}; it has {', '.join(schema.names) or 'none'}: name the one that holds the "
            f"text with {key}"
        )
    kind = schema.field(index).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(
            f"{path}: column {column!r} holds {kind}, not text; it has {', '.join(schema.names)}: name another with "
            f"{key}"
        )


def _record(columns: Fields, texts: tuple[Text | NotText, ...]) -> tuple[Text, ...] | NotText:
    fault = next((text for text in texts if isinstance(text, NotText)), None)
    return fault or filled(columns, tuple(text for text in texts if not isinstance(text, NotText)))


def _texts(column: pa.Array) -> Iterator[Text | NotText]:
    """Yields the texts of a column out of its own memory: Arrow's scalars are copies."""
    import pyarrow as pa

    column = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
    column = column.cast(pa.large_binary())
    _, ends, content = column.buffers()
    bounds = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1].tolist()
    everything = memoryview(content or b"")
    for valid, (begin, end) in zip(column.is_valid().to_pylist(), itertools.pairwise(bounds), strict=True):
        yield _text(everything[begin:end]) if valid else NotText("null")


def _text(content: memoryview) -> Text | NotText:
    if len(content) > LONG_BYTES:
        long = LongText(functools.partial(utf8_stretches, content))
        return long if long.is_valid() else NotText("not UTF-8")
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError:
        return NotText("not UTF-8")
