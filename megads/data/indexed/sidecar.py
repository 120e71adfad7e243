"""The files beside a dataset that say how it was made.

`<prefix>.json`, the sidecar, holds its numbers and checksums; `<prefix>.tokenizer.json` is a copy of its tokenizer,
whose sha256 the sidecar knows; `<prefix>.chat_template.jinja`, where the data is conversations, made text of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import xxhash
from tokenizers import Tokenizer

from megads.data.config import TextSpecialTokens
from megads.errors import ConfigError, DataError
from megads.runtime.files import atomic_writer, read_json, read_regular

FORMAT_VERSION = 1
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
KEPT_EXAMPLES = 100
"""Rejected lines of which a sidecar names file, line and reason."""
_PROBE = "A text with 1 number,\n\ta tab, and naïve 漢字 🚀."


@dataclass(frozen=True)
class Sidecar:
    """Facts of one preprocessing."""

    tokenizer_sha256: str
    """Of the tokenizer file."""
    vocab_size: int
    """Rows that an embedding needs for this tokenizer: its largest id + 1."""
    max_token_id: int
    """Largest token in the dataset."""
    end_of_document_id: int | None
    """Token appended to every document, if any."""
    documents: int
    """Documents in the dataset."""
    tokens: int
    """Tokens in the dataset."""
    text_bytes: int
    """Their text in UTF-8."""
    rejected_lines: int
    """Lines of input that gave no document, and whole files."""
    rejected_reasons: dict[str, int]
    """The same by reason."""
    rejected_examples: list[str]
    """File, line and reason of the first of them."""
    input_files: list[str]
    """What was read, in order."""
    bin_checksum: str | None = None
    """XXH3 of the .bin file, 16 hex digits; None where an older version made the dataset."""
    idx_checksum: str | None = None
    """XXH3 of the .idx file."""
    text_special_tokens: str = "ignore"
    """parse where special tokens that the text spelled out became tokens, in all of it or in a part."""
    rejected_files: int = 0
    """How many of rejected_lines are whole files, which are in an encoding that is not known."""
    converted_files: dict[str, str] = field(default_factory=dict)
    """Encodings of the files that were not UTF-8 and were converted."""
    input_identity: str | None = None
    """Hash of the settings and of the names and sizes of the input files; None where they are not files, or an older
    version made the dataset."""
    format_version: int = FORMAT_VERSION
    """Of this file."""


def sidecar_path(prefix: str | Path) -> Path:
    """Returns the sidecar's file of the dataset at `prefix`."""
    return Path(f"{prefix}.json")


