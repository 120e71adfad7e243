from __future__ import annotations

import functools
import gzip
import io
import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from megads.data.indexed.dataset import IndexedDataset
from megads.errors import DataError
from megads.tools.prepare import text as text_module
from megads.tools.prepare import text_files
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.text import DocumentReader, TextCutter, text_pieces
from megads.tools.prepare.text_files import text_fault
from megads.tools.prepare.tokenizer import train_tokenizer


def test_every_kind_of_text_file_is_read_in_order(tmp_path: Path) -> None:
    """Catches a file type that is not read, lost line numbers, and an order that depends on the file system."""
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


def test_bad_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    """Catches one bad line among millions that ends hours of preprocessing, or is dropped without a report."""
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
    """Catches a binary file that is read as text because of its name, or rejected without its line number."""
    (tmp_path / "a.txt").write_bytes(b"fine\nnot \xfe fine")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfgood")
    reader = DocumentReader([str(tmp_path / "*.txt")], ("text",))
    assert [document.text for document in reader] == ["good"]
    remedy = "where it is Western European text, encoding=cp1252 or latin-1 reads it"
    assert reader.rejected.examples == [f"{tmp_path}/a.txt: not UTF-8 (byte 0xfe in line 2; {remedy})"]
    assert str(reader.rejected).startswith("1 file rejected: 1 x not UTF-8")


SAID = "Grüße\nund “mehr”"
RECORDS = [{"text": SAID}, {"text": "zwölf"}]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
def test_other_encodings_are_converted_and_reported(tmp_path: Path, encoding: str) -> None:
    """Catches UTF-16 that is rejected as one bad line or read as letters between null characters, in any file type,
    compressed or not; and UTF-8 that is converted, too."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
    table = 'id,text\n1,"Grüße\nund “mehr”"\n2,zwölf\n'
    (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode(encoding)))
    (tmp_path / "c.csv").write_bytes(table.encode(encoding))
    (tmp_path / "d.md").write_bytes(SAID.encode(encoding))
    (tmp_path / "e.md").write_bytes(SAID.encode())
    wanted = "cp1252" if encoding == "cp1252" else "auto"
    reader = DocumentReader([str(tmp_path / "*.*"), str(tmp_path / "c.csv")], ("text",), encoding=wanted)
    texts = [document.text for document in reader]
    assert texts == [SAID, "zwölf", SAID, "zwölf", SAID, SAID, SAID, "zwölf"]
    found = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
    assert reader.converted == {str(tmp_path / name): found for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "d.md")}
    assert reader.rejected.count == 0 and reader.bytes_read == reader.total_bytes


def test_a_file_that_is_not_in_its_encoding_is_rejected_whole(tmp_path: Path) -> None:
    """Catches a file that is converted in part, and a remedy that does not name the config key."""
    (tmp_path / "a.txt").write_bytes("fine".encode("utf-16") + b"\x00")
    (tmp_path / "b.txt").write_bytes("schön".encode("cp1252"))
    (tmp_path / "c.jsonl").write_bytes('{"text": "fine"}\n'.encode("utf-16") + b"\x00")
    (tmp_path / "d.txt").write_bytes(b"fine")
    reader = DocumentReader([str(tmp_path)], ("text",), "data.raw")
    assert [document.text for document in reader] == ["fine"]
    assert reader.rejected.files == 3 and reader.converted == {}
    assert "a.txt: not utf-16-le (byte 0x00 in line 1; name another data.encoding)" in reader.rejected.examples[0]
    assert "data.encoding=cp1252 or latin-1 reads it" in reader.rejected.examples[1]


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [("a.csv", "id,text", "1,{}"), ("a.tsv", "id\ttext", "1\t{}"), ("a.csv", "text;id", "{};1")],
)
def test_tables_are_read_by_their_column(tmp_path: Path, name: str, header: str, row: str) -> None:
    """Catches a table read as one text with all its numbers, cells cut at quoted newlines, and rows lost next to a
    bad one."""
    rows = [row.format(cell) for cell in ('"one, ""two""\nthree"', "four", '"bad"cell', "", "six")]
    (tmp_path / name).write_text("\ufeff" + "\n".join([header, *rows[:3], "", "7", *rows[3:]]) + "\n")
    reader = DocumentReader([str(tmp_path / name)], ("text",))
    found = [(document.text, document.line) for document in reader]
    assert found[:2] == [('one, "two"\nthree', 3), ("four", 4)] and found[-1] == ("six", 9)
    reasons = {"not CSV": 1, "empty text": 1, "too few cells": 1}
    if header.startswith("text"):
        reasons = {"not CSV": 1, "empty text": 1}
    assert reader.rejected.reasons == reasons
    assert reader.rejected.examples[0].startswith(f"{tmp_path / name}:5: not CSV (")


def test_a_csv_cell_may_be_longer_than_131072_characters(tmp_path: Path) -> None:
    """Catches the csv module's limit of 131,072 characters per cell."""
    (tmp_path / "a.csv").write_text(f"text\n{'x' * 200_000}\n")
    assert [len(document.text) for document in DocumentReader([str(tmp_path / "a.csv")], ("text",))] == [200_000]


