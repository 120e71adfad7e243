"""Pieces of a text tokenize to what the whole does: real tokenizers with the patterns of well-known models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from megads.data import text_cuts
from megads.data.text_cuts import TextCutter

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
    """A tokenizer that merges across all that its pre-tokenizer leaves whole."""
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
        patch.setattr(text_cuts, "PIECE_CHARACTERS", 150)
        patch.setattr(text_cuts, "REACH", 100)
        pieces = list(TextCutter(tokenizer).pieces(text))
    assert "".join(pieces) == text
    ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
    assert list(chain.from_iterable(ids)) == tokenizer.encode(text, add_special_tokens=False).ids
    return len(pieces)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=TEXTS, parse=st.booleans())
def test_pieces_tokenize_to_the_whole(name: str, text: str, parse: bool) -> None:
    """Catches a cut within what a tokenizer takes as one: digits and spaces that are counted in groups, added tokens
    and the white space that they take, prefixes of a text that are given to each of its pieces."""
    check_pieces(name, text, parse)


@pytest.mark.parametrize("name", MAKERS)
def test_ordinary_text_is_cut(name: str) -> None:
    """Catches a search that finds no place where there are many, so that memory grows with a document; and one that
    cuts where there is none."""
    text = "A line of ordinary words, 12345 of them.\nAnd another one,  with more.\n\n" * 40
    pieces = check_pieces(name, text, parse=False)
    assert pieces == 1 if name == "no pre-tokenizer" else pieces > 12
