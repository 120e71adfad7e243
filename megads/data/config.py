"""Settings of the datasets of a run."""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Protocol

from omegaconf import MISSING

from megads.errors import ConfigError
from megads.runtime.registry import READERS
from megads.runtime.url import check_url, is_url

_PROSE = ("txt", "text", "md", "markdown", "rst", "adoc", "org", "tex", "html", "htm", "xml")
_RECORDS = ("jsonl", "ndjson", "json.gz", "json.zst", "parquet")
_CODE = (
    *("py", "pyi", "c", "h", "cc", "cpp", "cxx", "hpp", "hh", "cu", "cuh", "java", "kt", "scala", "swift", "go", "rs"),
    *("js", "mjs", "jsx", "ts", "tsx", "php", "rb", "pl", "pm", "lua", "r", "jl", "hs", "ml", "erl", "ex", "exs"),
    *("clj", "lisp", "el", "cs", "fs", "vb", "dart", "zig", "nim", "sh", "bash", "zsh", "fish", "sql", "css", "scss"),
)
DEFAULT_EXTENSIONS = (*_PROSE, *_RECORDS, *_CODE)
"""Extensions of files that are read from folders: prose and markup, records, code."""


AUTO_ENCODING = "auto"
MAX_REJECTED = 0.05
HELD_OUT = "held_out"
"""Name of the validation set if the config gives none."""


def check_text(section: str, extensions: list[str], encoding: str, max_rejected: float) -> None:
    """Raises ConfigError on an invalid file extension, an unknown text encoding, or a share that is none.

    Args:
        section: config section that holds the keys, with a trailing dot; or empty.
        extensions: file extensions.
        encoding: auto, or the name of an encoding.
        max_rejected: largest share of rejected records.
    """
    if not 0 <= max_rejected <= 1:
        raise ConfigError(f"{section}max_rejected = {max_rejected}: must be a share from 0 to 1")
    wrong = [extension for extension in extensions if not extension.strip(".") or "/" in extension]
    if wrong:
        raise ConfigError(f"{section}extensions: {wrong[0]!r} is not a file extension: want, for example, [txt,md]")
    if encoding == AUTO_ENCODING:
        return
    try:
        # Also rejects bytes-to-bytes codecs. Encoding an empty text would not look the codec up.
        " ".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"{section}encoding = {encoding}: {error}; want auto, or a name that Python knows: utf-8, latin-1, cp1252, "
            "utf-16-le, gb18030, shift_jis, ..."
        ) from error


class RecordFields(Protocol):
    """Fields of a record that make up a document: a text, a prompt and its response, or messages."""

    text_field: str
    prompt_field: str | None
    input_field: str | None
    response_field: str | None
    messages_field: str | None
    chat_template: str | None


def check_fields(section: str, fields: RecordFields) -> None:
    """Raises ConfigError on an incomplete pair, on a pair together with messages, and on a template without messages.

    Args:
        section: config section that holds the keys, with a trailing dot; or empty.
        fields: the values of the keys.
    """
    if (fields.prompt_field is None) != (fields.response_field is None):
        raise ConfigError(
            f"{section}prompt_field = {fields.prompt_field} and {section}response_field = {fields.response_field}: a "
            f"pair needs both; for documents that are not pairs set only {section}text_field"
        )
    if fields.input_field is not None and fields.prompt_field is None:
        raise ConfigError(
            f"{section}input_field = {fields.input_field}: belongs to a prompt; name its field as {section}prompt_field"
        )
    if fields.prompt_field is not None and fields.messages_field is not None:
        raise ConfigError(
            f"{section}prompt_field = {fields.prompt_field} and {section}messages_field = {fields.messages_field}: a "
            "record is a pair or a conversation; leave one of them out"
        )
    if fields.chat_template is not None and fields.messages_field is None:
        raise ConfigError(
            f"{section}chat_template = {fields.chat_template}: makes text of messages; name their field as "
            f"{section}messages_field=messages"
        )


class Weighting(StrEnum):
    """How the weights of a blend are determined."""

    explicit = "explicit"
    tokens = "tokens"
    documents = "documents"
    temperature = "temperature"


class Order(StrEnum):
    """Which algorithm determines the order of the samples."""

    default = "default"
    megatron = "megatron"


