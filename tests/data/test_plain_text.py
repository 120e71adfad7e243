from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest

from megads.data import plain_text, text_cuts
from megads.data.config import PreprocessConfig, TokenizerConfig
from megads.data.indexed import IndexedDataset
from megads.data.plain_text import text_pieces, utf8_fault
from megads.data.preprocess import preprocess
from megads.data.tokenizer import train_tokenizer


def messy_text(length: int) -> str:
    """Words, numbers and every mixture of white space between them."""
    draw = random.Random(0)
    words = ["word", "don't", "12", "é漢", "🚀", "..."]
    spaces = [" ", "  ", "\n", "\n\n", " \n", "\n ", "\t\n  \n", "\r\n", "\u2028"]
    return "".join(draw.choices(words + spaces, k=length))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(text_cuts, "REACH", 40)
    # A prime: blocks end inside characters.
    monkeypatch.setattr(plain_text, "_BLOCK_BYTES", 17)


@pytest.mark.parametrize("text", ["", "short", messy_text(2000), "x" * 999, "\n" * 999, "\ufeffmarked", "\nx" * 299])
def test_pieces_join_to_the_text(small_pieces: None, text: str) -> None:
    """Catches characters lost or doubled at a cut or at the end of a block."""
    pieces = list(text_pieces(io.BytesIO(text.encode())))
    assert "".join(pieces) == text.removeprefix("\ufeff")
    assert all(pieces)
    assert len(text) < 200 or len(pieces) > 1


@pytest.mark.parametrize("without", ["", "\n"])
def test_pieces_tokenize_to_the_whole(small_pieces: None, tmp_path: Path, without: str) -> None:
    """Catches a cut that changes tokens, which would change with the size of pieces, and ends inside a document."""
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
    """Catches a character that a block's end divides taken for a bad one, and a line counted from the block."""
    assert utf8_fault(io.BytesIO(content)) == fault
