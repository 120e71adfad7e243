"""Settings of `megads tokenizer` and `megads preprocess`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from megads.api import ConfigError, Engine, TextSpecialTokens, import_plugins
from megads.data.config import AUTO_ENCODING, DEFAULT_EXTENSIONS, MAX_REJECTED, ReaderConfig, check_fields, check_text


@dataclass
class TokenizerConfig:
    """`megads tokenizer`: trains a byte-level BPE tokenizer."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl, .csv, .tsv and .parquet hold one document per record ("text"), any other file is
    one document; also .gz or .zst."""
    output: str = "tokenizer.json"
    """Tokenizer file to write, in Hugging Face `tokenizers` format."""
    vocab_size: int = 8192
    """Vocabulary size, including the special tokens."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    text_field: str = "text"
    """JSON field, or column of a table or parquet file, that holds the document."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that are read from folders and from globs without an extension, compressed or not."""
    encoding: str = AUTO_ENCODING
    """Encoding of the files that are not UTF-8, for example cp1252 or latin-1; see data.encoding of megads train."""
    max_rejected: float = MAX_REJECTED
    """Largest share of rejected records; above it the command ends with exit code 3. See data.max_rejected of megads
    train."""
    end_of_document: str = "<|endoftext|>"
    """Special token at the end of every document."""


@dataclass
class PreprocessConfig:
    """`megads preprocess`: turns raw text into an indexed dataset in Megatron's format."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .jsonl, .csv, .tsv and .parquet hold one document per record ("text"), any other file is
    one document; also .gz or .zst; '[-]' reads JSON lines from the standard input."""
    tokenizer: str = MISSING
    """Tokenizer file in Hugging Face `tokenizers` format."""
    output: str = MISSING
    """Prefix of the <output>.bin and <output>.idx to write."""
    text_field: str = "text"
    """JSON field, or column of a table or parquet file, that holds the document."""
    extensions: list[str] = field(default_factory=lambda: list(DEFAULT_EXTENSIONS))
    """Extensions of the files that are read from folders and from globs without an extension, compressed or not."""
    encoding: str = AUTO_ENCODING
    """Encoding of the files that are not UTF-8, for example cp1252 or latin-1; see data.encoding of megads train."""
    max_rejected: float = MAX_REJECTED
    """Largest share of rejected records; above it the command ends with exit code 3. See data.max_rejected of megads
    train."""
    prompt_field: str | None = None
    """With response_field: each record becomes a document of two sequences, for data.packing=best_fit, which computes
    the loss on the second only. The prompt may be empty."""
    input_field: str | None = None
    """With prompt_field: field or column that continues the prompt after an empty line, such as `input` in Alpaca's
    format; may be empty or, in JSON, absent."""
    response_field: str | None = None
    """Field or column of the response, which is trained on; the end-of-document token follows it."""
    messages_field: str | None = None
    """Alternative to text_field and prompt_field: field of JSON lines that holds a conversation, a list of messages
    with role and content. Each becomes a document that alternates between prompts and the assistant's messages."""
    chat_template: str | None = None
    """With messages_field: Jinja file, or tokenizer_config.json, that renders messages as text; null uses the one
    beside the tokenizer, or a plain "User: ... Assistant: ..."."""
    end_of_document: str | None = "<|endoftext|>"
    """Token appended to every document; null appends none."""
    begin_of_document: str | None = None
    """Token before every document, for models that were trained with one, such as `<bos>` of Gemma; null puts none.
    Conversations get neither token: their template writes its own."""
    overwrite: bool = False
    """Replace an existing dataset."""
    text_special_tokens: TextSpecialTokens = TextSpecialTokens.ignore
    """ignore: text that spells a special token is ordinary text. parse: it becomes the token, for text that a chat
    template produced. With parse untrusted text can forge the end of a document or a turn."""
    engine: Engine = Engine.auto
    """hf is Hugging Face tokenizers; fast is gigatoken, checked against hf's ids on documents from all over the input
    and on one document in a thousand; auto uses fast if it is installed and gives the same ids."""
    workers: int | None = None
    """Number of tokenizing processes; null is one per core. The dataset does not depend on it."""
    distributed: bool = False
    """Share the work with all processes that run the same command at the same time, on any nodes that see the same
    folders: an array of SLURM jobs (scripts/slurm/preprocess.sbatch). The dataset does not depend on their number."""
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    """Reader of the input."""
    plugins: list[str] = field(default_factory=list)
    """Your own modules to import, which register data readers (docs/extending.md)."""

    def resolve_plugins(self) -> None:
        """Imports the plugins, checks the settings of the reader and fills in defaults; see `UsesPlugins`."""
        import_plugins(self.plugins)
        self.reader.complete_options("reader")

    def check(self) -> None:
        """Raises ConfigError on an invalid value, on the standard input together with files, and on half a pair."""
        check_fields("", self)
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: must be at least 1; null takes one for every core")
        check_text("", self.extensions, self.encoding, self.max_rejected)
        if self.input == ["-"] and self.encoding not in (AUTO_ENCODING, "utf-8"):
            raise ConfigError(
                f"encoding = {self.encoding}, but the standard input is read as UTF-8: convert it with iconv -f "
                f"{self.encoding}, or give files"
            )
        if self.input == ["-"] and self.distributed:
            raise ConfigError("distributed = true, but the standard input cannot be shared: give files")
        if "-" in self.input and len(self.input) > 1:
            raise ConfigError(f"input = {self.input}: - is the standard input and must stand alone; leave the rest out")
