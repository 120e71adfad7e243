"""Which data a run reads, and how raw text becomes data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from megads.errors import ConfigError

SMALLEST_VOCABULARY = 257
SMALLEST_WANTED = f"must be at least {SMALLEST_VOCABULARY}, 256 bytes and the end-of-document token"


class PackingMode(StrEnum):
    """How documents become samples."""

    stream = "stream"
    best_fit = "best_fit"


@dataclass
class DatasetConfig:
    """One dataset on disk."""

    path: str = MISSING
    """Prefix of <path>.bin and <path>.idx."""


@dataclass
class DataConfig:
    """Training and validation data: indexed datasets, or raw text that the launcher makes one of."""

    raw: Any = None
    """Your own text, a name or a list: files, folders, globs of txt, md, jsonl (also .gz, .zst) and parquet. The
    launcher tokenizes it once and fills data.train and tokenizer.path."""
    text_field: str = "text"
    """JSON field or parquet column of data.raw that holds the document."""
    train: list[DatasetConfig] = field(default_factory=list)
    """Datasets to train on; one for now."""
    valid: str | None = None
    """Prefix of a validation dataset; null takes the second share of data.split."""
    split: list[float] = field(default_factory=lambda: [0.98, 0.02])
    """Shares of the training dataset's documents, in order, for training and validation."""
    cache_dir: str | None = None
    """Where prepared text and index maps are cached; null is data-cache/ beside the run for text, and beside the
    dataset, or the user's cache where that is not writable, for index maps."""
    stage_to: str | None = None
    """Folder on a disk of each node, for data on a remote filesystem: the datasets are copied there once, checksummed,
    and read from there. An unchanged dataset is not copied again. A copy may take as long as cluster.timeout_s."""
    prefetch_steps: int = 2
    """Steps that the loader thread prepares ahead."""
    packing: PackingMode = PackingMode.stream
    """stream: documents are laid end to end and cut into samples. best_fit: samples are filled with whole documents; of
    documents of several sequences (prompt, response, and so on) the loss counts on responses only."""
    document_mask: bool = False
    """A token attends to its own document only; else also to the documents before it in the same sample."""
    reset_positions: bool = False
    """Learned and rotary positions start from 0 in every document, or in its part in the sample; else in every sample.
    ALiBi knows distances only."""
    mask_eod: bool = False
    """No training loss on the first token of a document that starts within a sample, which the end of the document
    before cannot predict. Megatron's eod_mask_loss, by the borders in the index. Validation counts every token."""

    @property
    def raw_patterns(self) -> list[str]:
        """data.raw as a list, empty when it is not used."""
        if self.raw is None:
            return []
        return [self.raw] if isinstance(self.raw, str) else list(self.raw)

    def check(self) -> None:
        """Raises ConfigError on a missing dataset or a split that is none."""
        self._check_source()
        if len(self.split) != 2 or min(self.split) < 0 or sum(self.split) <= 0 or self.split[0] <= 0:
            raise ConfigError(f"data.split = {self.split}: want two shares [train, valid], train above 0")
        if self.prefetch_steps < 1:
            raise ConfigError(f"data.prefetch_steps = {self.prefetch_steps}: must be at least 1")
        if self.packing is PackingMode.best_fit and not (self.document_mask and self.reset_positions):
            raise ConfigError(
                f"data.packing = best_fit with data.document_mask = {self.document_mask} and data.reset_positions = "
                f"{self.reset_positions}: pairs that share a sample would read each other; set both to true"
            )

    def _check_source(self) -> None:
        """Exactly one of raw text and a dataset."""
        if self.raw is None:
            if len(self.train) != 1:
                raise ConfigError(
                    f"data.train has {len(self.train)} datasets: give exactly one, for example "
                    "data.train='[{path: data/corpus}]' (blends of several are not built yet), or your own text, for "
                    "example data.raw='my/*.jsonl'"
                )
            return
        names = [self.raw] if isinstance(self.raw, str) else self.raw
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"data.raw = {self.raw!r}: want a file, folder or glob, or a list of them, for example "
                "data.raw='my/*.jsonl' or data.raw='[books, notes.txt]'"
            )
        if self.train:
            raise ConfigError(
                f"data.raw = {', '.join(names)} and data.train = {', '.join(item.path for item in self.train)} are "
                "both set: data.raw is prepared and becomes data.train; leave one out (data.train=[] or data.raw=null)"
            )


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

    def check(self) -> None:
        """Raises ConfigError on a size without room for the bytes, and on a size for a tokenizer that is given."""
        if self.vocab_size is not None and self.path is not None:
            raise ConfigError(
                f"tokenizer.vocab_size = {self.vocab_size} is for a tokenizer to learn, but tokenizer.path = "
                f"{self.path} gives one: leave one of them out"
            )
        if self.vocab_size is not None and self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(f"tokenizer.vocab_size = {self.vocab_size}: {SMALLEST_WANTED}")
        if self.min_frequency < 1:
            raise ConfigError(f"tokenizer.min_frequency = {self.min_frequency}: must be at least 1")
        if self.end_of_document == "":
            raise ConfigError("tokenizer.end_of_document is empty: give a token, or null to mark no ends")


@dataclass
class TokenizerConfig:
    """`megads tokenizer`: trains a byte-level BPE tokenizer."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl (a "text" field a line), .txt or .md (one document each), also .gz or .zst;
    .parquet."""
    output: str = "tokenizer.json"
    """The tokenizer file to write, in Hugging Face `tokenizers` format."""
    vocab_size: int = 8192
    """Tokens to learn, the special ones included."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    text_field: str = "text"
    """JSON field or parquet column that holds the document."""
    end_of_document: str = "<|endoftext|>"
    """Special token that ends every document."""


@dataclass
class PreprocessConfig:
    """`megads preprocess`: turns raw text into an indexed dataset in Megatron's format."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl (a "text" field a line), .txt or .md (one document each), also .gz or .zst;
    .parquet."""
    tokenizer: str = MISSING
    """Tokenizer file in Hugging Face `tokenizers` format."""
    output: str = MISSING
    """Prefix of the <output>.bin and <output>.idx to write."""
    text_field: str = "text"
    """JSON field or parquet column that holds the document."""
    end_of_document: str | None = "<|endoftext|>"
    """Token appended to every document; null appends none."""
    overwrite: bool = False
    """Replace an existing dataset."""
