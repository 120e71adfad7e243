"""Settings of a run's tokenizer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.data.config import TextSpecialTokens
from megads.errors import ConfigError

SMALLEST_VOCABULARY = 257
SMALLEST_WANTED = f"must be at least {SMALLEST_VOCABULARY}, 256 bytes and the end-of-document token"
# Training a tokenizer allocates memory for the whole vocabulary at once, some 100 bytes per token.
_LARGEST_VOCABULARY = 1 << 24


def check_tokenizer_training(section: str, vocab_size: int | None, min_frequency: int) -> None:
    """Raises ConfigError on settings with which no tokenizer can be trained.

    Args:
        section: config section that holds the two keys, with a trailing dot; or empty.
        vocab_size: vocabulary size; None derives it from the text.
        min_frequency: minimum frequency of a pair that is merged.
    """
    if vocab_size is not None and vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"{section}vocab_size = {vocab_size}: {SMALLEST_WANTED}")
    if vocab_size is not None and vocab_size > _LARGEST_VOCABULARY:
        raise ConfigError(f"{section}vocab_size = {vocab_size}: must be at most {_LARGEST_VOCABULARY}")
    if min_frequency < 1:
        raise ConfigError(f"{section}min_frequency = {min_frequency}: must be at least 1")


class Engine(StrEnum):
    """Tokenizer implementation."""

    auto = "auto"
    hf = "hf"
    fast = "fast"


@dataclass
class TextTokenizerConfig:
    """The tokenizer of a run: an existing one, or one trained on data.raw."""

    path: str | None = None
    """Tokenizer file in Hugging Face `tokenizers` format; null trains one on data.raw."""
    vocab_size: int | None = None
    """Vocabulary size of a tokenizer trained on data.raw, including the special token; null depends on the size of the
    text, from 512 to 32,768, and is at most model.vocab_size."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    end_of_document: str | None = "<|endoftext|>"
    """Special token appended to every document of data.raw; null appends none."""
    begin_of_document: str | None = None
    """Special token before every document of data.raw, for models that were trained with one, such as `<bos>` of Gemma;
    null puts none. Prompts and scored texts begin with it, too."""
    engine: Engine = Engine.auto
    """Tokenizer implementation for data.raw: hf is Hugging Face tokenizers; fast is gigatoken, checked against hf's
    ids; auto uses fast if it is installed and gives the same ids."""
    text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore
    """ignore: text of data.raw that spells a special token is ordinary text. parse: it becomes the token, for text that
    a chat template produced. With parse untrusted text can forge the end of a document or a turn."""

    def check(self) -> None:
        """Raises ConfigError on an invalid vocabulary size, or on one together with an existing tokenizer."""
        if self.vocab_size is not None and self.path is not None:
            raise ConfigError(
                f"tokenizer.vocab_size = {self.vocab_size} only applies to a new tokenizer, but tokenizer.path = "
                f"{self.path} gives one: leave one of them out"
            )
        check_tokenizer_training("tokenizer.", self.vocab_size, self.min_frequency)
        if self.end_of_document == "":
            raise ConfigError("tokenizer.end_of_document is empty: give a token, or null to mark no ends")
        if self.begin_of_document == "":
            raise ConfigError("tokenizer.begin_of_document is empty: give a token, or null for none")
        if self.begin_of_document not in (None, self.end_of_document) and self.path is None:
            raise ConfigError(
                f"tokenizer.begin_of_document = {self.begin_of_document}: a tokenizer trained on data.raw has only the "
                f"special token {self.end_of_document}; give that one, or tokenizer.path"
            )
