"""Looking into datasets: text, lengths, and damage of every kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megads.cli.main import run
from megads.data.config import PreprocessConfig, TokenizerConfig
from megads.data.examined import check, length_statistics
from megads.data.indexed import IndexedDatasetWriter
from megads.data.preprocess import preprocess
from megads.data.tokenizer import train_tokenizer
from megads.errors import DataError

TEXTS = ["first", "naïve 🚀 text", "x" * 300, "last"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "a.jsonl")], output=tokenizer, vocab_size=257))
    preprocess(
        PreprocessConfig(input=[str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=str(tmp_path / "corpus"))
    )
    return tmp_path / "corpus"


def test_every_flipped_byte_is_found(prefix: Path) -> None:
    """Catches damage that a check of lengths and ids alone passes over."""
    assert check(str(prefix)).checksums_held
    for ending in (".bin", ".idx"):
        path = Path(f"{prefix}{ending}")
        sound = path.read_bytes()
        for position in range(0, len(sound), 7):
            damaged = bytearray(sound)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{prefix}\.(bin|idx): "):
                check(str(prefix))
        path.write_bytes(sound)
    assert check(str(prefix)).documents == len(TEXTS)


def test_a_foreign_id_is_named_with_its_place(prefix: Path) -> None:
    """Catches a message from which nobody finds the document."""
    tokens = np.fromfile(f"{prefix}.bin", "<u2")
    tokens[8] = 300
    tokens.tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match=r"byte 16: token 300 of document 1, at 2, is none of the tokenizer's 257"):
        check(str(prefix))


def test_lengths_are_counted(tmp_path: Path) -> None:
    """Catches buckets that are off by one at powers of two, and percentiles of the wrong end."""
    lengths = [0, 1, 2, 3, 4, 7, 8, 1023, 1024]
    with IndexedDatasetWriter(tmp_path / "a", "<u2") as writer:
        for length in lengths:
            writer.append([1] * length)
    counted = length_statistics(str(tmp_path / "a"))
    assert counted.histogram[:13].tolist() == [1, 1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 1, 0]
    assert (counted.shortest, counted.longest, counted.percentiles[50]) == (0, 1024, 4)
    assert (counted.documents, counted.tokens) == (len(lengths), sum(lengths))


def test_the_verb(prefix: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an action that the command line does not reach, or that says nothing."""
    monkeypatch.chdir(prefix.parent)
    assert run(["dataset", "inspect", "input=corpus", "first=1", "count=2", "max_characters=40"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "=== document 1: 17 tokens", "naïve 🚀 text<|endoftext|>", "=== document 2: 301 tokens", "x" * 40 + " ...",
    ]  # fmt: skip
    assert run(["dataset", "stats", "input=[corpus]", "output=lengths.png"]) == 0
    said = capsys.readouterr().out
    assert "4 documents, 329 tokens" in said and re.search(r"256 to 511 +1 +█", said)
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")
    assert run(["dataset", "split", "input=corpus", "output=corpus", "parts={first: 3, second: 1}"]) == 0
    assert run(["dataset", "merge", "input=[corpus-second, corpus-first]", "output=turned"]) == 0
    assert run(["dataset", "check", "input=[corpus, turned, corpus-first]"]) == 0
    assert "turned: sound: 4 documents, 329 tokens" in capsys.readouterr().out
    assert run(["dataset", "split", "input=corpus", "output=corpus", "parts={first: 3, second: 1}"]) == 2
    assert "corpus-first.bin exists" in capsys.readouterr().err
