"""Tokenizes each distinct pre-token once with Hugging Face `tokenizers` and caches its ids, since most words repeat.

Texts are split into pre-tokens by Python's regular expressions. The library uses Oniguruma, whose character classes are
based on another version of Unicode than Python's. So the characters of a class are determined by calling the library,
one block of characters at a time, when a text first contains a character of that block.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from megads.tools.prepare.tokenizer import CheckedEngine, HuggingFaceEngine, Ids

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern built into the library's ByteLevel, which is GPT-2's."""
BLOCK = 1 << 12
"""Characters whose class is determined in one call of the library."""
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]").search
_SURROGATES = range(0xD800, 0xE000)
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
FindAll = Callable[[str], list[str]]
# Syntax with the same meaning in Oniguruma and Python once character classes are spelled out. The only look-ahead is
# the negative one, so that a pattern that can match the empty string also matches an empty text.
_PART = re.compile(
    r"""(?P<characters>\\[pP]\{\^?\w+\}|\\[sSdDwW])
    | (?P<contractions>\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\))
    | (?P<group>\(\?:|\(\?!|\)(?![*+{])|\|)
    | (?P<capture>\((?!\?))
    | (?P<count>(?:[?*+]|\{\d+(?:,\d*)?\})(?![?*+{]))
    | (?P<control>\\[rnt])
    | \\(?P<escaped>[^\w\s])
    | (?P<literal>[^\\\[\](){}|?*+.^$])""",
    re.VERBOSE,
)
MOST_WORDS = 1 << 18
"""Maximum number of cached words, some 40 MB of memory."""
LONGEST_WORD = 64
"""Maximum length of a cached word in characters; longer ones rarely repeat."""
# NFC does not change characters before the first combining mark.
_PERHAPS_NOT_COMPOSED = re.compile("[\u0300-\U0010ffff]").search
# Steps whose result for a piece does not depend on its position in the text.
_LATER_STEPS = {"ByteLevel", "Digits", "Punctuation", "Split"}


class UnknownPattern(Exception):
    """A regular expression that may have another meaning in Python."""


@dataclass(frozen=True)
class Split:
    """One step of a pre-tokenizer.

    Attributes:
        pattern: regular expression in Oniguruma syntax.
        keeps_gaps: whether the text between two matches is a pre-token or is dropped.
    """

    pattern: str
    keeps_gaps: bool = True


@dataclass(frozen=True)
class _Characters:
    """A part of a pattern that matches one character, in Oniguruma syntax."""

    pattern: str


class _CharacterClasses:
    """Character classes as determined by the library.

    Args:
        asked: character classes to determine.
    """

    def __init__(self, asked: set[_Characters]) -> None:
        self._blocks: set[int] = set()
        self._runs: dict[_Characters, list[tuple[int, int]]] = {characters: [] for characters in asked}
        """First and last code points of the runs of characters in each class."""

    def learn(self, blocks: set[int]) -> bool:
        """Determines the classes of the characters in blocks; returns whether any block is new."""
        new = blocks - self._blocks
        for block in sorted(new):
            codes = range(block * BLOCK, (block + 1) * BLOCK)
            text = "".join(chr(code) for code in codes if code not in _SURROGATES)
            for characters, runs in self._runs.items():
                splits = pre_tokenizers.Split(Regex(characters.pattern), "removed").pre_tokenize_str(text)
                begin = 0
                for _, (first, end) in [*splits, ("", (len(text), len(text)))]:
                    if begin < first:
                        runs.append((ord(text[begin]), ord(text[first - 1])))
                    begin = end
        self._blocks |= new
        return bool(new)

    def spelled_out(self, characters: _Characters, largest: int) -> str:
        """Returns a Python character class of the known characters, up to code point `largest`."""
        runs = [(begin, min(end, largest)) for begin, end in self._runs[characters] if begin <= largest]
        inside = "".join(f"\\U{begin:08x}-\\U{end:08x}" for begin, end in runs)
        return f"[{inside}]" if inside else r"[^\x00-\U0010ffff]"


