"""What is rejected is said, counted and limited: no text is cut or swallowed without a message."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megads.errors import ConfigError, DataError
from megads.tools.prepare.blocks import blocks_of
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.text import DocumentReader
from megads.tools.prepare.tokenizer import train_tokenizer

RECORDS = [json.dumps({"text": f"the river and a small boat {number}"}) for number in range(80)]


def read(path: Path) -> tuple[list[str], dict[str, int], list[str]]:
    """The texts of a file, its rejections by reason, and their examples without the path."""
    reader = DocumentReader([str(path)], ("text",))
    texts = [document.text for document in reader]
    return texts, dict(reader.rejected.reasons), [text.removeprefix(str(path)) for text in reader.rejected.examples]


def test_a_row_with_more_cells_than_the_header_is_rejected(tmp_path: Path) -> None:
    """Catches a text that is cut at its first comma outside of quotes, without a message."""
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,a small boat, went down\n2,"a small boat, went down"\n3,boat\n')
    texts, reasons, examples = read(path)
    assert texts == ["a small boat, went down", "boat"] and reasons == {"too many cells": 1}
    assert examples == [":2: too many cells (3, the header has 2: quote text that holds delimiters)"]


@pytest.mark.parametrize("later", ["", '40,"closed, and more"\n', '40,"another one\n41,a\n'])
def test_a_quote_that_is_not_closed_loses_one_record(tmp_path: Path, later: str) -> None:
    """Catches all records after an unclosed quote lost as one line, reported with the number of the last line."""
    path = tmp_path / "a.csv"
    rows = "".join(f"{number},text {number}\n" for number in range(30))
    path.write_text(f'id,text\n{rows}30,"never closed\n31,text 31\n{later}42,"two\nlines"\n43,text 43\n')
    texts, reasons, examples = read(path)
    closed = {"": [], '40,"closed, and more"\n': ["closed, and more"]}.get(later, ["a"])
    assert texts == [*(f"text {number}" for number in range(30)), "text 31", *closed, "two\nlines", "text 43"]
    assert reasons == {"unclosed quote": 1 + ("another" in later)}
    assert examples[0] == ":32: unclosed quote (close it, or leave the quotes out)"


def test_unclosed_quotes_take_no_quadratic_time(tmp_path: Path) -> None:
    """Catches a file read again to its end for every unclosed quote; a test of this size would take hours."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n" + '1,"open\n' * 200_000)
    texts, reasons, _ = read_or_nothing(path)
    assert not texts and reasons["unclosed quote"] == 200_000


def read_or_nothing(path: Path) -> tuple[list[str], dict[str, int], list[str]]:
    reader = DocumentReader([str(path)], ("text",))
    rows = list(reader.read(path))
    reasons: dict[str, int] = {}
    for row in rows:
        why = getattr(row, "why", SimpleNamespace(reason="read"))
        reasons[why.reason] = reasons.get(why.reason, 0) + 1
    return [row.text for row in rows if hasattr(row, "text")], reasons, []


@pytest.mark.parametrize(
    ("header", "end"),
    [
        ('"id\n(number)",text', "\n"),
        ('"id\r\n(number)",text', "\r\n"),
        ('"id ""x""\n\n",text', "\n"),
        ('5",text', "\n"),
    ],
)
def test_a_quoted_header_cell_may_contain_a_line_end(tmp_path: Path, header: str, end: str) -> None:
    """Catches a header that is read up to its first line end, also within quotes, as Excel writes it."""
    path = tmp_path / "a.csv"
    path.write_bytes(f'{header}{end}1,hello there{end}2,"more"{end}'.encode())
    assert read(path)[0] == ["hello there", "more"]


@pytest.mark.parametrize("column", ["binary", "large_binary", "null"])
def test_parquet_rows_without_text_are_rejected(tmp_path: Path, column: str) -> None:
    """Catches a corpus that ends with one shard whose texts are bytes, or whose column has nulls only."""
    values = [None] * 3 if column == "null" else ["älter".encode(), b"\xff", None]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(values, getattr(pa, column)())}), path)
    pq.write_table(pa.table({"text": ["good"]}), tmp_path / "b.parquet")
    reader = DocumentReader([str(tmp_path)], ("text",))
    assert [document.text for document in reader] == (["good"] if column == "null" else ["älter", "good"])
    assert dict(reader.rejected.reasons) == ({"null": 3} if column == "null" else {"not UTF-8": 1, "null": 1})


