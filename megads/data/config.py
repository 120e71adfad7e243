"""Which data a run reads, and how raw text becomes data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from megads.data.blend_config import DatasetConfig, MixConfig, Order, PhaseConfig, SkipConfig, Weighting
from megads.errors import ConfigError
from megads.runtime.registry import READERS, import_plugins

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


class PackingMode(StrEnum):
    """How documents become samples."""

    stream = "stream"
    best_fit = "best_fit"


@dataclass
class ReaderConfig:
    """What reads the files of raw text."""

    name: str = field(default="auto", metadata={"choices": ("auto",)})
    """auto goes by the kind of each file; else the name of a reader that a plugin registers, for all files
    (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's reader, by their names."""

    def settle(self, key: str) -> None:
        """Checks and completes the settings of the reader.

        Args:
            key: the section of the config that this is.

        Raises:
            ConfigError: there is no such reader, or a setting does not fit it.
        """
        self.options = READERS.complete(self.name, self.options, f"{key}.name", f"{key}.options")


@dataclass
class DataConfig:
    """Training and validation data: indexed datasets, or raw text that the launcher makes one of."""

    raw: Any = None
    """Your own text, a name or a list: files, folders, globs of txt, md, jsonl (also .gz, .zst) and parquet. The
    launcher tokenizes it once and fills data.train and tokenizer.path."""
    text_field: str = "text"
    """JSON field or parquet column of data.raw that holds the document."""
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """What reads the files of data.raw."""
    train: list[DatasetConfig] = field(default_factory=list)
    """Datasets to train on: one, or several that are blended."""
    weights: Weighting = Weighting.explicit
    """Where a blend's weights come from: each dataset's own weight (explicit), its tokens, its documents, or its tokens
    to the power of 1 / data.temperature."""
    temperature: float = 1.0
    """With data.weights=temperature: 1 is by tokens, larger is more even."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """Other weights from given samples on; every dataset goes on where it was."""
    history: list[MixConfig] = field(default_factory=list)
    """Mixes that a run had before its mix was changed: megads train fills it in, so that a change counts from where it
    was made."""
    order: Order = Order.default
    """default, or megatron: Megatron-LM's own index maps and blending, for continuing a run of it."""
    megatron_theta: float = 0.80
    """With data.order=megatron: the last epoch is shuffled apart when it gives fewer than this share of its samples;
    0.80 in Megatron-LM, 0.95 in BLOOM's fork."""
    skip: list[SkipConfig] = field(default_factory=list)
    """Ranges of steps or samples to leave out, for example [{steps: [501, 700]}]; what follows moves up. Each is
    counted as the run counts with the entries before it."""
    valid: Any = None
    """Prefix of a validation dataset, or several by name ({code: <prefix>, web: <prefix>}); null takes the second share
    of data.split."""
    split: list[float] = field(default_factory=lambda: [0.98, 0.02])
    """Shares of each training dataset's documents, in order, for training and validation."""
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

    @property
    def blended(self) -> list[DatasetConfig]:
        """All datasets that the training stream has samples of, those of a mix before it included, in a fixed order."""
        named = {item.path: item for item in self.train}
        former = [path for mix in self.history for path in mix.weights]
        if not former:
            return list(self.train)
        unlimited = {path: DatasetConfig(path, max_epochs=1e9) for path in former}
        return list((unlimited | named).values())

    @property
    def paths(self) -> list[str]:
        """Prefixes of all datasets, for training and validation, each once."""
        return list(dict.fromkeys([item.path for item in self.blended] + list(self.valid_paths.values())))

    def check(self) -> None:
        """Raises ConfigError on a missing dataset or a split that is none."""
        self._check_source()
        if len(self.split) != 2 or min(self.split) < 0 or sum(self.split) <= 0 or self.split[0] <= 0:
            raise ConfigError(f"data.split = {self.split}: want two shares [train, valid], train above 0")
        if self.prefetch_steps < 1:
            raise ConfigError(f"data.prefetch_steps = {self.prefetch_steps}: must be at least 1")
        self._check_packing()
        self._check_blend()
        self._check_phases()
        for item in self.skip:
            item.check()
        self._check_valid()

    @property
    def valid_paths(self) -> dict[str, str]:
        """Validation datasets by name; empty when data.split makes them."""
        if self.valid is None:
            return {}
        return {"held_out": self.valid} if isinstance(self.valid, str) else dict(self.valid)

    def _check_blend(self) -> None:
        """Weights where they are wanted, and only there."""
        explicit = self.weights is Weighting.explicit and len(self.train) > 1
        for place, item in enumerate(self.train):
            where = f"data.train[{place}] ({item.path})"
            if item.max_epochs is not None and not 0 < item.max_epochs < math.inf:
                raise ConfigError(f"{where}: max_epochs = {item.max_epochs}: must be above 0")
            if item.weight is not None and self.weights is not Weighting.explicit:
                raise ConfigError(
                    f"{where}: weight = {item.weight}, but data.weights = {self.weights.value} computes the weights: "
                    "leave one of them out"
                )
            if explicit and (item.weight is None or not 0 < item.weight < math.inf):
                raise ConfigError(
                    f"{where}: weight = {item.weight}: every dataset of a blend needs one above 0; or set "
                    "data.weights=tokens, documents or temperature"
                )
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"data.temperature = {self.temperature}: must be above 0")
        if not 0 < self.megatron_theta <= 1:
            raise ConfigError(f"data.megatron_theta = {self.megatron_theta}: must be above 0 and at most 1")

    def _check_phases(self) -> None:
        """Phases in order, with a weight a dataset; none in Megatron's order, which knows one mix."""
        before = 0
        for place, phase in enumerate(self.phases):
            where = f"data.phases[{place}]"
            if phase.from_sample <= before:
                raise ConfigError(
                    f"{where}.from_sample = {phase.from_sample}: must be above {before}, where the mix before it starts"
                )
            weights = phase.weights
            if len(weights) != len(self.train) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
                raise ConfigError(
                    f"{where}.weights = {weights}: want {len(self.train)}, one for each dataset of data.train, none "
                    "negative and one above 0"
                )
            before = phase.from_sample
        if self.phases and self.order is Order.megatron:
            raise ConfigError(
                "data.phases is set and data.order = megatron: Megatron's order has one mix for the whole run; use "
                "data.order=default"
            )

    def _check_valid(self) -> None:
        """A prefix, or prefixes by names that metrics can hold."""
        if self.valid is None:
            names = [item.shown_name for item in self.train]
            if len(names) > 1 and self.split[1] > 0 and len(set(names)) < len(names):
                raise ConfigError(
                    f"data.train: the names {names} of the validation shares are not distinct: give each dataset a name"
                )
            return
        paths = {"held_out": self.valid} if isinstance(self.valid, str) else self.valid
        if not isinstance(paths, dict) or not paths or not all(isinstance(p, str) and p for p in paths.values()):
            raise ConfigError(
                f"data.valid = {self.valid!r}: want a prefix, or prefixes by name, for example "
                "data.valid='{code: data/code-valid, web: data/web-valid}'"
            )
        for name in paths:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(f"data.valid: the name {name!r} may hold letters, digits and _ . - only")

    def _check_packing(self) -> None:
        """Best-fit packing wants documents apart, and an order of its own."""
        if self.packing is not PackingMode.best_fit:
            return
        if not (self.document_mask and self.reset_positions):
            raise ConfigError(
                f"data.packing = best_fit with data.document_mask = {self.document_mask} and data.reset_positions = "
                f"{self.reset_positions}: pairs that share a sample would read each other; set both to true"
            )
        if self.order is Order.megatron:
            raise ConfigError(
                "data.packing = best_fit and data.order = megatron: Megatron's order cuts documents laid end to end; "
                "use data.order=default or data.packing=stream"
            )

    def _check_source(self) -> None:
        """Exactly one of raw text and a dataset."""
        if self.raw is None:
            if not self.train:
                raise ConfigError(
                    "data.train has 0 datasets: give one, for example data.train='[{path: data/corpus}]', several with "
                    "weights, or your own text, for example data.raw='my/*.jsonl'"
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


class Engine(StrEnum):
    """What tokenizes."""

    auto = "auto"
    hf = "hf"
    fast = "fast"


class TextSpecialTokens(StrEnum):
    """What becomes of special tokens that a text spells out."""

    ignore = "ignore"
    parse = "parse"


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
    .parquet; '[-]' reads JSON lines from the standard input."""
    tokenizer: str = MISSING
    """Tokenizer file in Hugging Face `tokenizers` format."""
    output: str = MISSING
    """Prefix of the <output>.bin and <output>.idx to write."""
    text_field: str = "text"
    """JSON field or parquet column that holds the document."""
    prompt_field: str | None = None
    """With response_field: each record becomes a document of two sequences, for data.packing=best_fit, where the loss
    counts on the second only. May be empty text."""
    response_field: str | None = None
    """The field or column of what is learnt; the end-of-document token follows it."""
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
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """What reads the input."""
    plugins: list[str] = field(default_factory=list)
    """Modules of your own to import, which register data readers (docs/extending.md)."""

    def settle_plugins(self) -> None:
        """Imports the plugins, and checks and completes the settings of the reader; see `UsesPlugins`."""
        import_plugins(self.plugins)
        self.reader.settle("reader")

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a record that hold its text."""
        if self.prompt_field is None or self.response_field is None:
            return (self.text_field,)
        return self.prompt_field, self.response_field

    def check(self) -> None:
        """Raises ConfigError on no workers, on the standard input beside files, and on half a pair."""
        if (self.prompt_field is None) != (self.response_field is None):
            raise ConfigError(
                f"prompt_field = {self.prompt_field} and response_field = {self.response_field}: a pair needs both; "
                "text_field alone names the text of documents that are no pairs"
            )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: must be at least 1; null takes one for every core")
        if "-" in self.input and len(self.input) > 1:
            raise ConfigError(f"input = {self.input}: - is the standard input and must stand alone; leave the rest out")
