"""How raw text becomes a dataset: tokenizers to use or to learn, and `megads preprocess`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from megads.data.config import (
    AUTO_ENCODING,
    DEFAULT_EXTENSIONS,
    ReaderConfig,
    TextSpecialTokens,
    check_fields,
    check_text,
)
from megads.errors import ConfigError
from megads.runtime.registry import import_plugins

SMALLEST_VOCABULARY = 257
SMALLEST_WANTED = f"must be at least {SMALLEST_VOCABULARY}, 256 bytes and the end-of-document token"
# Learning takes memory for all of it at once, some 100 bytes a token.
_LARGEST_VOCABULARY = 1 << 24


def check_learning(section: str, vocab_size: int | None, min_frequency: int) -> None:
    """Raises ConfigError on a vocabulary that cannot be learnt.

    Args:
        section: of the config that holds the two keys, with a dot at its end; or empty.
        vocab_size: tokens; None where that is left to the text.
        min_frequency: of a pair that is merged.
    """
    if vocab_size is not None and vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"{section}vocab_size = {vocab_size}: {SMALLEST_WANTED}")
    if vocab_size is not None and vocab_size > _LARGEST_VOCABULARY:
        raise ConfigError(f"{section}vocab_size = {vocab_size}: must be at most {_LARGEST_VOCABULARY}")
    if min_frequency < 1:
        raise ConfigError(f"{section}min_frequency = {min_frequency}: must be at least 1")


class Engine(StrEnum):
    """What tokenizes."""

    auto = "auto"
    hf = "hf"
    fast = "fast"


@dataclass
class TextTokenizerConfig:
    """The tokenizer of a run: given, or learnt from data.raw."""

    path: str | None = None
    """Tokenizer file in Hugging Face `tokenizers` format; null learns one from data.raw."""
    vocab_size: int | None = None
    """Tokens to learn from data.raw, the special one included; null grows with the text, from 512 to 32,768, and
    stays within model.vocab_size."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    end_of_document: str | None = "<|endoftext|>"
    """Special token that ends every document of data.raw; null marks no ends."""
    engine: Engine = Engine.auto
    """What tokenizes data.raw: hf is Hugging Face tokenizers; fast is gigatoken, held to hf's ids; auto takes fast
    where it is installed and gives the same ids."""
    text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore
    """ignore: text of data.raw that spells a special token is ordinary text. parse: it is the token, for text that a
    chat template made. With parse a text of strangers can forge the end of a document or a turn."""

    def check(self) -> None:
        """Raises ConfigError on a size without room for the bytes, and on a size for a tokenizer that is given."""
        if self.vocab_size is not None and self.path is not None:
            raise ConfigError(
                f"tokenizer.vocab_size = {self.vocab_size} is for a tokenizer to learn, but tokenizer.path = "
                f"{self.path} gives one: leave one of them out"
            )
        check_learning("tokenizer.", self.vocab_size, self.min_frequency)
        if self.end_of_document == "":
            raise ConfigError("tokenizer.end_of_document is empty: give a token, or null to mark no ends")


@dataclass
class TokenizerConfig:
    """`megads tokenizer`: trains a byte-level BPE tokenizer."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl, .csv, .tsv and .parquet hold a document a record ("text"), other files are one;
    also .gz or .zst."""
    output: str = "tokenizer.json"
    """The tokenizer file to write, in Hugging Face `tokenizers` format."""
    vocab_size: int = 8192
    """Tokens to learn, the special ones included."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    text_field: str = "text"
    """JSON field, or column of a table or of parquet, that holds the document."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that are taken out of folders, and by globs that spell none, compressed or not."""
    encoding: str = AUTO_ENCODING
    """Of the files that are not UTF-8, for example cp1252 or latin-1; see data.encoding of megads train."""
    end_of_document: str = "<|endoftext|>"
    """Special token that ends every document."""


@dataclass
class PreprocessConfig:
    """`megads preprocess`: turns raw text into an indexed dataset in Megatron's format."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl, .csv, .tsv and .parquet hold a document a record ("text"), other files are one;
    also .gz or .zst; '[-]' reads JSON lines from the standard input."""
    tokenizer: str = MISSING
    """Tokenizer file in Hugging Face `tokenizers` format."""
    output: str = MISSING
    """Prefix of the <output>.bin and <output>.idx to write."""
    text_field: str = "text"
    """JSON field, or column of a table or of parquet, that holds the document."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that are taken out of folders, and by globs that spell none, compressed or not."""
    encoding: str = AUTO_ENCODING
    """Of the files that are not UTF-8, for example cp1252 or latin-1; see data.encoding of megads train."""
    prompt_field: str | None = None
    """With response_field: each record becomes a document of two sequences, for data.packing=best_fit, where the loss
    counts on the second only. May be empty text."""
    response_field: str | None = None
    """The field or column of what is learnt; the end-of-document token follows it."""
    messages_field: str | None = None
    """Instead: the field of JSON lines that holds a conversation, a list of messages with role and content. Each is a
    document of what is given and what the assistant says, by turns."""
    chat_template: str | None = None
    """With messages_field: the Jinja file that makes text of messages, or a tokenizer_config.json; null takes what lies
    beside the tokenizer, or a plain "User: ... Assistant: ..."."""
    end_of_document: str | None = "<|endoftext|>"
    """Token appended to every document; null appends none."""
    overwrite: bool = False
    """Replace an existing dataset."""
    text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore
    """ignore: text that spells a special token is ordinary text. parse: it is the token, for text that a chat template
    made. With parse a text of strangers can forge the end of a document or a turn."""
    engine: Engine = Engine.auto
    """hf is Hugging Face tokenizers; fast is gigatoken, held to hf's ids on documents from all over the input
    and on one in a thousand of them; auto takes fast where it is installed and gives the same ids."""
    workers: int | None = None
    """Processes that tokenize; null is as many as there are cores. The dataset does not depend on it."""
    distributed: bool = False
    """Share the work with all processes that are given the same command at the same time, on any nodes that see the
    same folders: an array of SLURM jobs (scripts/slurm/preprocess.sbatch). The dataset does not depend on them."""
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """What reads the input."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, which register data readers (docs/extending.md)."""

    def settle_plugins(self) -> None:
        """Imports the plugins, and checks and completes the settings of the reader; see `UsesPlugins`."""
        import_plugins(self.plugins)
        self.reader.settle("reader")

    def check(self) -> None:
        """Raises ConfigError on no workers, on the standard input beside files, and on half a pair."""
        check_fields("", self)
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: must be at least 1; null takes one for every core")
        check_text("", self.extensions, self.encoding)
        if self.input == ["-"] and self.encoding not in (AUTO_ENCODING, "utf-8"):
            raise ConfigError(
                f"encoding = {self.encoding}, but the standard input is read as UTF-8: convert it with iconv -f "
                f"{self.encoding}, or give files"
            )
        if self.input == ["-"] and self.distributed:
            raise ConfigError("distributed = true, but the standard input cannot be shared: give files")
        if "-" in self.input and len(self.input) > 1:
            raise ConfigError(f"input = {self.input}: - is the standard input and must stand alone; leave the rest out")