DOCUMENTS = {
    "lines with commas": ("[\n" + ",\n".join(RECORDS) + "\n]\n", "one JSON array"),
    "one line": (f"[{', '.join(RECORDS)}]", "one JSON array"),
    "indented": (json.dumps([json.loads(record) for record in RECORDS], indent=2), "one JSON array"),
    "one object": (json.dumps({"data": [1], "text": "x"}, indent=2), "indented JSON"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_json_that_is_not_jsonl_is_named_as_such(tmp_path: Path, name: str) -> None:
    """Catches an array of records of which the last one is kept, exit code 0, and one called "not JSON"."""
    content, what = DOCUMENTS[name]
    path = tmp_path / "a.jsonl"
    for mark in ("", "\ufeff"):
        path.write_text(mark + content)
        with pytest.raises(DataError, match=rf"a.jsonl: is {what}, .*jq -c '\.") as caught:
            list(DocumentReader([str(path)], ("text",)))
        with pytest.raises(DataError, match=what):
            list(blocks_of(DocumentReader([str(path)], ("text",)), 100))
    assert caught.value.exit_code == 3


def test_jsonl_whose_first_line_starts_like_an_array_is_read(tmp_path: Path) -> None:
    """Catches a good file refused for its first line."""
    path = tmp_path / "a.jsonl"
    path.write_text("[INFO] begin\n[1, 2]\n" + "\n".join(RECORDS))
    assert len(read(path)[0]) == 80


def test_too_many_rejected_records_are_an_error(tmp_path: Path) -> None:
    """Catches a dataset of 1% of the records with exit code 0; the message says the share and the commonest reasons."""
    path = tmp_path / "a.jsonl"
    bad = ["{"] * 30 + ['{"txt": "x"}'] * 20 + ["[]"] * 10 + ['{"text": 5}'] * 5 + ['{"text": ""}'] * 90
    path.write_text("\n".join(bad + RECORDS))
    tokenizer = str(tmp_path / "t.json")
    said = r"65 of 145 records are rejected \(44.8%\), .*30 x not JSON, 20 x no field 'text', 10 x not a JSON object; "
    with pytest.raises(DataError, match=said + ".*max_rejected=1"):
        train_tokenizer(TokenizerConfig(input=[str(path)], output=tokenizer, vocab_size=257))
    train_tokenizer(TokenizerConfig(input=[str(path)], output=tokenizer, vocab_size=257, max_rejected=0.5))
    config = PreprocessConfig(input=[str(path)], tokenizer=tokenizer, output=str(tmp_path / "d"), workers=1)
    with pytest.raises(DataError, match=said):
        preprocess(config)
    assert not (tmp_path / "d.bin").exists()
    config.max_rejected = 0.5
    made = preprocess(config)
    assert made.sidecar.documents == 80 and made.kept_shards, "the parts of the refused start are kept"
    with pytest.raises(ConfigError, match=r"max_rejected = 2: must be a share"):
        preprocess(PreprocessConfig(input=["x"], tokenizer="t", output="o", max_rejected=2))


@pytest.mark.parametrize(("good", "bad", "limit", "refused"), [
    (12, 10, 0.05, False), (9, 10, 0.05, True), (300, 11, 0.05, False), (100, 11, 0.05, True), (300, 1, 0.0, True),
    (300, 0, 0.0, False),
])  # fmt: skip
def test_few_rejected_records_are_accepted(tmp_path: Path, good: int, bad: int, limit: float, refused: bool) -> None:
    """Catches a small corpus refused for one line, and a limit of 0 that accepts some."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * good + "{\n" * bad)
    reader = DocumentReader([str(path)], ("text",), max_rejected=limit)
    if not refused:
        assert len(list(reader)) == good
        return
    with pytest.raises(DataError, match="records are rejected"):
        list(reader)
