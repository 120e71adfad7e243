"""What users set of the datasets that a run reads or `megads dataset` works on."""

from __future__ import annotations

import codecs
import math
import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
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
"""Of files that are taken out of folders: prose and markup, records, code."""


AUTO_ENCODING = "auto"
HELD_OUT = "held_out"
"""Name of the validation set where the config gives none."""


def check_text(section: str, extensions: list[str], encoding: str) -> None:
    """Raises ConfigError on extensions or an encoding that say nothing of files of text.

    Args:
        section: of the config that holds the two keys, with a dot at its end; or empty.
        extensions: of files.
        encoding: auto, or a name.
    """
    wrong = [extension for extension in extensions if not extension.strip(".") or "/" in extension]
    if wrong:
        raise ConfigError(f"{section}extensions: {wrong[0]!r} is none: give endings of names, as in [txt,md]")
    if encoding == AUTO_ENCODING:
        return
    try:
        # Python has codecs from bytes to bytes too, and looks none up for an empty text.
        " ".encode(encoding)
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"{section}encoding = {encoding}: {error}; want auto, or a name that Python knows: utf-8, latin-1, cp1252, "
            "utf-16-le, gb18030, shift_jis, ..."
        ) from error


class RecordFields(Protocol):
    """What of a record makes a document: a text, a prompt and its response, or messages."""

    text_field: str
    prompt_field: str | None
    response_field: str | None
    messages_field: str | None
    chat_template: str | None


