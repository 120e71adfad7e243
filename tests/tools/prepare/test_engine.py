"""Both tokenization engines on the same texts; gigatoken where it is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from megads.data.indexed.sidecar import load_tokenizer
from megads.data.tokenizer_config import Engine
from megads.errors import ConfigError
from megads.tools.prepare import tokenizer as engine_module
from megads.tools.prepare.block_tokenizer import BlockTokenizer, TokenizeSettings, open_shard, shard_path
from megads.tools.prepare.blocks import Lines
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import (
    EngineMismatch,
    FastEngine,
    HuggingFaceEngine,
    added_token_texts,
    choose_engine,
    train_tokenizer,
)

INSTALLED = importlib.util.find_spec("gigatoken") is not None
needs_gigatoken = pytest.mark.skipif(not INSTALLED, reason="gigatoken is not installed")
PIECES = [
    "  ", "\n", "\t", "\r\n", "é", "漢", "🚀", "a", "B", "1", "23", "'s", "'LL", " the", "\u00a0", "\u200b", "\x00",
    "\u017f", "İ", "\u0301", "<|endoftext|>", ".", "...", "under_score", "CamelCase",
]  # fmt: skip


NEWER = range(0x16EA0, 0x16ED4)
"""Beria Erfe, of Unicode 17."""


def hard_texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(PIECES[i] for i in random.integers(0, len(PIECES), random.integers(1, 80))) for _ in range(count)]


def tokenizer_of(folder: Path, vocab_size: int) -> str:
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in hard_texts(300)))
    output = str(folder / f"{vocab_size}.json")
    train_tokenizer(TokenizerConfig(input=[str(source)], output=output, vocab_size=vocab_size))
    return output


@needs_gigatoken
def test_the_fast_engine_gives_the_same_dataset(tmp_path: Path) -> None:
    """Catches other ids, text that is encoded as an end-of-document token, and a fast engine that is never used."""
    tokenizer = tokenizer_of(tmp_path, 600)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in hard_texts(3000)))
    made = {}
    for name in (Engine.hf, Engine.fast, Engine.auto):
        report = preprocess(
            PreprocessConfig(
                input=[str(tmp_path / "a.jsonl")], tokenizer=tokenizer, output=str(tmp_path / name.value), engine=name
            )
        )
        made[name] = Path(f"{tmp_path / name.value}.bin").read_bytes()
        assert report.engine == ("hf" if name is Engine.hf else "fast")
    assert made[Engine.hf] == made[Engine.fast] == made[Engine.auto]


@needs_gigatoken
def test_letters_of_a_newer_unicode_get_the_references_ids(tmp_path: Path) -> None:
    """Catches wrong ids for a letter that only one engine's Unicode tables have, and that samples may not contain."""
    source = tmp_path / "source.jsonl"
    letters = [chr(code) for code in NEWER]
    # Next to punctuation, so that the tokenizer learns tokens that would be split at a letter.
    source.write_text("".join(json.dumps({"text": f"!{letter}!{letter}! " * 3}) + "\n" for letter in letters))
    tokenizer = str(tmp_path / "newer.json")
    train_tokenizer(TokenizerConfig(input=[str(source)], output=tokenizer, vocab_size=600))
    reference = HuggingFaceEngine(load_tokenizer(tokenizer))
    texts = ["the", "é", *(f"a!{letter}!{letter} b{letter}" for letter in letters), "end"]
    flat, lengths = FastEngine(tokenizer, reference).encode_unchecked(texts)
    right, right_lengths = reference.encode(texts)
    assert lengths == right_lengths and np.array_equal(flat, right)


