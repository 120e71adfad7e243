"""Tests the engine that caches pre-tokens against Hugging Face `tokenizers`, for many kinds of tokenizer."""

# ruff: noqa: RUF001, E501 (texts and patterns of other alphabets)

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megads.data.tokenizer_config import Engine
from megads.tools.prepare import caching_engine
from megads.tools.prepare import tokenizer as engine_module
from megads.tools.prepare.block_tokenizer import BlockTokenizer, TokenizeSettings, open_shard, shard_path
from megads.tools.prepare.blocks import Lines
from megads.tools.prepare.caching_engine import BYTE_LEVEL, CachingEngine, PreTokenSplitter, Split, UnknownPattern
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import HuggingFaceEngine

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split_step(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def byte_level(use_regex: bool = False, add_prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


SHAPES = {
    "gpt-2": [byte_level(use_regex=True)],
    "llama-3": [split_step(LLAMA_3), byte_level()],
    "qwen": [split_step(LLAMA_3.replace("{1,3}", "")), byte_level()],
    "gpt-4o": [split_step(GPT_4O), byte_level()],
    "gpt-4o, matches only": [split_step(GPT_4O, "Removed", invert=True), byte_level()],
    "bloom": [split_step(BLOOM), byte_level()],
    "deepseek": [*map(split_step, DEEPSEEK), byte_level()],
    "words, gaps dropped": [split_step(r"\p{L}+", "Removed", invert=True), byte_level()],
    "digits later": [
        split_step(LLAMA_3),
        {"type": "Digits", "individual_digits": True},
        {"type": "Punctuation", "behavior": "Isolated"},
        byte_level(use_regex=True),
    ],
}
PIECES = [
    "  ", "\n", "\t", "\r\n\r\n", "é", "漢字", "🚀", "a", "B", "1", "2345", "'s", "'LL", "'ſ", " the", "\u00a0", "\u200b", "\x00",
    "\u017f", "İ", "\u0301", "<|endoftext|>", "<think>", ".", "...", "under_score", "CamelCase", "e\u0301", "\u1100\u1161",
    "👩‍👩‍👧", "שלום", "مرحبا ١٢٣", "\u2028", "\x85", "\x1c", "\u3000", "ﬁ", "Å", "Ⅷ", "𝔘𝔫𝔦", "𠀋", "१२", "¼", "ǅ",
    "\ufeff", "\U0010ffff", "\u0378", " " * 70, "word" * 20, "。、", "(x)|y", "/", "'",
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), max_size=30
).map("".join)


def some_texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return ["".join(PIECES[i] for i in random.integers(0, len(PIECES), random.integers(1, 60))) for _ in range(count)]


def tokenizer_of(
    steps: Sequence[dict[str, Any]],
    normalizer: normalizers.Normalizer | None = None,
    added: Sequence[AddedToken] = (),
    **model: Any,
) -> Tokenizer:
    """Returns a byte-level BPE with these pre-tokenizer steps, which encodes special tokens as text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        some_texts(200), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    content = json.loads(made.to_str())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)} if len(steps) > 1 else steps[0]
    content["model"] |= model
    made = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(["<|endoftext|>"])
    made.add_tokens(list(added))
    made.encode_special_tokens = True
    return made


def caching(tokenizer: Tokenizer) -> CachingEngine:
    return CachingEngine(tokenizer, HuggingFaceEngine(tokenizer))


ENGINES = {name: caching(tokenizer_of(steps)) for name, steps in SHAPES.items()}


@pytest.mark.quick("llama-3", "bloom", "words, gaps dropped")
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10, deadline=None)
@given(texts=st.lists(TEXTS, max_size=3))
def test_cached_ids_equal_the_librarys(shape: str, texts: list[str]) -> None:
    """Catches a pattern that Python interprets differently from Oniguruma, and a word whose ids depend on its
    neighbours."""
    ENGINES[shape].require_equal(texts)


@pytest.mark.quick("gpt-4o", "bloom", "digits later")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_character_is_split_as_the_library_does(shape: str) -> None:
    """Catches character classes of another Unicode version: letters that one library knows and the other does not."""
    codes = [
        *range(0xD800),
        *range(0xE000, 0x11000),
        *range(0x1E800, 0x1FC00),
        *range(0x323A0, 0x323C0),
        sys.maxunicode,
    ]
    spaced = "".join(f"{chr(code)}a " for code in codes[::3]) if shape == "llama-3" else ""
    runs = ["".join(map(chr, codes[begin : begin + 4096])) for begin in range(0, len(codes), 4096)]
    ENGINES[shape].require_equal([*runs, spaced])


NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "lower": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]),
    "replace": normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("a", " ")]),
}
ADDED = [
    AddedToken("<think>"),
    AddedToken("under", single_word=True),
    AddedToken("strip", lstrip=True, rstrip=True),
    AddedToken("   "),
    AddedToken("É", normalized=True),
    AddedToken("B漢", normalized=False),
]
NORMALIZED = {name: caching(tokenizer_of(SHAPES["gpt-2"], made, ADDED)) for name, made in NORMALIZERS.items()}


@pytest.mark.parametrize("name", NORMALIZERS)
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(TEXTS, max_size=3))
def test_normalizers_and_added_tokens_apply_before_splitting(name: str, texts: list[str]) -> None:
    """Catches text that is split before it is normalized, and added tokens of any kind that are split."""
    NORMALIZED[name].require_equal(texts)


@pytest.mark.parametrize("parses", [True, False])
def test_special_tokens_in_a_text_are_encoded_as_asked(parses: bool) -> None:
    """Catches a special token that is encoded as text where a chat template contains it, and the reverse."""
    tokenizer = tokenizer_of(SHAPES["llama-3"], normalizers.NFC(), [AddedToken("e\u0301ng", normalized=True)])
    tokenizer.encode_special_tokens = not parses
    engine = caching(tokenizer)
    texts = ["a<|endoftext|>b", "énglish", "e\u0301nglish", *some_texts(100)]
    engine.require_equal(texts)
    assert (tokenizer.token_to_id("<|endoftext|>") in engine.encode(texts)[0]) == parses
    assert tokenizer.token_to_id("e\u0301ng") in engine.encode_unchecked(texts[1:2])[0]


@pytest.mark.parametrize(
    "model", [{"ignore_merges": True}, {"fuse_unk": True, "unk_token": "a"}, {"byte_fallback": True}]
)
def test_models_whose_word_ids_depend_on_more_than_the_word_are_right(model: dict[str, Any]) -> None:
    """Catches a cache that returns wrong ids for a model in which a word's ids depend on more than the word."""
    steps = [split_step(LLAMA_3)] if len(model) > 1 or "byte_fallback" in model else SHAPES["llama-3"]
    caching(tokenizer_of(steps, **model)).require_equal(some_texts(100))


def test_models_other_than_bpe_are_cached() -> None:
    """Catches a cache that supports BPE only."""
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.5), ("ab", -1.2), (" ", -1.0), ("Camel", -3.0), ("1", -2.0)]
    words = {word: number for number, (word, _) in enumerate(pieces)} | {"##b": 9, "##el": 10}
    for model in (models.Unigram(pieces, 0, False), models.WordPiece(words, unk_token="<unk>")):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(BYTE_LEVEL), "isolated")
        caching(tokenizer).require_equal([*some_texts(50), "ab ab1 aab"])


