from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megads.data.parquet import parquet_rows
from megads.data.record_text import NotText
from megads.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow", reason="needs megads[parquet]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs megads[parquet]")

TEXTS = ["one", "two é", None, "", "\x00 fünf"]


def write(path: Path, texts: object, kind: object = None, row_group_size: int = 2) -> Path:
    column = pa.array(texts, kind) if kind is not None else pa.array(texts)
    pq.write_table(pa.table({"text": column, "id": list(range(len(column)))}), path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_texts_in_order_over_row_groups(tmp_path: Path, kind: str) -> None:
    """Catches lost rows between row groups, a null that becomes the text 'None', and a type of text not known."""
    kinds = {"string": pa.string(), "large_string": pa.large_string()}
    column = pa.array(TEXTS).dictionary_encode() if kind == "dictionary" else pa.array(TEXTS, kinds[kind])
    path = write(tmp_path / "a.parquet", column)
    rows = list(parquet_rows(path, ("text",)))
    texts = [text if isinstance(text, tuple) else str(text) for _, text in rows]
    assert texts == [("one",), ("two é",), "null", "empty text", ("\x00 fünf",)]
    assert [isinstance(text, NotText) for _, text in rows] == [False, False, True, True, False]
    assert [share for share, _ in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    """Catches one bad row that ends a run of hours."""
    column = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    rows = [text for _, text in parquet_rows(write(tmp_path / "a.parquet", column), ("text",))]
    assert rows[0] == ("good",) and isinstance(rows[1], NotText) and str(rows[1]) == "not UTF-8"


def test_memory_does_not_grow_with_the_row_group(tmp_path: Path) -> None:
    """Catches a row group read whole: 64 MB of text in one must not pass through memory at once."""
    path = tmp_path / "large.parquet"
    table = pa.table({"text": [chr(97 + number % 26) * 1024 + str(number) for number in range(1 << 16)]})
    pq.write_table(table, path, row_group_size=1 << 16, use_dictionary=False, compression="none")
    del table
    before = peak = pa.total_allocated_bytes()
    for number, _ in enumerate(parquet_rows(path, ("text",))):
        if number % 512 == 0:
            peak = max(peak, pa.total_allocated_bytes())
    assert path.stat().st_size > 64 << 20
    assert peak - before < 16 << 20


def test_a_missing_column_names_those_there(tmp_path: Path) -> None:
    """Catches an error that leaves the user to find out what the columns are called."""
    path = write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(DataError, match=r"no column 'body'; it has text, id: .*text_field"):
        list(parquet_rows(path, ("body",)))
    with pytest.raises(DataError, match=r"column 'id' holds int64, not text"):
        list(parquet_rows(path, ("id",)))


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_damaged_file_is_refused(tmp_path: Path, kept: float) -> None:
    """Catches a traceback of pyarrow."""
    path = write(tmp_path / "a.parquet", ["some text"] * 1000)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=r"a.parquet: reading parquet failed: .*truncated, damaged"):
        list(parquet_rows(path, ("text",)))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError for a user of the lean installation."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'megads\[parquet\]'"):
        list(parquet_rows(tmp_path / "a.parquet", ("text",)))
