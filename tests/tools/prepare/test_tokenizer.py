from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megads.data.indexed.sidecar import load_tokenizer, tokenizing
from megads.errors import ConfigError, DataError
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer

TEXT = "def attention(query, key, value): return softmax(query @ key) @ value\n" * 20


@pytest.fixture
def config(tmp_path: Path) -> TokenizerConfig:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{TEXT} number {i}"}) + "\n" for i in range(50)))
    return TokenizerConfig(input=[str(path)], output=str(tmp_path / "new" / "tokenizer.json"), vocab_size=300)


def test_every_text_survives_encoding(config: TokenizerConfig) -> None:
    """Catches a missing byte in the alphabet, an added prefix space, and a decoder that does not invert the encoder."""
    train_tokenizer(config)
    tokenizer = load_tokenizer(config.output)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    for text in ["attention is all", "  two spaces", "naïve 漢字 🚀 \x00\x7f", "".join(map(chr, range(256)))]:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert 0 not in ids


def test_training_is_deterministic(config: TokenizerConfig) -> None:
    """Catches token ids that depend on a hash seed or on threads: the dataset of the next run would not match."""
    train_tokenizer(config)
    first = Path(config.output).read_bytes()
    train_tokenizer(config)
    assert Path(config.output).read_bytes() == first
    assert [path.name for path in Path(config.output).parent.iterdir()] == ["tokenizer.json"]


def test_a_vocabulary_too_small_for_all_bytes_is_refused(config: TokenizerConfig) -> None:
    """Catches an accepted vocabulary with which some texts cannot be encoded."""
    config.vocab_size = 256
    with pytest.raises(ConfigError, match="vocab_size = 256: must be at least 257"):
        train_tokenizer(config)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 2**31), ("vocab_size", 2**63 - 1), ("min_frequency", -1)])
def test_vocabulary_sizes_that_crash_the_trainer_are_refused(key: str, value: int, config: TokenizerConfig) -> None:
    """Catches an allocation for two billion tokens, a panic of the library, and an OverflowError."""
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=f"{key} = {value}: must be at"):
        train_tokenizer(config)


def test_a_failure_in_the_input_is_passed_on(config: TokenizerConfig, tmp_path: Path) -> None:
    """Catches the library swallowing megads' error, or a tokenizer trained on nothing."""
    (tmp_path / "text.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match="no documents"):
        train_tokenizer(config)
    assert not Path(config.output).exists()


def test_missing_and_corrupt_tokenizer_files_are_refused(config: TokenizerConfig, tmp_path: Path) -> None:
    """Catches a traceback of the library for a file that is missing, truncated, or not a tokenizer."""
    with pytest.raises(DataError, match=r"no such tokenizer file; make one with `megads tokenizer"):
        load_tokenizer(config.output)
    train_tokenizer(config)
    content = Path(config.output).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"{}", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(damaged)
        with pytest.raises(DataError, match=r"bad.json: is not a tokenizer file"):
            load_tokenizer(tmp_path / "bad.json")


def test_a_tokenizers_truncation_and_padding_are_switched_off(config: TokenizerConfig) -> None:
    """Catches a foreign tokenizer file that truncates every document to 4 tokens."""
    train_tokenizer(config)
    tokenizer = load_tokenizer(config.output)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(config.output)
    assert 4 < len(load_tokenizer(config.output).encode("def attention(query, key)").ids) < 50


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HOSTILE: dict[str, dict[str, Any]] = {
    "characters that no map has": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a template of a token that is not there": {
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
            "special_tokens": {},
        },
    },
    "words without one for the unknown": {"model": {"type": "WordLevel", "unk_token": "x", "vocab": {}}},
    "no tokens": {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
    "brackets that do not end": {"pre_tokenizer": split("(")},
    "a decoder that cuts more than there is": {
        "decoder": {"type": "Strip", "content": "a", "start": 2**64 - 1, "stop": 1},
    },
}  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_files_that_make_the_library_panic_are_refused(
    change: dict[str, Any], config: TokenizerConfig, tmp_path: Path
) -> None:
    """Catches a panic of the library, which is no Exception: it passes every handler and ends in a traceback."""
    train_tokenizer(config)
    hostile = tmp_path / "hostile.json"
    hostile.write_text(json.dumps(json.loads(Path(config.output).read_text()) | change))
    with pytest.raises(DataError, match=r"hostile\.json: "):
        load_tokenizer(hostile)


def test_a_pattern_that_backtracks_forever_is_reported(config: TokenizerConfig, tmp_path: Path) -> None:
    """Catches a panic of a pattern that fails on some texts only, and a pattern that backtracks forever."""
    train_tokenizer(config)
    hostile = tmp_path / "hostile.json"
    hostile.write_text(json.dumps(json.loads(Path(config.output).read_text()) | {"pre_tokenizer": split("(a+)+$")}))
    tokenizer = load_tokenizer(hostile)
    with pytest.raises(DataError, match=r"hostile\.json: .*retry-limit"), tokenizing(hostile):
        tokenizer.encode("a" * 40 + "!b")
    # In a worker process, from which the panic could not even be sent back.
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a" * 40 + "!b"}) + "\n")
    asked = PreprocessConfig(input=[str(texts)], tokenizer=str(hostile), output=str(tmp_path / "made"), workers=2)
    with pytest.raises(DataError, match=r"hostile\.json: .*retry-limit"):
        preprocess(asked)