UNKNOWN: dict[str, list[dict[str, Any]]] = {
    "a space is put before the text": [byte_level(use_regex=True, add_prefix_space=True)],
    "where in the text": [split_step(r"\s+"), {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}],
    "no split": [{"type": "Whitespace"}],
    "another behaviour": [split_step(r"\s+", "MergedWithPrevious"), byte_level()],
    "look-behind": [split_step(r"(?<=a)b"), byte_level()],
    "possessive": [split_step(r"a{1,3}+"), byte_level()],
    "anchors": [split_step(r"^a|b$"), byte_level()],
    "any character": [split_step(r".+"), byte_level()],
    "empty matches": [split_step(r"a*"), byte_level()],
    "flags": [split_step(r"(?i:ss)"), byte_level()],
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_an_unknown_pre_tokenizer_goes_to_the_library(reason: str) -> None:
    """Catches an unsupported pre-tokenizer that is split by guesswork."""
    with pytest.raises(UnknownPattern):
        caching(tokenizer_of(UNKNOWN[reason]))


def test_dropout_is_not_cached() -> None:
    """Catches a word that has the same ids wherever it occurs, which BPE dropout is meant to prevent."""
    with pytest.raises(UnknownPattern, match="dropout"):
        caching(tokenizer_of(SHAPES["gpt-2"], dropout=0.1))


def test_the_caches_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that grows with the corpus, and a full cache that gives no ids or wrong ones."""
    monkeypatch.setattr(caching_engine, "MOST_WORDS", 20)
    monkeypatch.setattr(caching_engine, "LONGEST_WORD", 12)
    engine = caching(tokenizer_of(SHAPES["gpt-2"]))
    engine.require_equal(some_texts(200))
    assert 0 < len(engine._cache) <= 20
    assert max(map(len, engine._cache)) <= 12


def test_character_classes_are_learned_in_any_order() -> None:
    """Catches a regex that was compiled before the library was asked about the characters to which it is applied."""
    splitter = PreTokenSplitter([Split(BYTE_LEVEL)])
    assert splitter.split("a𠀋") == ["a𠀋"]
    assert splitter.split("漢字") == ["漢字"]
    assert splitter.split("漢字a𠀋") == ["漢字a𠀋"]
    assert splitter.split("🚀漢字a𝔘") == ["🚀", "漢字a𝔘"]


def test_text_between_two_matches_is_a_pre_token() -> None:
    """Catches text between two matches that is lost, or split into characters."""
    assert PreTokenSplitter([Split(r"\p{L}+")]).split("ab..c1é") == ["ab", "..", "c", "1", "é"]
    assert PreTokenSplitter([Split(r"\p{L}+", keeps_gaps=False)]).split("ab..c1é") == ["ab", "c", "é"]
    assert PreTokenSplitter([Split(r"\p{L}+"), Split("c|[1.]")]).split("ab..c1é𝔘") == ["ab", ".", ".", "c", "1", "é𝔘"]
    assert PreTokenSplitter([Split("a")]).split("") == []


def test_a_wrong_cached_word_is_noticed_and_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches wrong ids in a dataset, a check that never runs, and an engine that is used again after an error."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer_of(SHAPES["gpt-2"]).save(str(tokenizer))
    content = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(200)).encode()
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    checksums = []
    monkeypatch.setattr(engine_module, "RECHECK_EVERY", 20)
    for number, wrong in enumerate((False, True)):
        made = BlockTokenizer(TokenizeSettings(str(tokenizer), digest, ("text",), 0, "<u2"), tmp_path)
        assert isinstance(made._engine, CachingEngine)
        if wrong:
            made._engine._always = 0
            made._engine._splitter = PreTokenSplitter([Split(r"\s+")])
        assert made(number, Lines("a.jsonl", content, True, 0)).restarted == wrong
        assert isinstance(made._engine, HuggingFaceEngine) == wrong
        checksums.append(open_shard(shard_path(tmp_path, number)).header.checksum)
    assert checksums[0] == checksums[1]


def test_the_report_names_a_wrong_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error of the cache that the report omits because the library corrected it."""
    tokenizer_of(SHAPES["gpt-2"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts(20)))

    def run() -> str:
        return preprocess(
            PreprocessConfig(
                input=[str(tmp_path / "a.jsonl")],
                tokenizer=str(tmp_path / "tokenizer.json"),
                output=str(tmp_path / "out"),
                engine=Engine.hf,
                overwrite=True,
            )
        ).engine

    assert run() == "hf"
    monkeypatch.setattr(caching_engine, "BYTE_LEVEL", r"\s+")
    assert run() == "hf, 1 of 1 parts without its cache of words, after ids that differ"
