from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megads.data.text import DocumentReader
from megads.errors import ConfigError, DataError


def test_every_kind_of_file(tmp_path: Path) -> None:
    """Catches a kind that is not read, lost line numbers, and an order that depends on the file system."""
    lines = b'{"text": "one"}\n\n{"text": "two \\u00e9"}\n'
    (tmp_path / "b.jsonl").write_bytes(lines)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.txt").write_bytes("two\nlines é".encode())
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (tmp_path / "e.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "f.md.zst").write_bytes(zstandard.compress(b"# Title"))
    pq.write_table(pa.table({"text": ["row", None]}), tmp_path / "g.parquet")
    reader = DocumentReader([str(tmp_path / "*")], ("text",))
    documents = [(document.text, Path(document.source).name, document.line) for document in reader]
    assert documents == [
        ("one", "a.json.gz", 1), ("two é", "a.json.gz", 3), ("one", "b.jsonl", 1), ("two é", "b.jsonl", 3),
        ("two\nlines é", "c.txt", 1), ("zipped", "d.txt.gz", 1), ("one", "e.jsonl.zst", 1), ("two é", "e.jsonl.zst", 3),
        ("# Title", "f.md.zst", 1), ("row", "g.parquet", 1),
    ]  # fmt: skip
    assert reader.bytes_read == reader.total_bytes
    assert reader.rejected.examples == [f"{tmp_path}/g.parquet:2: null"]


def test_bad_lines_are_reported_and_passed_over(tmp_path: Path) -> None:
    """Catches one bad line among millions ending a run of hours, or vanishing without a trace."""
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut off',
        b'{"other": 1}',
        b'{"text": 5}',
        b"[1]",
        b'{"text": "\xff"}',
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\n".join(lines))
    reader = DocumentReader([str(path)], ("text",))
    assert [(document.text, document.line) for document in reader] == [("good", 1), ("last", 10)]
    assert reader.rejected.count == 8
    reasons = [
        "not JSON", "no field 'text'", "field 'text' is not text", "not a JSON object", "not UTF-8 (byte 0xff)",
        "empty text", "not Unicode", "not JSON",
    ]  # fmt: skip
    for line, (example, reason) in enumerate(zip(reader.rejected.examples, reasons, strict=True), start=2):
        assert example.startswith(f"{path}:{line}: {reason}")
    assert "8 lines rejected: 2 x not JSON" in str(reader.rejected)


def test_bad_plain_text_is_reported_with_its_line(tmp_path: Path) -> None:
    """Catches a binary file with the name of a text."""
    (tmp_path / "a.txt").write_bytes(b"fine\nnot \xfe fine")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfgood")
    reader = DocumentReader([str(tmp_path / "*.txt")], ("text",))
    assert [document.text for document in reader] == ["good"]
    assert reader.rejected.examples == [f"{tmp_path}/a.txt:2: not UTF-8 (byte 0xfe)"]


def test_joined_files_keep_every_record(tmp_path: Path) -> None:
    """Catches a byte order mark in the middle, as `cat` of several files leaves it, that costs a record or two."""
    mark = b"\xef\xbb\xbf"
    parts = [
        mark + b'{"text": "a"}\n', mark + b'{"text": "b"}', mark + b'{"text": "c"} \r\n', mark, mark, b"\n", mark,
        b'{"text": "\xef\xbb\xbfd\xef\xbb\xbf"}' + mark + b' {"text": 5}', mark + b'{"text": "e"}' + mark + b"\n",
        b'{"text": "cut ' + mark + b'{"text": "f"}\n', b'{"text": "g"}',
    ]  # fmt: skip
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b"".join(parts))
    reader = DocumentReader([str(path)], ("text",))
    found = [(document.text, document.line) for document in reader]
    assert found == [("a", 1), ("b", 2), ("c", 2), ("\ufeffd\ufeff", 4), ("e", 4), ("g", 6)]
    [number, broken] = [example.removeprefix(f"{path}:") for example in reader.rejected.examples]
    assert number == "4: field 'text' is not text (int)" and broken.startswith("5: not JSON")


def test_another_field(tmp_path: Path) -> None:
    """Catches a text_field that is ignored."""
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "no", "content": "yes"}))
    assert [document.text for document in DocumentReader([str(tmp_path / "d.jsonl")], ("content",))] == ["yes"]


def test_a_file_matched_twice_is_read_once(tmp_path: Path) -> None:
    """Catches a corpus that is silently doubled by overlapping globs."""
    (tmp_path / "a[1].txt").write_text("x")
    reader = DocumentReader([str(tmp_path / "a[1].txt"), str(tmp_path / "*.txt")], ("text",))
    assert [path.name for path in reader.files] == ["a[1].txt"]


@pytest.mark.parametrize("pattern,message", [("none*.jsonl", "matches no file"), ("d.csv", "unknown kind of file")])
def test_input_that_cannot_be_read_is_refused(tmp_path: Path, pattern: str, message: str) -> None:
    """Catches a typo in one of several patterns that silently shrinks the corpus."""
    (tmp_path / "d.csv").write_text("x")
    (tmp_path / "good.txt").write_text("x")
    with pytest.raises(DataError, match=message) as caught:
        DocumentReader([str(tmp_path / "good.txt"), str(tmp_path / pattern)], ("text",))
    assert caught.value.exit_code == 3


def test_no_patterns_is_a_config_error() -> None:
    """Catches an empty corpus blamed on the data where the config names none."""
    with pytest.raises(ConfigError, match="input is empty"):
        DocumentReader([], ("text",))


def test_no_documents_at_all_is_fatal(tmp_path: Path) -> None:
    """Catches a wrong text_field that makes an empty dataset; the message must show the field and a line."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(
        DataError, match=f"no documents, 1 lines rejected: 1 x no field 'text'; first: {path}:1.*text_field"
    ):
        list(DocumentReader([str(path)], ("text",)))


LINES = b'{"text": "a"}\n' * 9999


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl.gz", gzip.compress(LINES)[:-20]),
        ("d.jsonl.gz", b"not gzip at all"),
        ("d.txt.zst", zstandard.compress(LINES)[:-20]),
        ("d.jsonl.zst", b"not zstandard at all"),
    ],
)
def test_a_damaged_archive_is_fatal(tmp_path: Path, name: str, content: bytes) -> None:
    """Catches a truncated download that silently loses the rest of its documents."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: reading failed after .* leave it out of data.raw"):
        list(DocumentReader([str(tmp_path / name)], ("text",), "data.raw"))
