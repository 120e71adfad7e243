"""A run's own tokenizer: tokenizer.json in the run directory, a copy of the one with which its data was made.

Checkpoints refer to it by its sha256. If a run continues with another tokenizer (run.allow_changes=[tokenizer]), the
previous copy is kept for its earlier checkpoints.

A run that starts from an imported Hugging Face model also keeps the files of its folder that describe tokenizer and
generation, unchanged, in `hugging_face/`. `megads export` starts from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict
from tokenizers import Tokenizer

from megads.data.config import TextSpecialTokens
from megads.data.indexed.sidecar import (
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    FoundTokenizer,
    carried_path,
    embedding_rows,
    load_tokenizer,
    named_tokens,
    own_template,
    read_settings,
    read_sidecar,
    template_path,
    tokenizer_beside,
    tokenizer_sha256,
)
from megads.errors import ConfigError, DataError
from megads.runtime.files import atomic_writer
from megads.runtime.run_dir import HUGGING_FACE_FOLDER, TOKENIZER_FILE, kept_tokenizer_path

MODEL_CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
TOKENIZER_SETTINGS = (
    *(TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE, "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json"),
)
"""Files of a Hugging Face folder that describe the tokenizer, except tokenizer.json. Other files are not kept:
adapter_config.json or code, for example, would change what transformers loads from an export."""


@dataclass(frozen=True)
class TokenizerRecord:
    """Identity of a tokenizer, as recorded by a run and its checkpoints.

    Attributes:
        sha256: sha256 of the tokenizer file.
        vocab_size: its largest id + 1.
        end_of_document_id: token that ends every document of the data; None if there is none, or if no sidecar records
            it.
        text_special_tokens: how text that spells special tokens was tokenized; None if no sidecar records it.
        template_tokens: bos_token and eos_token of the chat template that rendered the data; empty if there is none.
        adds_special_tokens: whether the texts of the training had the special tokens that the tokenizer's
            post-processor adds, such as Llama's BOS: true of models imported from Hugging Face.
        begin_of_document_id: token before every document of the data; None if there is none.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    sha256: str
    vocab_size: int
    end_of_document_id: int | None
    text_special_tokens: str | None
    template_tokens: dict[str, str] = field(default_factory=dict)
    adds_special_tokens: bool = False
    begin_of_document_id: int | None = None

    def __str__(self) -> str:
        return f"sha256 {self.sha256[:12]}, {self.vocab_size:,} tokens"


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer that a run can copy.

    Attributes:
        record: identity of the tokenizer.
        content: content of its file; None if a sidecar names it and the file is missing.
        chat_template: chat template of the tokenizer or of the data's conversations; None if there is none.
    """

    record: TokenizerRecord
    content: bytes | None
    chat_template: str | None = None

    def gives_the_ids_of(self, other: TokenizerSource) -> bool:
        """Whether both have the same id for every token; False if a file is missing."""
        if self.record.sha256 == other.record.sha256:
            return True
        if self.content is None or other.content is None:
            return False
        vocabularies = (Tokenizer.from_str(content.decode()).get_vocab() for content in (self.content, other.content))
        return next(vocabularies) == next(vocabularies)


def tokenizer_of_data(prefixes: Sequence[str], given: str | None) -> TokenizerSource | None:
    """Finds the tokenizer with which a run's data was made.

    Args:
        prefixes: prefixes of its datasets; the first with a sidecar is used, since all were made with one tokenizer.
        given: tokenizer.path, used if there is no sidecar.

    Returns:
        The tokenizer; None if it is unknown.

    Raises:
        DataError: a sidecar or a tokenizer is damaged.
    """
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None:
            continue
        record = TokenizerRecord(
            sidecar.tokenizer_sha256,
            sidecar.vocab_size,
            sidecar.end_of_document_id,
            str(sidecar.text_special_tokens),
            sidecar.template_tokens,
            begin_of_document_id=sidecar.begin_of_document_id,
        )
        files = (Path(given) if given is not None else None, tokenizer_beside(Path(prefix), sidecar))
        fits = (path for path in files if path is not None and tokenizer_sha256(path) == record.sha256)
        path = next(fits, None)
        template = own_template(carried_path(prefix)) or (None if path is None else own_template(path))
        return TokenizerSource(record, None if path is None else path.read_bytes(), template)
    if given is None:
        return None
    rows = embedding_rows(load_tokenizer(given))
    record = TokenizerRecord(tokenizer_sha256(Path(given)), rows, None, None)
    return TokenizerSource(record, Path(given).read_bytes(), own_template(Path(given)))


def keep_tokenizer(run_dir: Path, source: TokenizerSource) -> None:
    """Copies a tokenizer and its chat template into the run directory; a different previous tokenizer is kept."""
    path = run_dir / TOKENIZER_FILE
    if source.chat_template is not None:
        with atomic_writer(template_path(path)) as file:
            file.write(source.chat_template.encode())
    if path.is_file():
        before = tokenizer_sha256(path)
        if before == source.record.sha256:
            return
        path.replace(kept_tokenizer_path(run_dir, before))
        if (files := run_dir / HUGGING_FACE_FOLDER).is_dir():
            files.rename(files.with_name(f"{HUGGING_FACE_FOLDER}.{before[:16]}"))
    if source.content is not None:
        with atomic_writer(path) as file:
            file.write(source.content)


def keep_hugging_face_files(folder: Path, run_dir: Path, names: Sequence[str]) -> None:
    """Copies files of a Hugging Face model to a run; those that are there already stay.

    Args:
        folder: folder of the model, or `hugging_face/` of another run.
        run_dir: run directory.
        names: names of the files; missing ones are skipped.
    """
    kept = run_dir / HUGGING_FACE_FOLDER
    for name in names:
        if (folder / name).is_file():
            kept.mkdir(exist_ok=True)
            _copy_if_missing(folder / name, kept / name)


def keep_files_of_run(origin: Path, run_dir: Path) -> None:
    """Copies the chat template and the Hugging Face files of the run that another run starts from.

    Args:
        origin: run directory of the former.
        run_dir: run directory of the latter, which may have the chat template of its own conversations.
    """
    if (template := template_path(origin / TOKENIZER_FILE)).is_file():
        _copy_if_missing(template, run_dir / template.name)
    names = (MODEL_CONFIG_FILE, GENERATION_FILE, *TOKENIZER_SETTINGS)
    keep_hugging_face_files(origin / HUGGING_FACE_FOLDER, run_dir, names)


def _copy_if_missing(path: Path, copy: Path) -> None:
    if not copy.exists():
        with path.open("rb") as source, atomic_writer(copy) as target:
            shutil.copyfileobj(source, target)


def hugging_face_settings(run_dir: Path, name: str) -> dict[str, Any]:
    """Returns the content of a JSON file of the model that a run started from; empty if there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    path = run_dir / HUGGING_FACE_FOLDER / name
    try:
        return read_settings(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def token_ids(value: object) -> list[int]:
    """Returns the ids of an `eos_token_id`, which is a number, a list of numbers or null."""
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]


