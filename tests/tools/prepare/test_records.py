"""Long texts in JSON lines and parquet: the same text, errors and tokens as for short ones, in less memory."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megads.errors import ConfigError, DataError
from megads.tools.prepare import records
from megads.tools.prepare import text as text_module
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.records import Fields, LongText, NoDocument, Text, json_turns, parquet_rows
from megads.tools.prepare.tokenizer import train_tokenizer

pa = pytest.importorskip("pyarrow", reason="needs megads[parquet]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs megads[parquet]")


def make_long(patch: pytest.MonkeyPatch, long_bytes: int) -> None:
    """Sets the size from which texts are long, and stretches so short that they end within characters and escapes."""
    patch.setattr(records, "LONG_BYTES", long_bytes)
    patch.setattr(records, "_STRETCH_BYTES", 13)


def whole(texts: tuple[Text, ...] | NoDocument) -> tuple[str, ...] | NoDocument:
    if isinstance(texts, NoDocument):
        return texts
    return tuple(text if isinstance(text, str) else "".join(text.stretches()) for text in texts)


def turns_of(line: bytes, fields: Fields, long_bytes: int) -> list[tuple[str, ...] | NoDocument]:
    with pytest.MonkeyPatch.context() as patch:
        make_long(patch, long_bytes)
        return [whole(texts) for texts in json_turns(line, fields)]


hard_parts = ["\\", '"', "\n", "漢", "🚀", "a", "\ufeff", "\x7f", "/", " ", "\ud83d", "\ude00", "u00e9", "\x00"]
hard_text = st.lists(st.sampled_from(hard_parts), max_size=60).map("".join)
json_records = st.dictionaries(st.sampled_from(["text", "more", "id"]), st.one_of(hard_text, st.integers(), st.none()))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Up to two records as JSON, with byte order marks before and between them; half of the lines are damaged."""
    parts = [
        json.dumps(record, ensure_ascii=draw(st.booleans())) for record in draw(st.lists(json_records, max_size=2))
    ]
    mark = draw(st.sampled_from(["", "\ufeff"]))
    line = bytearray((mark + mark.join(parts)).encode(errors="surrogatepass"))
    if line and draw(st.booleans()):
        place = draw(st.integers(0, len(line) - 1))
        if draw(st.booleans()):
            del line[place:]
        else:
            line[place : place + 1] = draw(st.sampled_from([b"\\", b'"', b"\xff", b"\x01", b"", b"\\ud800", b"\\u12"]))
    return bytes(line)


@given(lines(), st.sampled_from([("text",), ("more", "text")]))
@example(b'{"text": "' + b"\\\\" * 50 + b'"}', ("text",))
@example(b'{"text": "' + b"\\ud83d\\ude80" * 9 + b'"}', ("text",))
@example(b'{"text": "' + b"\\ud83d" * 9 + b'"}', ("text",))
@example(b'{"text": "first, which a second one hides", "text": "the second of the two"}', ("text",))
def test_long_texts_are_decoded_like_short_ones(line: bytes, fields: Fields) -> None:
    """Catches text that is wrong where a stretch ends within a character, an escape or a surrogate pair, a quote taken
    for the end of a text, and an error that is missed, or reported at another place or for another reason."""
    assert turns_of(line, fields, 10) == turns_of(line, fields, 10**9)


def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a code path for long texts that is never taken."""
    make_long(monkeypatch, 10)
    [texts] = json_turns(b'{"id": 1, "more": "short", "text": "long \\u00e9nough"}', ("more", "text"))
    assert isinstance(texts, tuple) and texts[0] == "short" and isinstance(texts[1], LongText)


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", KINDS)
def test_long_parquet_texts_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType) -> None:
    """Catches rows lost or shifted by wrong offsets or by nulls, and an invalid byte that is trained on."""
    texts = ["long " + "é漢🚀" * 20, None, "", "short", "\ufefflong " + "x" * 99, None]
    table = pa.table({"text": pa.array(texts, pa.string()).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    column = pa.array([b"good", b"long " * 9 + b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "bad.parquet")

    def read(name: str) -> list[tuple[str, ...] | NoDocument]:
        return [whole(found) for _, found in parquet_rows(tmp_path / name, ("text",))]

    expected = [read("a.parquet"), read("bad.parquet")]
    assert expected[0] == [(text,) if text else NoDocument("null" if text is None else "empty text") for text in texts]
    make_long(monkeypatch, 10)
    assert [read("a.parquet"), read("bad.parquet")] == expected
    assert isinstance(next(parquet_rows(tmp_path / "a.parquet", ("text",)))[1][0], LongText)


def test_long_texts_give_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches different tokens where a long text is cut, an end of document within it, and prompt/response pairs that
    are split between two parts."""
    draw = random.Random(0)
    words = ["word ", "don't", " 12", "é漢", "🚀", "...", " \n", "\n\n", "\t"]
    records = [{"prompt": "".join(draw.choices(words, k=k)), "text": "".join(draw.choices(words, k=k + 3)),
                "more": "".join(draw.choices(words, k=k // 3))} for k in (5, 2000, 30, 900, 0)]  # fmt: skip
    content = "".join(json.dumps(record, ensure_ascii=number % 2 == 0) + "\n" for number, record in enumerate(records))
    (tmp_path / "a.jsonl").write_text(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "a.jsonl")], output=tokenizer, vocab_size=400))

    def made(name: str, prompt: str | None, more: str | None = None) -> list[bytes]:
        given_inputs = [str(tmp_path / pattern) for pattern in ("a.jsonl", "*.gz", "*.parquet")]
        config = PreprocessConfig(input=given_inputs, tokenizer=tokenizer, output=str(tmp_path / name), workers=1)
        if prompt is not None:
            config.prompt_field, config.input_field, config.response_field = prompt, more, "text"
        preprocess(config)
        return [(tmp_path / f"{name}.{ending}").read_bytes() for ending in ("bin", "idx")]

    expected = [made("whole", None), made("pairs", "prompt"), made("inputs", "prompt", "more")]
    make_long(monkeypatch, 500)
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(text_module, "REACH", 40)
    monkeypatch.setattr("megads.tools.prepare.blocks.LARGEST_FED_BYTES", 300)
    assert [made("long", None), made("long_pairs", "prompt"), made("long_inputs", "prompt", "more")] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "megabytes"), [("jsonl", 90), ("parquet", 140)])
