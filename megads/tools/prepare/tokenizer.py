"""Tokenizers: implementations, and training of byte-level BPE.

A tokenizer is trained with, and stored in the format of, Hugging Face `tokenizers`. Texts are tokenized by that
library, or by `gigatoken` if it provably gives the same ids.
"""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megads.api import ConfigError, DataError, Engine, Progress, atomic_writer, reason_of
from megads.data.config import check_text
from megads.data.tokenizer_config import check_tokenizer_training
from megads.tools.prepare.config import TokenizerConfig
from megads.tools.prepare.rejections import Rejections
from megads.tools.prepare.text import DocumentReader, converted_text

# Of the documents that another engine tokenizes, one in this many is also tokenized by the reference,
RECHECK_EVERY = 1000
# and so are the beginnings of the first documents of every process.
ALWAYS_CHECKED, BEGINNING_CHARACTERS = 20, 4096
CHECKED_CHARACTERS = 1 << 20
"""Characters that the reference tokenizes at a time, with a hundred bytes of memory for each."""
_MOST_PAIRS = 2000
"""Maximum number of pairs of adjacent added tokens that are tried."""
Ids = npt.NDArray[np.integer[Any]]


class EngineMismatch(Exception):
    """An engine's ids differ from the reference's."""


class TextEngine(Protocol):
    """Tokenizes texts."""

    def encode(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""


class HuggingFaceEngine:
    """The reference engine.

    Args:
        tokenizer: the loaded tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def parses_special_tokens(self) -> bool:
        """Whether text that spells a special token becomes that token."""
        return not self._tokenizer.encode_special_tokens

    def encode(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        flat: list[int] = []
        lengths = []
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = encoding.ids
            flat += ids
            lengths.append(len(ids))
        return np.array(flat, np.int64), lengths


class CheckedEngine(ABC):
    """An engine that should give the reference's ids; a random sample of every batch is checked.

    Args:
        reference: the reference engine.
    """

    def __init__(self, reference: HuggingFaceEngine) -> None:
        self.reference = reference
        self._random = random.Random(0)
        self._always = ALWAYS_CHECKED

    def encode(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """Returns the concatenated ids of all texts, and the number of ids of each.

        Raises:
            EngineMismatch: the ids of a checked document differ from the reference's.
        """
        flat, lengths = self.encode_unchecked(texts)
        chosen = [text[:BEGINNING_CHARACTERS] for text in texts[: self._always]]
        self._always -= len(chosen)
        chosen += [text for text in texts if self._random.random() * RECHECK_EVERY < 1]
        if chosen:
            self.require_equal(chosen)
        return flat, lengths

    @abstractmethod
    def encode_unchecked(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """As `encode`, without a check; raises EngineMismatch if the engine fails."""

    def require_equal(self, texts: Sequence[str]) -> None:
        """Raises EngineMismatch unless both engines give the same ids for all these texts."""
        for batch in _batches(texts):
            right, right_lengths = self.reference.encode(batch)
            found, lengths = self.encode_unchecked(batch)
            if lengths != right_lengths or not np.array_equal(right, found):
                raise EngineMismatch


class FastEngine(CheckedEngine):
    """`gigatoken`.

    Args:
        tokenizer_file: tokenizer file in the format of Hugging Face `tokenizers`.
        reference: the reference engine.

    Raises:
        ImportError: gigatoken is not installed.
        ValueError: it does not support this tokenizer.
    """

    def __init__(self, tokenizer_file: str, reference: HuggingFaceEngine) -> None:
        super().__init__(reference)
        import awkward
        import gigatoken

        content = json.loads(Path(tokenizer_file).read_bytes())
        added = content.get("added_tokens", [])
        # It would treat text that spells any added token as the token.
        content["added_tokens"] = [token for token in added if reference.parses_special_tokens or not token["special"]]
        words = [token["content"] for token in content["added_tokens"] if token["single_word"]]
        if words:
            raise ValueError(f"it also finds added tokens within words, where {words[0]!r} must not be found")
        self._tokenizer = gigatoken.Tokenizer.from_json(json.dumps(content))
        self._awkward = awkward
        self._assigned: set[str] = set()

    def encode_unchecked(self, texts: Sequence[str]) -> tuple[Ids, list[int]]:
        """As `encode`, without a check; raises EngineMismatch if the engine fails."""
        if not texts:
            return np.zeros(0, np.int64), []
        newer = [place for place, text in enumerate(texts) if not self._knows(text)]
        try:
            found = self._tokenizer.encode_batch(list(texts))
        except Exception as error:  # the reference has the last word on what can be tokenized
            raise EngineMismatch(str(error)) from error
        flat, lengths = self._awkward.to_numpy(self._awkward.flatten(found)), self._awkward.num(found).tolist()
        return self._by_the_reference(texts, newer, flat, lengths) if newer else (flat, lengths)

    def _knows(self, text: str) -> bool:
        """Whether both engines agree on the classes of all characters, since their Unicode versions differ."""
        if text.isascii():
            return True
        new = set(text) - self._assigned
        unassigned = {character for character in new if unicodedata.category(character) == "Cn"}
        self._assigned |= new - unassigned
        return not unassigned

    def _by_the_reference(
        self, texts: Sequence[str], places: Sequence[int], flat: Ids, lengths: list[int]
    ) -> tuple[Ids, list[int]]:
        """Replaces the ids of some texts by the reference's."""
        right, right_lengths = self.reference.encode([texts[place] for place in places])
        documents = np.split(flat, np.cumsum(lengths)[:-1])
        for place, ids in zip(places, np.split(right, np.cumsum(right_lengths)[:-1]), strict=True):
            documents[place] = ids
        return np.concatenate(documents), [ids.size for ids in documents]


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields batches of texts with about CHECKED_CHARACTERS in total."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= CHECKED_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def added_token_texts(tokenizer_file: str) -> list[str]:
    """Returns texts around every added token, special or not, since a sample of the corpus may have none.

    Args:
        tokenizer_file: tokenizer file in the format of Hugging Face `tokenizers`.
    """
    tokens = [str(token["content"]) for token in json.loads(Path(tokenizer_file).read_bytes()).get("added_tokens", [])]
    texts = [form.replace("*", token) for token in tokens for form in ("*", "a*b", "a * b\n*", "A*.", "1**", "*é")]
    pairs = list(itertools.product(tokens, repeat=2))
    if len(pairs) > _MOST_PAIRS:
        pairs = random.Random(0).sample(pairs, _MOST_PAIRS)
    return texts + [f"{first}{second} {first}x{second}" for first, second in pairs]


def choose_engine(
    engine: Engine, tokenizer_file: str, tokenizer: Tokenizer, sample: Sequence[str], key: str = "engine"
) -> Engine:
    """Returns the engine to use.

    `fast` is only used if it gives the reference's ids on a sample of the corpus and on texts with every added token.

    Args:
        engine: the engine that the user requested.
        tokenizer_file: tokenizer file.
        tokenizer: the loaded tokenizer.
        sample: texts of the corpus.
        key: config key of `engine`, for messages.

    Raises:
        ConfigError: `fast` was requested and cannot be used.
    """
    if engine is Engine.hf:
        return engine
    try:
        fast = FastEngine(tokenizer_file, HuggingFaceEngine(tokenizer))
        fast.require_equal([*sample, *added_token_texts(tokenizer_file)])
    except ImportError as error:
        why = f"it needs gigatoken ({error}): pip install 'megads[fast]'"
    except EngineMismatch:
        why = "it gives other ids than Hugging Face tokenizers on a sample of the documents, or next to an added token"
    except Exception as error:  # the library raises what it likes for tokenizers that it does not know
        why = f"it does not support this tokenizer ({error})"
    else:
        return Engine.fast
    if engine is Engine.fast:
        raise ConfigError(f"{key} = fast: {why}; give {key}=hf, or auto, which falls back to hf")
    return Engine.hf


@dataclass(frozen=True)
class TokenizerReport:
    """Result of `train_tokenizer`.

    Attributes:
        output: the tokenizer file.
        asked: requested vocabulary size.
        learnt: actual vocabulary size.
        rejected: lines and files without a document.
        said: descriptions of skipped files and of converted files.
    """

    output: str
    asked: int
    learnt: int
    rejected: Rejections
    said: tuple[str, ...] = ()

    def __str__(self) -> str:
        short = "" if self.learnt == self.asked else f" (the text has no more pairs; {self.asked} were asked for)"
        return f"{self.output}: {self.learnt} tokens{short}; {'; '.join((*self.said, str(self.rejected)))}"


def train_tokenizer(config: TokenizerConfig) -> TokenizerReport:
    """Trains a byte-level BPE tokenizer and writes the tokenizer file.

    Args:
        config: input, output and size.

    Returns:
        A report.

    Raises:
        ConfigError: vocab_size is too small for the bytes, or too large.
        DataError: the input has no documents, or the output cannot be written.
    """
    check_tokenizer_training("", config.vocab_size, config.min_frequency)
    check_text("", config.extensions, config.encoding, config.max_rejected)
    reader = DocumentReader(
        config.input,
        (config.text_field,),
        extensions=config.extensions,
        encoding=config.encoding,
        max_rejected=config.max_rejected,
    )
    learnt = learn_tokenizer(
        reader, Path(config.output), config.vocab_size, config.min_frequency, config.end_of_document
    )
    said = tuple(text for text in (reader.passed_over, converted_text(reader.converted)) if text)
    return TokenizerReport(config.output, config.vocab_size, learnt, reader.rejected, said)


def learn_tokenizer(
    reader: DocumentReader,
    output: Path,
    vocab_size: int,
    min_frequency: int,
    end_of_document: str | None,
    every: int = 1,
) -> int:
    """Trains a byte-level BPE tokenizer on documents and writes the tokenizer file.

    The 256 bytes are always in the vocabulary, so every text can be encoded and decodes to itself. The end-of-document
    token has id 0. The same documents give the same file, byte for byte.

    Args:
        reader: the documents.
        output: the file to write.
        vocab_size: vocabulary size, including the special token; at least SMALLEST_VOCABULARY.
        min_frequency: pairs seen less often are not merged.
        end_of_document: the special token, or None for none.
        every: trains on one document in this many.

    Returns:
        The actual vocabulary size, which is below vocab_size if the text has no more pairs.

    Raises:
        DataError: there are no documents, or the output cannot be written.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[] if end_of_document is None else [end_of_document],
        # Sorted, because the ids follow the order of the alphabet.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with Progress("training the tokenizer", reader.total_bytes) as progress:
        tokenizer.train_from_iterator(_texts(reader, every, progress), trainer)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(output) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {reason_of(error)}; choose another output") from error
    learnt: int = tokenizer.get_vocab_size()
    return learnt


def _texts(reader: DocumentReader, every: int, progress: Progress) -> Iterator[str]:
    """Yields the texts to train on, and updates the progress."""
    for number, document in enumerate(reader):
        if number % every == 0:
            yield document.text
        progress.update(reader.bytes_read)