class PreTokenSplitter:
    """Applies splits one after the other, each to the pre-tokens of the previous one.

    Args:
        splits: at least one split.

    Raises:
        UnknownPattern: a pattern is not supported.
    """

    def __init__(self, splits: list[Split]) -> None:
        self._splits = [(list(_parts(split.pattern)), split.keeps_gaps) for split in splits]
        self._known = _CharacterClasses(
            {part for parts, _ in self._splits for part in parts if isinstance(part, _Characters)}
        )
        self._known.learn({0})
        self._of_ascii = self._compiled(0x7F)
        # Expressions with fewer characters are faster, and most texts have no characters beyond 16 bits.
        self._of_16_bits: list[FindAll] | None = None
        self._of_all: list[FindAll] | None = None

    def split(self, text: str) -> list[str]:
        """Returns the pre-tokens of a normalized text."""
        if text.isascii():
            steps = self._of_ascii
        elif _BEYOND_16_BITS(text):
            self._learn({ord(character) // BLOCK for character in text})
            steps = self._of_all = self._of_all or self._compiled(sys.maxunicode)
        else:
            if self._of_16_bits is None:
                self._learn(set(range(0x10000 // BLOCK)))
                self._of_16_bits = self._compiled(0xFFFF)
            steps = self._of_16_bits
        pieces = steps[0](text)
        for find_all in steps[1:]:
            pieces = [part for piece in pieces for part in find_all(piece)]
        return pieces

    def _learn(self, blocks: set[int]) -> None:
        if self._known.learn(blocks):
            self._of_all = None

    def _compiled(self, largest: int) -> list[FindAll]:
        """Returns the compiled steps for texts with known characters up to code point `largest`."""
        steps: list[FindAll] = []
        for parts, keeps_gaps in self._splits:
            known = (part if isinstance(part, str) else self._known.spelled_out(part, largest) for part in parts)
            pattern = "".join(known)
            try:
                compiled = re.compile(f"{pattern}|(?:(?!{pattern})(?s:.))+" if keeps_gaps else pattern)
            except re.error as error:
                raise UnknownPattern(str(error)) from error
            if compiled.fullmatch("") is not None:
                raise UnknownPattern("a pattern that matches the empty string")
            steps.append(compiled.findall)
        return steps


def _parts(pattern: str) -> Iterator[str | _Characters]:
    """Yields an Oniguruma pattern as parts with the same meaning in Python, and its character classes."""
    position = 0
    while position < len(pattern):
        if pattern[position] == "[":
            end = _class_end(pattern, position)
            yield _Characters(pattern[position:end])
            position = end
            continue
        found = _PART.match(pattern, position)
        if found is None:
            raise UnknownPattern(f"{pattern[position : position + 10]!r} in {pattern!r}")
        position = found.end()
        part = found[0]
        match found.lastgroup:
            case "characters":
                yield _Characters(part)
            case "contractions":
                yield "(?:"
                # Oniguruma's case folding is Unicode's: it also matches the long s as s.
                yield from (_Characters(f"(?i:{letter})") if letter.isalpha() else letter for letter in _CONTRACTIONS)
                yield ")"
            case "capture":
                yield "(?:"
            case "escaped" | "literal":
                yield re.escape(part[-1])
            case _:
                yield part


def _class_end(pattern: str, begin: int) -> int:
    """Returns the end of a character class, including nested classes."""
    if pattern.startswith(("[]", "[^]"), begin):
        raise UnknownPattern(f"a class that begins with ] in {pattern!r}")
    depth, position = 0, begin
    while position < len(pattern):
        character = pattern[position]
        depth += (character == "[") - (character == "]")
        position += 2 if character == "\\" else 1
        if not depth:
            return position
    raise UnknownPattern(f"a class without an end in {pattern!r}")


class CachingEngine(CheckedEngine):
    """Splits texts into pre-tokens, and calls the library for those that are not cached.

    Texts with an added token, which the library finds before it splits, are tokenized by the library as a whole.

    Args:
        tokenizer: the tokenizer, configured for special tokens as it is used.
        reference: the same tokenizer without a cache.

    Raises:
        UnknownPattern: the tokenizer splits text in an unsupported way.
    """

    def __init__(self, tokenizer: Tokenizer, reference: HuggingFaceEngine) -> None:
        super().__init__(reference)
        splits, later = _steps(tokenizer)
        self._splitter = PreTokenSplitter(splits)
        self._cache = _WordCache(tokenizer, later)
        self._normalizer = tokenizer.normalizer
        self._composes = isinstance(tokenizer.normalizer, normalizers.NFC)
        contents = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if not (token.special and tokenizer.encode_special_tokens)
        }
        if self._normalizer is not None:
            contents |= {self._normalizer.normalize_str(content) for content in contents}
        added = "|".join(re.escape(content) for content in sorted(contents) if content)
        self._added_token = re.compile(added) if added else None

    def encode_unchecked(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """As `encode`, without a check."""
        all_ids = [self._ids(text) for text in texts]
        return np.frombuffer(b"".join(all_ids), np.uint32), [len(ids) // 4 for ids in all_ids]

    def _ids(self, text: str) -> bytes:
        normalized = text
        if self._normalizer is not None and (not self._composes or _PERHAPS_NOT_COMPOSED(text)):
            normalized = self._normalizer.normalize_str(text)
        if self._added_token and (self._added_token.search(text) or self._added_token.search(normalized)):
            return self.reference.encode([text])[0].astype(np.uint32).tobytes()
        return b"".join(map(self._cache.__getitem__, self._splitter.split(normalized)))


class _WordCache(dict[str, bytes]):
    """The ids of pre-tokens, 4 bytes per id.

    Args:
        tokenizer: tokenizer whose model is used.
        later_steps: steps of its pre-tokenizer that are still to be applied to a pre-token.
    """

    def __init__(self, tokenizer: Tokenizer, later_steps: list[dict[str, Any]]) -> None:
        super().__init__()
        self._model_alone = Tokenizer(tokenizer.model)
        if later_steps:
            steps = {"type": "Sequence", "pretokenizers": later_steps}
            empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": steps, "added_tokens": []}
            self._model_alone.pre_tokenizer = Tokenizer.from_str(json.dumps(empty)).pre_tokenizer

    def __missing__(self, word: str) -> bytes:
        ids = array("I", self._model_alone.encode(word, add_special_tokens=False).ids).tobytes()
        if len(word) <= LONGEST_WORD:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _steps(tokenizer: Tokenizer) -> tuple[list[Split], list[dict[str, Any]]]:
    """Returns the first steps of the pre-tokenizer as splits, and the other steps as the library serializes them.

    Raises:
        UnknownPattern: a step is not supported, or the model is not deterministic.
    """
    if getattr(tokenizer.model, "dropout", None):
        raise UnknownPattern("a model with dropout")
    if tokenizer.pre_tokenizer is None:
        raise UnknownPattern("a tokenizer without a pre-tokenizer")
    steps = list(_flat(json.loads(tokenizer.pre_tokenizer.__getstate__())))
    splits: list[Split] = []
    while steps and (split := _as_split(steps[0])) is not None:
        splits.append(split)
        if steps[0]["type"] == "ByteLevel":
            steps[0] = steps[0] | {"use_regex": False}
            break
        del steps[0]
    if not splits or any(step["type"] not in _LATER_STEPS or step.get("add_prefix_space") for step in steps):
        raise UnknownPattern(f"a pre-tokenizer of {', '.join(step['type'] for step in steps)}")
    return splits, steps


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _flat(inner)
    else:
        yield step


def _as_split(step: dict[str, Any]) -> Split | None:
    match step:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return Split(pattern)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
            return Split(pattern, keeps_gaps=False)
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return Split(BYTE_LEVEL)
    return None
