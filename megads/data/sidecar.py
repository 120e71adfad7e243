"""`<prefix>.json`, which says how the dataset beside it was made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from megads.errors import DataError
from megads.runtime.files import atomic_writer, read_json

FORMAT_VERSION = 1
_BLOCK_BYTES = 1 << 22


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
    """Lines of input that gave no document."""
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
    format_version: int = FORMAT_VERSION
    """Of this file."""


def sidecar_path(prefix: str | Path) -> Path:
    """Returns the sidecar's file of the dataset at `prefix`."""
    return Path(f"{prefix}.json")


def file_checksum(path: Path) -> str:
    """Returns the XXH3 of a file, 16 hex digits; raises DataError where it cannot be read."""
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy the dataset again") from error
    return str(digest.hexdigest())


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
        known = {field.name for field in fields(Sidecar)}
        return Sidecar(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: is no sidecar of `megads preprocess`: {error}; delete it to use the dataset unchecked, "
            "or make the dataset anew"
        ) from error
