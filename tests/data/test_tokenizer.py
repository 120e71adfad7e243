from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.data.config import TokenizerConfig
from megads.data.tokenizer import load_tokenizer, train_tokenizer
from megads.errors import ConfigError, DataError

TEXT = "def attention(query, key, value): return softmax(query @ key) @ value\n" * 20


@pytest.fixture
def config(tmp_path: Path) -> TokenizerConfig:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{TEXT} number {i}"}) + "\n" for i in range(50)))
    return TokenizerConfig(input=[str(path)], output=str(tmp_path / "new" / "tokenizer.json"), vocab_size=300)


def test_every_text_survives_encoding(config: TokenizerConfig) -> None:
    """Catches a missing byte in the alphabet, a prefix space, and a decoder that does not invert the encoder."""
    train_tokenizer(config)
    tokenizer = load_tokenizer(config.output)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    for text in ["attention is all", "  two spaces", "naïve 漢字 🚀 \x00\x7f", "".join(map(chr, range(256)))]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert 0 not in ids


def test_training_is_deterministic(config: TokenizerConfig) -> None:
    """Catches ids that depend on a hash seed or on threads: the dataset of the next run would not fit."""
    train_tokenizer(config)
    first = Path(config.output).read_bytes()
    train_tokenizer(config)
    assert Path(config.output).read_bytes() == first
    assert [path.name for path in Path(config.output).parent.iterdir()] == ["tokenizer.json"]


def test_a_vocabulary_without_room_for_bytes_is_refused(config: TokenizerConfig) -> None:
    """Catches texts that cannot be encoded."""
    config.vocab_size = 256
    with pytest.raises(ConfigError, match="vocab_size = 256: must be at least 257"):
        train_tokenizer(config)


def test_a_failure_in_the_input_is_passed_on(config: TokenizerConfig, tmp_path: Path) -> None:
    """Catches the library swallowing our error, or a tokenizer learnt from nothing."""
    (tmp_path / "text.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match="no documents"):
        train_tokenizer(config)
    assert not Path(config.output).exists()


def test_missing_and_corrupt_files(config: TokenizerConfig, tmp_path: Path) -> None:
    """Catches a traceback of the library for a file that is not there, cut off, or something else."""
    with pytest.raises(DataError, match=r"no such tokenizer file; make one with `megads tokenizer"):
        load_tokenizer(config.output)
    train_tokenizer(config)
    content = Path(config.output).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"{}", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(damaged)
        with pytest.raises(DataError, match=r"bad.json: is not a tokenizer file"):
            load_tokenizer(tmp_path / "bad.json")


def test_truncation_and_padding_are_off(config: TokenizerConfig) -> None:
    """Catches a tokenizer file from elsewhere that cuts every document to 4 tokens."""
    train_tokenizer(config)
    tokenizer = load_tokenizer(config.output)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(config.output)
    assert 4 < len(load_tokenizer(config.output).encode("def attention(query, key)").ids) < 50