@pytest.mark.parametrize(("key", "remedy"), [("data.raw", "data.text_field"), ("input", " text_field")])
def test_a_missing_column_is_answered_with_the_config_key(tmp_path: Path, key: str, remedy: str) -> None:
    """Catches a remedy that names another command's config key, or none."""
    (tmp_path / "a.csv").write_text("id,body\n1,x\n")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text('{"body": "x"}')
    for name in ("a.csv", "b.parquet", "c.jsonl"):
        with pytest.raises(DataError, match=rf"{name}: .*{remedy}"):
            list(DocumentReader([str(tmp_path / name)], ("text",), key))
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(DataError, match=r"empty text"):
        list(DocumentReader([str(tmp_path / "a.csv")], ("text",), key))


def test_joined_files_keep_every_record(tmp_path: Path) -> None:
    """Catches records lost to a byte order mark inside a file, as `cat` of several files leaves it."""
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


def test_text_is_read_from_the_field_that_is_named(tmp_path: Path) -> None:
    """Catches a text_field that is ignored."""
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "no", "content": "yes"}))
    assert [document.text for document in DocumentReader([str(tmp_path / "d.jsonl")], ("content",))] == ["yes"]


def test_no_documents_at_all_is_fatal(tmp_path: Path) -> None:
    """Catches a wrong text_field that produces an empty dataset; the message must show the field and a line."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"content": "x"}\n')
    with pytest.raises(
        DataError, match=f"no documents, 1 line rejected: 1 x no field 'text'; first: {path}:1.*text_field"
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


def messy_text(length: int) -> str:
    """Words and numbers with all kinds of whitespace between them."""
    draw = random.Random(0)
    words = ["word", "don't", "12", "é漢", "🚀", "..."]
    spaces = [" ", "  ", "\n", "\n\n", " \n", "\n ", "\t\n  \n", "\r\n", "\u2028"]
    return "".join(draw.choices(words + spaces, k=length))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(text_module, "REACH", 40)
    # A prime number, so that blocks end inside characters.
    monkeypatch.setattr(text_module, "_READ_BYTES", 17)
    monkeypatch.setattr(text_files, "_READ_BYTES", 17)


@pytest.mark.parametrize("text", ["", "short", messy_text(2000), "x" * 999, "\n" * 999, "\ufeffmarked", "\nx" * 299])
def test_pieces_of_a_text_join_to_the_text(small_pieces: None, text: str) -> None:
    """Catches characters lost or duplicated at a cut or at the end of a block."""
    pieces = list(text_pieces(io.BytesIO(text.encode())))
    assert "".join(pieces) == text.removeprefix("\ufeff")
    assert all(pieces)
    assert len(text) < 200 or len(pieces) > 1


@pytest.mark.parametrize("without", ["", "\n"])
def test_pieces_of_a_text_tokenize_like_the_whole(small_pieces: None, tmp_path: Path, without: str) -> None:
    """Catches tokens that depend on where a text is cut into pieces, and an end of document inside a document."""
    text = messy_text(5000).replace(without or "nothing", " ")
    (tmp_path / "whole.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "last"}))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"last")
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "whole.jsonl")], output=tokenizer, vocab_size=400))
    for name, pattern in (("whole", "whole.jsonl"), ("pieces", "*.txt")):
        preprocess(PreprocessConfig(input=[str(tmp_path / pattern)], tokenizer=tokenizer, output=str(tmp_path / name)))
    assert (tmp_path / "pieces.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert (tmp_path / "pieces.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()
    assert IndexedDataset(tmp_path / "pieces").num_documents == 2


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", None),
        ("é漢🚀\n".encode() * 99, None),
        (b"one\ntwo\n\xff", (3, 0xFF)),
        (b"one\n" * 50 + b"\xc3", (51, 0xC3)),
        ("漢".encode() * 40 + b"\n\n\xe6\xbc\n", (3, 0xE6)),
    ],
)
def test_a_bad_byte_is_found_with_its_line(small_pieces: None, content: bytes, fault: tuple[int, int] | None) -> None:
    """Catches a character split between two blocks that is reported as invalid, and a line counted from the block."""
    assert text_fault(io.BytesIO(content)) == fault


WORDS = [
    "word", "Don't", "it'LL", "x_y", "é", "e\u0301", "漢字", "ไทย", "🚀👩‍👩", "½", "İ", "،", "。", "...", "!?", "(a)",
    "|", "<end>", "<pad>", "7", "42", "123456", "\u0660\u0661", "/*", "**", "\u200b", "\ufeff", "\x00",
]  # fmt: skip
SPACES = [" ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", ""]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001


def byte_level(pattern: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def spaces_of_neox() -> Tokenizer:
    tokenizer = byte_level(None)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_metaspace(model: models.Model, scheme: str, *before: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    return tokenizer


def without_pre_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(None),
    "bloom": lambda: byte_level(BLOOM),
    "llama 3": lambda: byte_level(LLAMA_3),
    "neox": spaces_of_neox,
    "unigram": lambda: with_metaspace(models.Unigram(), "always"),
    "unigram of words": lambda: with_metaspace(models.Unigram(), "always", pre_tokenizers.WhitespaceSplit()),
    "metaspace first": lambda: with_metaspace(models.BPE(), "first"),
    "no pre-tokenizer": without_pre_tokenizer,
}

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from(SPACES),
        st.tuples(st.sampled_from([*SPACES, "7", "a", ".", "漢"]), st.integers(2, 90)).map(lambda run: run[0] * run[1]),
    ),
    min_size=100,
    max_size=250,
).map("".join)


@functools.cache
def trained(name: str) -> Tokenizer:
    """A tokenizer with merges across everything that its pre-tokenizer does not split."""
    tokenizer = MAKERS[name]()
    words = [f"{space}{word}" for space in SPACES for word in WORDS]
    corpus = ["".join(words), " ".join(WORDS), *(run * 40 for run in (" ", "\n", "7", "a", ".", "漢", "\n "))] * 3
    if name.startswith("unigram"):
        trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>")
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True)])
    if name == "neox":
        tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 25)])
    return tokenizer


def check_pieces(name: str, text: str, parse: bool) -> int:
    tokenizer = trained(name)
    tokenizer.encode_special_tokens = not parse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_CHARACTERS", 150)
        patch.setattr(text_module, "REACH", 100)
        pieces = list(TextCutter(tokenizer).pieces(text))
    assert "".join(pieces) == text
    ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert list(chain.from_iterable(ids)) == tokenizer.encode(text, add_special_tokens=False).ids
    return len(pieces)


@pytest.mark.quick("bloom", "llama 3", "unigram", "metaspace first")
@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, parse=st.booleans())
def test_texts_are_cut_only_where_tokenization_allows(name: str, text: str, parse: bool) -> None:
    """Catches a cut inside what a tokenizer treats as a unit: groups of digits or spaces, added tokens and the
    whitespace that they strip; and a prefix of the text that is added to each of its pieces."""
    check_pieces(name, text, parse)


@pytest.mark.parametrize("name", MAKERS)
def test_ordinary_text_is_cut_within_bounded_memory(name: str) -> None:
    """Catches a search that finds no cut although there are many, so that memory grows with a document; and one that
    cuts where it must not."""
    text = "A line of ordinary words, 12345 of them.\nAnd another one,  with more.\n\n" * 40
    pieces = check_pieces(name, text, parse=False)
    assert pieces == 1 if name == "no pre-tokenizer" else pieces > 12