def test_reading_takes_little_more_memory_than_the_record(tmp_path: Path, ending: str, megabytes: int) -> None:
    """Catches a record held in memory as one str, eight times its size. Arrow's own memory for a row of parquet, three
    to six times its size, is not counted."""
    text = "a text of many words 🚀\n" * 1_500_000
    assert len(text.encode()) == 39_000_000
    if ending == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    else:
        pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    # Not getrusage: its peak is that of the parent process, if that was larger.
    program = """
import sys
from pathlib import Path
import pyarrow
import pyarrow.parquet
from megads.tools.prepare.blocks import blocks_of
from megads.tools.prepare.text import DocumentReader

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

reader = DocumentReader(sys.argv[1:], ("text",))
before, characters = peak(), 0
for block in blocks_of(reader, 1 << 25):
    loaded = block.load()
    loaded.digest()
    characters += sum(len(row.text) for row in loaded.rows(("text",)))
print(peak() - before - pyarrow.default_memory_pool().max_memory() // 1024, characters)
"""
    command = [sys.executable, "-c", program, str(tmp_path / f"a.{ending}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kilobytes, characters = map(int, done.stdout.split())
    assert characters == len(text)
    # Pieces of parquet rows wait in two blocks of 8 million characters, four bytes each here.
    assert kilobytes < megabytes * 1000, done.stdout


TEXTS = ["one", "two é", None, "", "\x00 fünf"]


def write(path: Path, texts: object, kind: object = None, row_group_size: int = 2) -> Path:
    column = pa.array(texts, kind) if kind is not None else pa.array(texts)
    pq.write_table(pa.table({"text": column, "id": list(range(len(column)))}), path, row_group_size=row_group_size)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_texts_are_in_order_over_row_groups(tmp_path: Path, kind: str) -> None:
    """Catches rows lost between row groups, a null that becomes the text 'None', and an unsupported string type."""
    kinds = {"string": pa.string(), "large_string": pa.large_string()}
    column = pa.array(TEXTS).dictionary_encode() if kind == "dictionary" else pa.array(TEXTS, kinds[kind])
    path = write(tmp_path / "a.parquet", column)
    rows = list(parquet_rows(path, ("text",)))
    texts = [text if isinstance(text, tuple) else str(text) for _, text in rows]
    assert texts == [("one",), ("two é",), "null", "empty text", ("\x00 fünf",)]
    assert [isinstance(text, NoDocument) for _, text in rows] == [False, False, True, True, False]
    assert [share for share, _ in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_rows_with_invalid_bytes_are_skipped(tmp_path: Path) -> None:
    """Catches one bad row that ends hours of preprocessing."""
    column = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    rows = [text for _, text in parquet_rows(write(tmp_path / "a.parquet", column), ("text",))]
    assert rows[0] == ("good",) and isinstance(rows[1], NoDocument) and str(rows[1]) == "not UTF-8"


def test_memory_does_not_grow_with_the_row_group(tmp_path: Path) -> None:
    """Catches a row group read whole: its 64 MB of text must not be in memory at once."""
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


def test_a_missing_parquet_column_is_answered_with_the_columns(tmp_path: Path) -> None:
    """Catches an error message that does not list the existing columns."""
    path = write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(DataError, match=r"no column 'body'; it has text, id: .*text_field"):
        list(parquet_rows(path, ("body",)))
    with pytest.raises(DataError, match=r"column 'id' holds int64, not text"):
        list(parquet_rows(path, ("id",)))


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, kept: float) -> None:
    """Catches a pyarrow traceback for a damaged file."""
    path = write(tmp_path / "a.parquet", ["some text"] * 1000)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(DataError, match=r"a.parquet: reading parquet failed: .*truncated, damaged"):
        list(parquet_rows(path, ("text",)))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in an installation without the parquet extra."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'megads\[parquet\]'"):
        list(parquet_rows(tmp_path / "a.parquet", ("text",)))
