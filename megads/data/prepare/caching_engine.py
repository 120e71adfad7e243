"""Hugging Face `tokenizers` asked once for every pre-token: most of a text is words that were met before.

Texts are split into pre-tokens by Python's own regular expressions. The library splits by Oniguruma, whose classes of
characters come from another version of Unicode than Python's. So the library itself is asked which characters a class
has, a block of characters at a time when a text first has one of them.
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

from megads.data.prepare.engine import CheckedEngine, HuggingFaceEngine, Ids

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that is built into the library's ByteLevel: GPT-2's."""
BLOCK = 1 << 12
"""Characters that the library is asked about at a time."""
_BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]").search
_SURROGATES = range(0xD800, 0xE000)
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
FindAll = Callable[[str], list[str]]
# What means the same to Oniguruma and Python once classes are spelled out. Only a negative look-ahead: what can match
# the empty string then matches an empty text, too.
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
"""Kept, in some 40 MB of memory."""
LONGEST_WORD = 64
"""Characters; a longer one does not come again."""
# Characters before the first combining mark are their own composed forms.
_PERHAPS_NOT_COMPOSED = re.compile("[\u0300-\U0010ffff]").search
# These see each piece for itself, wherever in the text it stands.
_LATER_STEPS = {"ByteLevel", "Digits", "Punctuation", "Split"}


class UnknownPattern(Exception):
    """A regular expression that may mean something else to Python."""


@dataclass(frozen=True)
class Split:
    """One step of a pre-tokenizer.

    Attributes:
        pattern: a regular expression as Oniguruma reads it.
        keeps_gaps: whether what lies between two matches is a pre-token, too, or is dropped.
    """

    pattern: str
    keeps_gaps: bool = True


@dataclass(frozen=True)
class _Characters:
    """A part of a pattern that matches one character, as Oniguruma reads it."""

    pattern: str


class _Known:
    """What the library was asked.

    Args:
        asked: which classes of characters it is asked about.
    """

    def __init__(self, asked: set[_Characters]) -> None:
        self._blocks: set[int] = set()
        self._runs: dict[_Characters, list[tuple[int, int]]] = {characters: [] for characters in asked}
        """First and last code points."""

    def learn(self, blocks: set[int]) -> bool:
        """Asks about blocks; returns whether any of them is new."""
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
        """Returns a Python class of the characters that are known, up to the largest."""
        runs = [(begin, min(end, largest)) for begin, end in self._runs[characters] if begin <= largest]
        inside = "".join(f"\\U{begin:08x}-\\U{end:08x}" for begin, end in runs)
        return f"[{inside}]" if inside else r"[^\x00-\U0010ffff]"


class PreTokenSplitter:
    """Applies splits one after the other, each to the pre-tokens of the one before.

    Args:
        splits: at least one.

    Raises:
        UnknownPattern: a pattern is not understood.
    """

    def __init__(self, splits: list[Split]) -> None:
        self._splits = [(list(_parts(split.pattern)), split.keeps_gaps) for split in splits]
        self._known = _Known({part for parts, _ in self._splits for part in parts if isinstance(part, _Characters)})
        self._known.learn({0})
        self._of_ascii = self._compiled(0x7F)
        # Fewer characters make a faster expression: most texts have none beyond 16 bits.
        self._of_16_bits: list[FindAll] | None = None
        self._of_all: list[FindAll] | None = None

    def split(self, text: str) -> list[str]:
        """Returns the pre-tokens of a text, which the normalizer must have seen."""
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
        """Returns the steps for texts of known characters up to the largest."""
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
    """Yields a pattern of Oniguruma as parts that mean the same to Python, and its classes of characters."""
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
                # Folding of case is Unicode's, too: it makes a long s an s.
                yield from (_Characters(f"(?i:{letter})") if letter.isalpha() else letter for letter in _CONTRACTIONS)
                yield ")"
            case "capture":
                yield "(?:"
            case "escaped" | "literal":
                yield re.escape(part[-1])
            case _:
                yield part


def _class_end(pattern: str, begin: int) -> int:
    """Returns where a class of characters ends, others within it included."""
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
    """Splits texts into pre-tokens, and has the library tokenize those that it has not met.

    Texts with an added token, which the library finds before it splits, go to the library as a whole.

    Args:
        tokenizer: loaded, set for special tokens as it is used.
        reference: the same without a cache.

    Raises:
        UnknownPattern: the tokenizer splits in a way that is not known here.
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
        """The same without a check."""
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
    """The ids of pre-tokens, as 4 bytes each.

    Args:
        tokenizer: whose model is used.
        later_steps: of its pre-tokenizer, which are yet to be applied to a pre-token.
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
    """Returns the first steps of the pre-tokenizer, and the others, as the library writes them.

    Raises:
        UnknownPattern: a step that is not known here, or a model that gives other ids each time.
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
