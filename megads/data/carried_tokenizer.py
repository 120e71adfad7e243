"""The tokenizer of a dataset: `<prefix>.tokenizer.json` beside it, or one given by hand, checked by its sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from megads.data.config import TextSpecialTokens
from megads.data.sidecar import Sidecar, read_sidecar, sidecar_path
from megads.data.tokenizer import load_tokenizer
from megads.errors import DataError
from megads.runtime.files import atomic_writer


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


def write_carried(prefix: str | Path, content: bytes) -> None:
    """Puts a tokenizer beside a dataset; raises DataError where the disk does not take it."""
    path = carried_path(prefix)
    try:
        with atomic_writer(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; free space there") from error


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
        path = _beside(prefix, sidecar)
    if path is None:
        looked = ", ".join(str(carried_path(p)) for p in prefixes) or "a data path in the run's config.yaml"
        raise DataError(f"no tokenizer found (looked for {looked}): give tokenizer=<file>")
    tokenizer = load_tokenizer(path)
    if prefix is not None and sidecar is not None and _sha256(path) != sidecar.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer with which {prefix} was made: its sha256 starts with {_sha256(path)[:8]}, "
            f"{sidecar_path(prefix)} says {sidecar.tokenizer_sha256[:8]}; give tokenizer=<file> with the right one"
        )
    parsed = sidecar is not None and sidecar.text_special_tokens == TextSpecialTokens.parse
    tokenizer.encode_special_tokens = not parsed
    return FoundTokenizer(
        tokenizer,
        path,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        end_of_document_id=sidecar.end_of_document_id if sidecar else None,
        verified=sidecar is not None,
    )


def _beside(prefix: Path, sidecar: Sidecar | None) -> Path | None:
    """The carried tokenizer, or for datasets made before there was one a tokenizer.json in their folder that fits."""
    if carried_path(prefix).is_file():
        return carried_path(prefix)
    neighbour = prefix.parent / "tokenizer.json"
    fits = sidecar is not None and neighbour.is_file() and _sha256(neighbour) == sidecar.tokenizer_sha256
    return neighbour if fits else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