@needs_gigatoken
def test_an_engine_with_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches wrong ids in a dataset, from an engine with another vocabulary than the reference's."""
    right, wrong = tokenizer_of(tmp_path, 600), tokenizer_of(tmp_path, 300)
    reference = HuggingFaceEngine(load_tokenizer(right))
    with pytest.raises(EngineMismatch):
        FastEngine(wrong, reference).require_equal(hard_texts(50))
    assert choose_engine(Engine.auto, wrong, load_tokenizer(right), hard_texts(50)) is Engine.hf
    with pytest.raises(ConfigError, match="engine = fast: it gives other ids"):
        choose_engine(Engine.fast, wrong, load_tokenizer(right), hard_texts(50))
    monkeypatch.setattr(engine_module, "RECHECK_EVERY", 20)
    block = Lines("a.jsonl", (tmp_path / "source.jsonl").read_bytes(), True, 0)
    digest = hashlib.sha256(Path(right).read_bytes()).hexdigest()
    sizes = []
    for number, name in enumerate(("hf", "fast")):
        made = BlockTokenizer(TokenizeSettings(right, digest, ("text",), 0, "<u2", name), tmp_path)
        if name == "fast":
            made._engine = FastEngine(wrong, reference)
        assert made(number, block).restarted == (name == "fast")
        sizes.append(open_shard(shard_path(tmp_path, number)).header.checksum)
    assert sizes[0] == sizes[1]


def with_added(path: str, *tokens: AddedToken) -> str:
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save(path)
    return path


@needs_gigatoken
def test_added_tokens_that_are_not_special_are_tokens_in_a_text(tmp_path: Path) -> None:
    """Catches a fast engine that encodes added tokens (<think> and runs of spaces, as in Qwen and GPT-NeoX) as plain
    text, or the texts of special tokens as special tokens."""
    runs = [AddedToken(" " * count, normalized=True) for count in range(2, 25)]
    path = with_added(tokenizer_of(tmp_path, 600), AddedToken("<think>"), AddedToken("strip", lstrip=True), *runs)
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = True
    reference = HuggingFaceEngine(tokenizer)
    fast = FastEngine(path, reference)
    texts = [text.replace("B", "<think>").replace("1", "   ") for text in hard_texts(2000)]
    fast.require_equal(texts)
    assert tokenizer.token_to_id("<think>") in fast.encode(texts)[0]
    assert choose_engine(Engine.auto, path, tokenizer, ["nothing of the kind"]) is Engine.fast


@needs_gigatoken
def test_special_tokens_in_a_text_are_tokens_where_they_are_parsed(tmp_path: Path) -> None:
    """Catches a fast engine that ignores special tokens in texts from a chat template."""
    path = with_added(tokenizer_of(tmp_path, 600), AddedToken("<|im_end|>", special=True), AddedToken("<think>"))
    tokenizer = load_tokenizer(path)
    texts = [text.replace("B", "<|im_end|>").replace("1", "<think>") for text in hard_texts(2000)]
    fast = FastEngine(path, HuggingFaceEngine(tokenizer))
    fast.require_equal(texts)
    assert {0, tokenizer.token_to_id("<|im_end|>")} <= set(fast.encode(texts)[0].tolist())
    assert choose_engine(Engine.auto, path, tokenizer, ["nothing of the kind"]) is Engine.fast


@needs_gigatoken
def test_an_added_token_missing_from_the_sample_is_still_compared(tmp_path: Path) -> None:
    """Catches a fast engine that is chosen because no sampled text has the token that it encodes wrongly."""
    path = with_added(tokenizer_of(tmp_path, 600), AddedToken("word", single_word=True))
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = True
    assert choose_engine(Engine.auto, path, tokenizer, ["nothing of the kind"]) is Engine.hf
    with pytest.raises(ConfigError, match=r"engine = fast: it does not support this tokenizer .*within words.*'word'"):
        choose_engine(Engine.fast, path, tokenizer, ["nothing of the kind"])
    assert any("aword" in text for text in added_token_texts(path))
    content = json.loads(Path(path).read_text())
    content["added_tokens"][-1]["single_word"] = False
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    assert choose_engine(Engine.auto, str(other), tokenizer, ["nothing of the kind"]) is Engine.hf


def test_without_the_package_auto_continues_and_fast_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an optional package that is required after all, and a traceback if it is missing."""
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = tokenizer_of(tmp_path, 300)
    config = PreprocessConfig(
        input=[str(tmp_path / "source.jsonl")], tokenizer=tokenizer, output=str(tmp_path / "a"), engine=Engine.fast
    )
    with pytest.raises(ConfigError, match=r"engine = fast: it needs gigatoken .* pip install 'megads\[fast\]'"):
        preprocess(config)
    config.engine = Engine.auto
    assert preprocess(config).engine == "hf"
