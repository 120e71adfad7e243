"""Hugging Face `tokenizers` asked once for every pre-token: most of a text is words that were met before."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers

from megads.data.engine import CheckedEngine, HuggingFaceEngine, Ids
from megads.data.pre_tokens import BYTE_LEVEL, PreTokenSplitter, Split, UnknownPattern

MOST_WORDS = 1 << 18
"""Kept, in some 40 MB of memory."""
LONGEST_WORD = 64
"""Characters; a longer one does not come again."""
# Characters before the first combining mark are their own composed forms.
_PERHAPS_NOT_COMPOSED = re.compile("[\u0300-\U0010ffff]").search
# These see each piece for itself, wherever in the text it stands.
_LATER_STEPS = {"ByteLevel", "Digits", "Punctuation", "Split"}


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