def check_fields(section: str, fields: RecordFields) -> None:
    """Raises ConfigError on half a pair, on pairs beside messages, and on a template without messages.

    Args:
        section: of the config that holds the keys, with a dot at its end; or empty.
        fields: the keys.
    """
    if (fields.prompt_field is None) != (fields.response_field is None):
        raise ConfigError(
            f"{section}prompt_field = {fields.prompt_field} and {section}response_field = {fields.response_field}: a "
            f"pair needs both; {section}text_field alone names the text of documents that are no pairs"
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
    """Where the weights of a blend come from."""

    explicit = "explicit"
    tokens = "tokens"
    documents = "documents"
    temperature = "temperature"


class Order(StrEnum):
    """Who defines the order of the samples."""

    default = "default"
    megatron = "megatron"


@dataclass
class DatasetConfig:
    """One dataset on disk."""

    path: str = MISSING
    """Prefix of <path>.bin and <path>.idx, or the URL of one: s3://bucket/prefix."""
    weight: float | None = None
    """Share of the samples, relative to the other datasets' weights; null unless data.weights=explicit. In Megatron's
    order a weight matters for a lone dataset too: with one its samples are those of --data-path 1.0 <prefix>, with null
    those of --data-path <prefix>."""
    name: str | None = None
    """Name of its validation share in metrics (valid/<name>/loss); null is the last part of the path."""
    max_epochs: float | None = None
    """Passes over the dataset that the run may take; null is one where it is blended with others, and any number where
    it is alone."""

    @property
    def shown_name(self) -> str:
        """The name in metrics."""
        return self.name if self.name is not None else PurePath(self.path).name


@dataclass
class PhaseConfig:
    """Another mix of the same datasets, from a sample on."""

    from_sample: int = MISSING
    """Samples consumed (`samples` in metrics.jsonl) when it begins."""
    weights: list[float] = field(default_factory=list)
    """One a dataset of data.train, in their order; 0 leaves it out."""


@dataclass
class MixConfig:
    """A mix that a run has had from a sample on."""

    from_sample: int = MISSING
    """Number in the training stream of its first sample."""
    weights: dict[str, float] = field(default_factory=dict)
    """By path."""


@dataclass
class SkipConfig:
    """A range of the training stream to leave out: either steps or samples."""

    steps: list[int] | None = None
    """[first, last] step as counted in metrics.jsonl, both left out."""
    samples: list[int] | None = None
    """[from, to]: what is consumed between these two values of `samples` in metrics.jsonl."""

    def check(self) -> None:
        """Raises ConfigError unless it is exactly one range with something in it."""
        ranges = [value for value in (self.steps, self.samples) if value is not None]
        shown = f"data.skip: steps = {self.steps}, samples = {self.samples}"
        if len(ranges) != 1 or len(ranges[0]) != 2:
            raise ConfigError(f"{shown}: want one range of one kind, for example data.skip='[{{steps: [501, 700]}}]'")
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"{shown}: want [first, last] with 1 <= first <= last")
        if self.samples is not None and not 0 <= self.samples[0] < self.samples[1]:
            raise ConfigError(f"{shown}: want [from, to] with 0 <= from < to")


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
class StreamConfig:
    """How datasets are read whose path is a URL (s3://bucket/prefix): block by block, ahead of the training."""

    cache_dir: str | None = None
    """Folder on a disk of each node for what was read, which the node's ranks share; null is megads-streams-<user id>
    in the folder for temporary files ($TMPDIR)."""
    cache_gib: float = 64.0
    """Most that blocks take there; what was used longest ago goes first. A cache that holds the whole dataset reads it
    once a node, however many epochs are trained."""
    block_kib: int = 256
    """What is fetched and kept together. A sample is a few KiB somewhere in a dataset: large blocks mean few requests
    where the cache holds the dataset, small ones little waste where it does not."""
    look_ahead_steps: int = 16
    """Steps whose blocks are requested before they are needed, as far as they fit into half of the cache."""
    connections: int = 8
    """Requests that a rank makes at a time, for each dataset."""
    retry_s: float = 300.0
    """How long a request that fails is made again, before the run gives up."""

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
    """Training and validation data: indexed datasets, or raw text that the launcher makes one of."""

    raw: Any = None
    """Your own text, a name or a list: files of any extension, folders, globs. jsonl, csv, tsv and parquet hold a
    document a record, other files are one; .gz and .zst are decompressed. The launcher tokenizes it once and fills
    data.train and tokenizer.path."""
    text_field: str = "text"
    """JSON field, or column of a table or of parquet, that holds a document of data.raw."""
    prompt_field: str | None = None
    """With response_field: each record of data.raw is a prompt and its response; the loss counts on the response, which
    the end-of-document token follows."""
    response_field: str | None = None
    """JSON field, or column, of the response."""
    messages_field: str | None = None
    """Instead: JSON field of data.raw that holds a conversation, a list of messages with role and content; the loss
    counts on what the assistant says."""
    chat_template: str | None = None
    """With messages_field: the Jinja file that makes text of messages, or a tokenizer_config.json; null takes what lies
    beside tokenizer.path, or a plain "User: ... Assistant: ..."."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that data.raw takes out of folders, and by globs that spell none, compressed or not."""
    encoding: str = AUTO_ENCODING
    """Of the files of data.raw that are not UTF-8, for example cp1252 or latin-1, by the names that Python knows. auto
    reads UTF-8, and UTF-16 and UTF-32 where the first bytes show it; others are passed over, and named. utf-8 reads
    nothing else."""
    cut_documents: int | None = None
    """Parts into which the documents of a corpus of fewer than a hundred are cut in all. null leaves text files whole,
    but for the end of the last one, which data.split sets aside for validation, and cuts records into a hundred."""
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
    stream: StreamConfig = field(default_factory=StreamConfig)
    """How datasets at a URL are read."""
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
        check_text("data.", self.extensions, self.encoding)
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
        """Validation datasets by name; empty when data.split makes them."""
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
        """Name of the validation set that data.split makes of a training dataset."""
        return item.shown_name if len(self.train) > 1 else HELD_OUT

    @property
    def urls(self) -> list[str]:
        """Those of `paths` that are URLs."""
        return [path for path in self.paths if is_url(path)]

    def _check_urls(self) -> None:
        """Datasets in stores that can be read."""
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
            # 0 is that of a dataset whose time comes with a later mix: `check_config` looks for it.
            least_taken = item.weight is not None and 0 <= item.weight < math.inf
            if explicit and (not least_taken or (item.weight == 0 and self.order is Order.megatron)):
                raise ConfigError(
                    f"{where}: weight = {item.weight}: every dataset of a blend needs one above 0; or set "
                    "data.weights=tokens, documents or temperature"
                )
        if explicit and not any(item.weight for item in self.train):
            raise ConfigError("data.train: every weight is 0, so there is nothing to begin with: give one above 0")
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
        """Pairs and conversations go with best-fit packing, which alone knows what is to be learnt of them."""
        check_fields("data.", self)
        named = {"response_field": self.response_field, "messages_field": self.messages_field}
        given = next((f"data.{key} = {value}" for key, value in named.items() if value is not None), None)
        if given is None or self.raw is None:
            return
        if self.packing is not PackingMode.best_fit:
            raise ConfigError(
                f"{given} with data.packing = {self.packing}: prompts would be learnt like responses; set "
                "data.packing=best_fit, data.document_mask=true and data.reset_positions=true, as experiment=sft does"
            )
        if self.cut_documents is not None:
            raise ConfigError(f"{given} with data.cut_documents = {self.cut_documents}: a response needs its prompt")

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