def kept_tokenizer(run_dir: Path, sha256: str) -> Path | None:
    """Returns the run's copy of a tokenizer; None if it has none.

    Raises:
        DataError: tokenizer.json is a different tokenizer.
    """
    own = run_dir / TOKENIZER_FILE
    for path in (own, kept_tokenizer_path(run_dir, sha256)):
        if path.is_file() and tokenizer_sha256(path) == sha256:
            return path
    if own.is_file():
        raise DataError(
            f"{own}: its sha256 starts with {tokenizer_sha256(own)[:12]}, but the run was trained with {sha256[:12]}: "
            "its ids would mean other text with this one; restore the right one, or remove this file if the data is "
            "available, which has a copy"
        )
    return None


def source_of_run(run_dir: Path, record: TokenizerRecord) -> TokenizerSource:
    """Returns a run's tokenizer for use by another run; raises DataError as `kept_tokenizer` does."""
    path = kept_tokenizer(run_dir, record.sha256)
    return TokenizerSource(record, *((None, None) if path is None else (path.read_bytes(), own_template(path))))


def open_run_tokenizer(
    run_dir: Path, record: TokenizerRecord, given: str | None, prefixes: Sequence[Path]
) -> FoundTokenizer:
    """Opens the tokenizer that a checkpoint was trained with.

    Args:
        run_dir: run directory.
        record: the checkpoint's record of its tokenizer.
        given: tokenizer file to use; it must be the same tokenizer.
        prefixes: possible prefixes of the run's data, whose copy is used if the run has none.

    Raises:
        DataError: the tokenizer is missing, or the one found is different.
    """
    if given is not None:
        path: Path | None = Path(given)
        if not Path(given).is_file():
            raise DataError(f"tokenizer = {given}: there is no such file")
        if (found := tokenizer_sha256(Path(given))) != record.sha256:
            raise DataError(
                f"{given} is not the tokenizer that {run_dir} was trained with: its sha256 starts with {found[:12]}, "
                f"the checkpoint says {record.sha256[:12]}; give tokenizer=<file> with the right one, or leave it out"
            )
    else:
        path = kept_tokenizer(run_dir, record.sha256)
    carried = (carried_path(prefix) for prefix in prefixes)
    path = path or next((p for p in carried if p.is_file() and tokenizer_sha256(p) == record.sha256), None)
    if path is None:
        raise DataError(
            f"no tokenizer found: {run_dir / TOKENIZER_FILE} is missing and the run's data is not here; give "
            f"tokenizer=<file>, whose sha256 starts with {record.sha256[:12]}"
        )
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = record.text_special_tokens != TextSpecialTokens.parse
    settings = (hugging_face_settings(run_dir, name) for name in (MODEL_CONFIG_FILE, GENERATION_FILE))
    ends = (end for content in settings for end in token_ids(content.get("eos_token_id")))
    return FoundTokenizer(
        tokenizer,
        path,
        vocab_size=embedding_rows(tokenizer),
        end_of_document_id=record.end_of_document_id,
        verified=record.text_special_tokens is not None,
        template_tokens=record.template_tokens or named_tokens(run_dir / TOKENIZER_FILE),
        end_ids=tuple(dict.fromkeys(ends)),
        adds_special_tokens=record.adds_special_tokens,
        begin_of_document_id=record.begin_of_document_id,
    )