@dataclass
class DatasetConfig:
    """One dataset on disk."""

    path: str = MISSING
    """Prefix of <path>.bin and <path>.idx, or the URL of one: s3://bucket/prefix."""
    weight: float | None = None
    """Share of the samples, relative to the other datasets' weights; null unless data.weights=explicit. With
    data.order=megatron a weight also matters for a single dataset: its samples are those of --data-path 1.0 <prefix>,
    with null those of --data-path <prefix>."""
    name: str | None = None
    """Name of its validation set in metrics (valid/<name>/loss); null uses the last part of the path."""
    max_epochs: float | None = None
    """Maximum number of passes over the dataset; null is one for a dataset of a blend, unlimited for a single
    dataset."""

    @property
    def shown_name(self) -> str:
        """The name in metrics."""
        return self.name if self.name is not None else PurePath(self.path).name


@dataclass
class DataPhaseConfig:
    """Other blend weights of the same datasets, starting at a given sample: an item of data.phases."""

    from_sample: int = MISSING
    """Samples before it in the training stream: `samples` in metrics.jsonl, and those that data.skip leaves out."""
    weights: list[float] = field(default_factory=list)
    """One weight per dataset of data.train, in the same order; 0 leaves a dataset out."""


@dataclass
class MixConfig:
    """Blend weights that a run used, starting at a given sample."""

    from_sample: int = MISSING
    """Index of its first sample in the training stream."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights by dataset path."""


@dataclass
class SkipConfig:
    """A range to skip, in the steps or samples of the run with all earlier entries applied."""

    steps: list[int] | None = None
    """[first, last] step as counted in metrics.jsonl, both included in the skipped range."""
    samples: list[int] | None = None
    """[from, to]: the samples between these two values of `samples` in metrics.jsonl."""

    def check(self) -> None:
        """Raises ConfigError unless exactly one non-empty range is given."""
        ranges = [value for value in (self.steps, self.samples) if value is not None]
        shown = f"data.skip: steps = {self.steps}, samples = {self.samples}"
        if len(ranges) != 1 or len(ranges[0]) != 2:
            raise ConfigError(f"{shown}: want one range of one kind, for example data.skip='[{{steps: [501, 700]}}]'")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"{shown}: want [first, last] with 1 <= first <= last")
        if self.samples is not None and not 0 <= self.samples[0] < self.samples[1]:
            raise ConfigError(f"{shown}: want [from, to] with 0 <= from < to")


class PackingMode(StrEnum):
    """How documents are packed into samples."""

    stream = "stream"
    best_fit = "best_fit"


@dataclass
class ReaderConfig:
    """Reader of the raw text files."""

    name: str = field(default="auto", metadata={"choices": ("auto",)})
    """auto selects a reader by the kind of each file; the name of a plugin's reader uses it for all files
    (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's reader, by name."""

    def complete_options(self, key: str) -> None:
        """Checks the settings of the reader and fills in their defaults.

        Args:
            key: config key of this section.

        Raises:
            ConfigError: no such reader, or an invalid setting of it.
        """
        self.options = READERS.complete(self.name, self.options, f"{key}.name", f"{key}.options")


@dataclass
class StreamConfig:
    """Streaming of datasets whose path is a URL (s3://bucket/prefix): blocks are fetched ahead of training."""

    cache_dir: str | None = None
    """Cache folder on a disk of each node, shared by the node's ranks; null is megads-streams-<user id> in the folder
    for temporary files ($TMPDIR)."""
    cache_gib: float = 64.0
    """Maximum size of the cached blocks; the least recently used are evicted first. With a cache as large as the
    dataset, each node fetches the dataset once for all epochs."""
    block_kib: int = 256
    """Size of the blocks that are fetched and cached. Samples of a few KiB are read at random: large blocks need fewer
    requests if the cache holds the dataset, small blocks fetch less unused data if it does not."""
    look_ahead_steps: int = 16
    """Steps whose blocks are requested in advance, limited to half of the cache."""
    connections: int = 8
    """Concurrent requests per rank and dataset."""
    retry_s: float = 300.0
    """How long a failed request is retried before the run ends."""

    def check(self) -> None:
        """Raises ConfigError on a value that is out of range."""
        least = {"block_kib": 4, "look_ahead_steps": 1, "connections": 1, "retry_s": 0}
        for key, value in least.items():
            if not value <= getattr(self, key) < math.inf:
                raise ConfigError(f"data.stream.{key} = {getattr(self, key)}: must be at least {value}")
        if not 16 * self.block_kib * 2**10 <= self.cache_gib * 2**30 < math.inf:
            raise ConfigError(
                f"data.stream.cache_gib = {self.cache_gib:g}: must hold at least 16 blocks of data.stream.block_kib = "
                f"{self.block_kib}"
            )