class TextSpecialTokens(StrEnum):
    """What becomes of special tokens that a text spells out."""

    ignore = "ignore"
    parse = "parse"


class DatasetAction(Enum):
    """What `megads dataset` does."""

    merge = "merge"
    split = "split"
    inspect = "inspect"
    stats = "stats"
    check = "check"


@dataclass
class DatasetActionConfig:
    """`megads dataset`: merges, splits, shows, counts and checks indexed datasets."""

    action: DatasetAction = MISSING
    """What to do; the word alone is enough: megads dataset merge."""
    input: Any = MISSING
    """Prefix of a dataset, or a list of them: <input>.bin and <input>.idx."""
    output: str | None = None
    """Prefix of the dataset to write (merge), of <output>-<part> (split), or a .png file for the histogram (stats)."""
    parts: Any = None
    """Names and shares of the parts of a split, by documents and in their order; null is {train: 0.98, valid: 0.02}."""
    first: int = 0
    """First document to inspect."""
    count: int = 5
    """Documents to inspect."""
    max_characters: int = 500
    """Of each inspected document."""
    tokenizer: str | None = None
    """Tokenizer file to decode with; null is the one beside the dataset."""
    overwrite: bool = False
    """Replace existing datasets."""

    @property
    def prefixes(self) -> list[str]:
        """The datasets as a list."""
        return [self.input] if isinstance(self.input, str) else list(self.input)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts of a split, by name."""
        return {"train": 0.98, "valid": 0.02} if self.parts is None else self.parts

    def check(self) -> None:
        """Raises ConfigError on a missing output, on too many inputs, and on parts or documents that are none."""
        if not isinstance(self.input, str | list) or not self.input or not all(isinstance(x, str) for x in self.input):
            raise ConfigError(f"input = {self.input!r}: want the prefix of a dataset, or a list, as in input='[a, b]'")
        if self.action in (DatasetAction.merge, DatasetAction.split) and not self.output:
            raise ConfigError(f"{self.action.value} needs output=<prefix>")
        if self.action in (DatasetAction.split, DatasetAction.inspect) and len(self.prefixes) != 1:
            raise ConfigError(f"{self.action.value} takes one dataset, input names {len(self.prefixes)}")
        given = self.shares.values() if isinstance(self.shares, dict) else [None]
        if not self.shares or not all(isinstance(share, int | float) and share > 0 for share in given):
            raise ConfigError(
                f"parts = {self.shares}: want names with shares above 0, as in parts='{{train: 9, test: 1}}'"
            )
        if self.first < 0 or self.count < 1 or self.max_characters < 1:
            raise ConfigError(
                f"first = {self.first}, count = {self.count}, max_characters = {self.max_characters}: want a document "
                "from 0 on, and at least one of the others"
            )
        if self.action is DatasetAction.stats and self.output is not None and not self.output.endswith(".png"):
            raise ConfigError(f"output = {self.output}: the picture of stats is a .png file")