def file_checksum(path: Path) -> str:
    """Returns the XXH3 of a file, 16 hex digits; raises DataError where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy the dataset again") from error


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the sidecar; raises DataError where the disk does not take it."""
    path = sidecar_path(prefix)
    try:
        with atomic_writer(path) as file:
            file.write((json.dumps(asdict(sidecar), indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; free space there") from error


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Returns the sidecar, or None for a dataset without one, such as Megatron's own tools make.

    Raises:
        DataError: the file is there and is no sidecar.
    """
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version {version}, only {FORMAT_VERSION} is known")
        known = {item.name for item in fields(Sidecar)}
        return Sidecar(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: is no sidecar of `megads preprocess`: {error}; delete it to use the dataset unchecked, "
            "or make the dataset anew"
        ) from error


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Returns the rows that an embedding needs for a tokenizer: its largest id + 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer file.

    Args:
        path: a file in the format of Hugging Face `tokenizers`.

    Returns:
        The tokenizer, with truncation and padding off: either would change documents silently.

    Raises:
        DataError: the file is missing, is no tokenizer, or one that fails on any text.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such tokenizer file; make one with `megads tokenizer input=<files> output={path}`")
    with tokenizing(path):
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Much of what is wrong with a file shows at its first use only.
        tokenizer.decode(tokenizer.encode(_PROBE).ids)
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{path}: the tokenizer has no tokens; make one with `megads tokenizer`")
    return tokenizer


@contextmanager
def tokenizing(path: str | Path) -> Iterator[None]:
    """Names the file of a tokenizer that cannot be read, or fails on a text.

    A pattern that takes too many steps on some text, or a part that refers to nothing, makes the library panic. A panic
    is a BaseException, of a class that cannot be imported, and would pass every handler.

    Args:
        path: the tokenizer file.

    Raises:
        DataError: in place of what the library raises.
    """
    try:
        yield
    except BaseException as error:
        # The library raises nothing more special than Exception itself.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: is not a tokenizer file of Hugging Face `tokenizers`, or is damaged: {error}; "
            "copy it again or make it anew with `megads tokenizer`"
        ) from error


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer and what is known of it.

    Attributes:
        tokenizer: encodes text that spells a special token as the dataset's was: as ordinary text, or with
            text_special_tokens=parse as the token.
        path: its file.
        vocab_size: its largest id + 1.
        end_of_document_id: token that ends every document of the dataset, None where no sidecar tells.
        verified: a dataset's sidecar names this very file.
    """

    tokenizer: Tokenizer
    path: Path
    vocab_size: int
    end_of_document_id: int | None
    verified: bool


def carried_path(prefix: str | Path) -> Path:
    """Returns the file in which the dataset at `prefix` carries its tokenizer."""
    return Path(f"{prefix}.tokenizer.json")


def write_carried(prefix: str | Path, content: bytes, chat_template: str | None = None) -> None:
    """Puts a tokenizer beside a dataset, and the chat template of conversations.

    Raises:
        DataError: the disk does not take it.
    """
    path = carried_path(prefix)
    try:
        with atomic_writer(path) as file:
            file.write(content)
        if chat_template is None:
            template_path(path).unlink(missing_ok=True)
            return
        with atomic_writer(template_path(path)) as file:
            file.write(chat_template.encode())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; free space there") from error


def template_path(tokenizer_file: Path) -> Path:
    """Returns the file in which a tokenizer carries its chat template."""
    prefix = tokenizer_file.name.removesuffix("tokenizer.json")
    return tokenizer_file.with_name(f"{prefix}{TEMPLATE_FILE}")


def template_beside(tokenizer_file: Path) -> str | None:
    """Returns the chat template that comes with a tokenizer, None where none does.

    Raises:
        ConfigError: it cannot be read.
    """
    config = tokenizer_file.with_name(TOKENIZER_CONFIG_FILE)
    try:
        if (path := template_path(tokenizer_file)).is_file():
            return path.read_text(encoding="utf-8")
        content = read_json(config) if config.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template beside {tokenizer_file} cannot be read: {error}") from error
    found = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def find_tokenizer(prefixes: Sequence[Path], given: str | None) -> FoundTokenizer:
    """Finds the tokenizer with which datasets were made.

    Args:
        prefixes: places where the dataset of a run may be, best first; the first with a sidecar or tokenizer counts.
        given: a tokenizer file to use instead; it must be the same one wherever a sidecar can tell.

    Raises:
        DataError: there is none, it is damaged, or it is another one than the dataset's.
    """
    prefix = next((p for p in prefixes if sidecar_path(p).is_file() or carried_path(p).is_file()), None)
    sidecar = None if prefix is None else read_sidecar(prefix)
    path = Path(given) if given is not None else None
    if path is None and prefix is not None:
        path = tokenizer_beside(prefix, sidecar)
    if path is None:
        looked = ", ".join(str(carried_path(p)) for p in prefixes) or "a data path in the run's config.yaml"
        raise DataError(f"no tokenizer found (looked for {looked}): give tokenizer=<file>")
    tokenizer = load_tokenizer(path)
    if prefix is not None and sidecar is not None and (found := tokenizer_sha256(path)) != sidecar.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer with which {prefix} was made: its sha256 starts with {found[:8]}, "
            f"{sidecar_path(prefix)} says {sidecar.tokenizer_sha256[:8]}; give tokenizer=<file> with the right one"
        )
    parsed = sidecar is not None and sidecar.text_special_tokens == TextSpecialTokens.parse
    tokenizer.encode_special_tokens = not parsed
    return FoundTokenizer(
        tokenizer,
        path,
        vocab_size=embedding_rows(tokenizer),
        end_of_document_id=sidecar.end_of_document_id if sidecar else None,
        verified=sidecar is not None,
    )


def tokenizer_beside(prefix: Path, sidecar: Sidecar | None) -> Path | None:
    """Returns the carried tokenizer; for a dataset made before there was one, a tokenizer.json beside it that fits."""
    if carried_path(prefix).is_file():
        return carried_path(prefix)
    neighbour = prefix.parent / "tokenizer.json"
    fits = sidecar is not None and neighbour.is_file() and tokenizer_sha256(neighbour) == sidecar.tokenizer_sha256
    return neighbour if fits else None


def tokenizer_sha256(path: Path) -> str:
    """Returns the sha256 of a tokenizer file, by which it is known."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: the tokenizer cannot be read: {error.strerror}; copy it again") from error