@dataclass
class DataConfig:
    """Training and validation data: indexed datasets, or raw text that the launcher turns into one."""

    raw: Any = None
    """Raw text, one path or a list: files of any extension, folders, globs. jsonl, csv, tsv and parquet hold one
    document per record, any other file is one document; .gz and .zst are decompressed. The launcher tokenizes it once
    and sets data.train and tokenizer.path."""
    text_field: str = "text"
    """JSON field, or column of a table or parquet file, that holds a document of data.raw."""
    prompt_field: str | None = None
    """With response_field: each record of data.raw is a prompt and its response; the loss is computed on the response,
    including the end-of-document token after it."""
    input_field: str | None = None
    """With prompt_field: field or column that continues the prompt after an empty line, such as `input` in Alpaca's
    format; may be empty or, in JSON, absent."""
    response_field: str | None = None
    """JSON field, or column, of the response."""
    messages_field: str | None = None
    """Alternative to text_field and prompt_field: JSON field of data.raw that holds a conversation, a list of messages
    with role and content; the loss is computed on the assistant's messages."""
    chat_template: str | None = None
    """With messages_field: Jinja file, or tokenizer_config.json, that renders messages as text; null uses the one
    beside tokenizer.path, or a plain "User: ... Assistant: ..."."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that data.raw reads from folders and from globs without an extension, compressed or
    not."""
    encoding: str = AUTO_ENCODING
    """Encoding of the files of data.raw that are not UTF-8, by its Python name, for example cp1252 or latin-1. auto
    reads UTF-8, and UTF-16 and UTF-32 if the first bytes show it; other files are skipped and reported. utf-8 reads
    only UTF-8."""
    max_rejected: float = MAX_REJECTED
    """Largest share of the records of data.raw that may be rejected; above it the command ends with exit code 3 and the
    commonest reasons. Records without text are not counted. Above 0, up to ten rejected records are accepted if most
    records are read."""
    cut_documents: int | None = None
    """Total number of parts into which a corpus of fewer than a hundred documents is cut. null leaves text files whole,
    except for the end of the last one, which data.split holds out for validation, and cuts records into a hundred."""
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """Reader of the files of data.raw."""
    train: list[DatasetConfig] = field(default_factory=list)
    """Datasets to train on: one, or several that are blended."""
    weights: Weighting = Weighting.explicit
    """Weights of a blend: each dataset's own weight (explicit), its number of tokens, its number of documents, or its
    number of tokens to the power of 1 / data.temperature."""
    temperature: float = 1.0
    """With data.weights=temperature: 1 weights by tokens, larger values are more uniform."""
    phases: list[DataPhaseConfig] = field(default_factory=list)
    """Changes of the blend weights, and of nothing else, at given samples (train.phases changes other settings, too);
    every dataset continues where it was."""
    history: list[MixConfig] = field(default_factory=list)
    """Earlier blend weights of the run, filled in by megads train, so that a change of the weights does not affect
    samples before it."""
    order: Order = Order.default
    """default, or megatron: Megatron-LM's index maps and blending, to continue a run of Megatron-LM."""
    megatron_theta: float = 0.80
    """With data.order=megatron: the last epoch is shuffled separately if less than this share of its samples is used;
    0.80 in Megatron-LM, 0.95 in BLOOM's fork."""
    skip: list[SkipConfig] = field(default_factory=list)
    """Ranges of steps or samples to skip, for example [{steps: [501, 700]}]; later samples move up. The numbers of an
    entry are those of the run with all earlier entries applied."""
    valid: Any = None
    """Prefix of a validation dataset, or several by name ({code: <prefix>, web: <prefix>}); null uses the second share
    of data.split."""
    split: list[float] = field(default_factory=lambda: [0.98, 0.02])
    """Shares of each training dataset's documents, in order, for training and validation."""
    cache_dir: str | None = None
    """Cache folder of prepared text and index maps; null is data-cache/ beside the run for text, and for index maps the
    dataset's folder, or the user's cache if that is not writable."""
    stage_to: str | None = None
    """Folder on a disk of each node, for data on a remote filesystem: the datasets are copied there once, checksummed,
    and read from there. An unchanged dataset is not copied again. A copy may take as long as cluster.timeout_s."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """Streaming of datasets whose path is a URL."""
    prefetch_steps: int = 2
    """Steps that the dataloader thread prepares ahead."""
    packing: PackingMode = PackingMode.stream
    """stream: documents are concatenated and cut into samples. best_fit: samples are filled with whole documents; for
    documents of several sequences (prompt, response, and so on) the loss is computed on responses only."""
    document_mask: bool = False
    """A token attends only to its own document; if false, also to earlier documents in the same sample."""
    reset_positions: bool = False
    """Learned and rotary positions restart from 0 in every document, or its part in the sample; if false, in every
    sample. No effect on ALiBi, which uses only distances."""
    balance_documents: bool = False
    """Distribute the samples of each step over data-parallel ranks and micro-batches so that all have a similar number
    of pairs of a query and a key; if false, in order. Requires document_mask; without it all samples have as many."""
    mask_eod: bool = False
    """No training loss on the first token of a document that starts within a sample, because it cannot be predicted
    from the previous document. Megatron's eod_mask_loss, based on the document boundaries in the index. Validation
    counts every token."""

    @property
    def raw_patterns(self) -> list[str]:
        """data.raw as a list; empty if it is not set."""
        if self.raw is None:
            return []
        return [self.raw] if isinstance(self.raw, str) else list(self.raw)

    @property
    def blended(self) -> list[DatasetConfig]:
        """All datasets of the training stream, including those of earlier blends, in a fixed order."""
        named = {item.path: item for item in self.train}
        former = [path for mix in self.history for path in mix.weights]
        if not former:
            return list(self.train)
        unlimited = {path: DatasetConfig(path, max_epochs=1e9) for path in former}
        return list((unlimited | named).values())

    @property
    def paths(self) -> list[str]:
        """Prefixes of all training and validation datasets, without duplicates."""
        return list(dict.fromkeys([item.path for item in self.blended] + list(self.valid_paths.values())))

    def check(self) -> None:
        """Raises ConfigError on a missing dataset or an invalid setting."""
        self._check_source()
        check_text("data.", self.extensions, self.encoding, self.max_rejected)
        if self.cut_documents is not None and self.cut_documents < 2:
            raise ConfigError(f"data.cut_documents = {self.cut_documents}: must be at least 2; null cuts none")
        if len(self.split) != 2 or min(self.split) < 0 or sum(self.split) <= 0 or self.split[0] <= 0:
            raise ConfigError(f"data.split = {self.split}: want two shares [train, valid], train above 0")
        if self.prefetch_steps < 1:
            raise ConfigError(f"data.prefetch_steps = {self.prefetch_steps}: must be at least 1")
        self._check_turns()
        self._check_packing()
        self._check_blend()
        self._check_phases()
        for item in self.skip:
            item.check()
        self._check_valid()
        self._check_urls()

    @property
    def valid_paths(self) -> dict[str, str]:
        """Validation datasets by name; empty if they come from data.split."""
        if self.valid is None:
            return {}
        return {HELD_OUT: self.valid} if isinstance(self.valid, str) else dict(self.valid)

    @property
    def valid_names(self) -> list[str]:
        """Names of the validation sets, in order."""
        if self.valid is not None or self.split[1] == 0:
            return list(self.valid_paths)
        return [self.share_name(item) for item in self.train] if self.raw is None else [HELD_OUT]

    def share_name(self, item: DatasetConfig) -> str:
        """Name of the validation set that data.split holds out from a training dataset."""
        return item.shown_name if len(self.train) > 1 else HELD_OUT

    @property
    def urls(self) -> list[str]:
        """The URLs among `paths`."""
        return [path for path in self.paths if is_url(path)]

    def _check_urls(self) -> None:
        """Checks that URLs can be read and are not copied to nodes."""
        self.stream.check()
        for path in self.urls:
            key = "data.train" if path in [item.path for item in self.train] else "data.valid"
            check_url(path, key, "datasets", read_only=True)
        if self.urls and self.stage_to is not None:
            raise ConfigError(
                f"data.stage_to = {self.stage_to} with {self.urls[0]}: a URL is read through data.stream.cache_dir; "
                "leave data.stage_to out"
            )

    def _check_blend(self) -> None:
        """Checks that weights are given exactly if data.weights=explicit blends datasets, and are in range."""
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
            # A dataset that only a later phase uses has weight 0; `check_config` checks that there is one.
            least_taken = item.weight is not None and 0 <= item.weight < math.inf
            if explicit and (not least_taken or (item.weight == 0 and self.order is Order.megatron)):
                raise ConfigError(
                    f"{where}: weight = {item.weight}: every dataset of a blend needs one above 0; or set "
                    "data.weights=tokens, documents or temperature"
                )
        if explicit and not any(item.weight for item in self.train):
            raise ConfigError("data.train: every weight is 0, so there is no dataset to begin with: set one above 0")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"data.temperature = {self.temperature}: must be above 0")
        if not 0 < self.megatron_theta <= 1:
            raise ConfigError(f"data.megatron_theta = {self.megatron_theta}: must be above 0 and at most 1")

    def _check_phases(self) -> None:
        """Checks that phases are in order with one weight per dataset, and not used with data.order=megatron."""
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
        """Checks that data.valid is a prefix, or prefixes by names that are valid in metrics."""
        if self.valid is None:
            names = [item.shown_name for item in self.train]
            if len(names) > 1 and self.split[1] > 0 and len(set(names)) < len(names):
                raise ConfigError(
                    f"data.train: the names {names} of the validation shares are not distinct: give each dataset a name"
                )
            return
        paths = {HELD_OUT: self.valid} if isinstance(self.valid, str) else self.valid
        if not isinstance(paths, dict) or not paths or not all(isinstance(p, str) and p for p in paths.values()):
            raise ConfigError(
                f"data.valid = {self.valid!r}: want a prefix, or prefixes by name, for example "
                "data.valid='{code: data/code-valid, web: data/web-valid}'"
            )
        for name in paths:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(f"data.valid: the name {name!r} may hold letters, digits and _ . - only")

    def _check_turns(self) -> None:
        """Checks that pairs and conversations use best-fit packing: only it restricts the loss to responses."""
        check_fields("data.", self)
        named = {"response_field": self.response_field, "messages_field": self.messages_field}
        given = next((f"data.{key} = {value}" for key, value in named.items() if value is not None), None)
        if given is None or self.raw is None:
            return
        if self.packing is not PackingMode.best_fit:
            raise ConfigError(
                f"{given} with data.packing = {self.packing}: the loss would include the prompts; set "
                "data.packing=best_fit, data.document_mask=true and data.reset_positions=true, as experiment=sft does"
            )
        if self.cut_documents is not None:
            raise ConfigError(f"{given} with data.cut_documents = {self.cut_documents}: a response needs its prompt")

    def _check_packing(self) -> None:
        """Checks that best-fit packing separates documents and does not use data.order=megatron, and that there are
        pairs to balance."""
        if self.balance_documents and not self.document_mask:
            raise ConfigError(
                "data.balance_documents = true with data.document_mask = false: tokens attend to all earlier ones, and "
                "all samples have as many pairs of a query and a key; set data.document_mask=true, or leave it out"
            )
        if self.packing is not PackingMode.best_fit:
            return
        if not (self.document_mask and self.reset_positions):
            raise ConfigError(
                f"data.packing = best_fit with data.document_mask = {self.document_mask} and data.reset_positions = "
                f"{self.reset_positions}: pairs that share a sample would attend to each other; set both to true"
            )
        if self.order is Order.megatron:
            raise ConfigError(
                "data.packing = best_fit and data.order = megatron: Megatron's order cuts concatenated documents; "
                "use data.order=default or data.packing=stream"
            )

    def _check_source(self) -> None:
        """Checks that either data.raw or data.train is set."""
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


class TextSpecialTokens(StrEnum):
    """How text that spells a special token is tokenized."""

    ignore = "ignore"
    parse = "parse"
