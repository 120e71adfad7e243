"""Which data a run reads, and how raw text becomes data."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from megads.errors import ConfigError


@dataclass
class DatasetConfig:
    """One dataset on disk."""

    path: str = MISSING
    """Prefix of <path>.bin and <path>.idx."""


@dataclass
class DataConfig:
    """Training and validation data."""

    train: list[DatasetConfig] = field(default_factory=list)
    """Datasets to train on; one for now."""
    valid: str | None = None
    """Prefix of a validation dataset; null takes the second share of data.split."""
    split: list[float] = field(default_factory=lambda: [0.98, 0.02])
    """Shares of the training dataset's documents, in order, for training and validation."""
    cache_dir: str | None = None
    """Where index maps are cached; null is beside the dataset, or the user's cache where that is not writable."""
    prefetch_steps: int = 2
    """Steps that the loader thread prepares ahead."""

    def check(self) -> None:
        """Raises ConfigError on a missing dataset or a split that is none."""
        if len(self.train) != 1:
            raise ConfigError(
                f"data.train has {len(self.train)} datasets: give exactly one, for example "
                "data.train='[{path: data/corpus}]' (blends of several are not built yet)"
            )
        if len(self.split) != 2 or min(self.split) < 0 or sum(self.split) <= 0 or self.split[0] <= 0:
            raise ConfigError(f"data.split = {self.split}: want two shares [train, valid], train above 0")
        if self.prefetch_steps < 1:
            raise ConfigError(f"data.prefetch_steps = {self.prefetch_steps}: must be at least 1")


@dataclass
class TokenizerConfig:
    """`megads tokenizer`: trains a byte-level BPE tokenizer."""

    input: list[str] = field(default_factory=list)
    """JSONL files (a "text" field a line) or .txt files (one document each); globs allowed."""
    output: str = "tokenizer.json"
    """The tokenizer file to write, in Hugging Face `tokenizers` format."""
    vocab_size: int = 8192
    """Tokens to learn, the special ones included."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    text_field: str = "text"
    """JSON field that holds the document."""
    end_of_document: str = "<|endoftext|>"
    """Special token that ends every document."""


@dataclass
class PreprocessConfig:
    """`megads preprocess`: turns raw text into an indexed dataset in Megatron's format."""

    input: list[str] = field(default_factory=list)
    """JSONL files (a "text" field a line) or .txt files (one document each); globs allowed."""
    tokenizer: str = MISSING
    """Tokenizer file in Hugging Face `tokenizers` format."""
    output: str = MISSING
    """Prefix of the <output>.bin and <output>.idx to write."""
    text_field: str = "text"
    """JSON field that holds the document."""
    end_of_document: str | None = "<|endoftext|>"
    """Token appended to every document; null appends none."""
    overwrite: bool = False
    """Replace an existing dataset."""
