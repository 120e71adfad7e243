"""Documents that another program reads in several ranks: each rank tokenizes its own, and one process joins them.

Documents are ordered by the names of their files, and within a file in the order in which the rank received them. So
the dataset does not depend on the number of ranks if each file is read by one rank from beginning to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megads.api import ConfigError, DataError, Engine, Sidecar, atomic_writer, read_json, read_sidecar, reason_of
from megads.tools.prepare.block_tokenizer import (
    BlockTokenizer,
    DatasetShard,
    TokenizeSettings,
    open_shard,
    shard_path,
)
from megads.tools.prepare.blocks import LARGEST_FED_BYTES, Rows
from megads.tools.prepare.records import NoDocument
from megads.tools.prepare.rejections import RejectedLine
from megads.tools.prepare.text import Document
from megads.tools.prepare.tokenizing import Tokenizing, commit_marker_path, parts_path

_FIELDS = ("text",)


class ExternalDocument(NamedTuple):
    """A document from another program.

    Attributes:
        text: the text; a value that is not text is counted and skipped.
        identity: name of the document, for messages.
        file: file from which it was read; empty if unknown.
    """

    text: str
    identity: str
    file: str


class DocumentRank:
    """One of several ranks that tokenize documents for one dataset.

    Args:
        tokenizing: the tokenizer and the output.
        engine: tokenizer implementation.
        rank: index of this rank.
        num_ranks: number of ranks.

    Attributes:
        num_tokens: number of tokens so far.

    Raises:
        ConfigError: the engine cannot be used.
        DataError: the folder cannot be written to.
    """

    def __init__(self, tokenizing: Tokenizing, engine: Engine, rank: int, num_ranks: int) -> None:
        settings = _settings(tokenizing, engine)
        self._folder = _folder(tokenizing.output, settings, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _record_path(self._folder, rank).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(
                f"{self._folder}: writing failed: {reason_of(error)}; free space or permissions there"
            ) from error
        self._tokenizer = BlockTokenizer(settings, self._folder)
        self._pending: list[Document | RejectedLine] = []
        self._pending_bytes = self._documents = self.num_tokens = 0
        self._files: list[str] = []
        self._left: set[str] = set()
        self._file = ""

    def add(self, document: ExternalDocument) -> None:
        """Adds the next document.

        Raises:
            DataError: the disk is full, or the documents of a file are not consecutive.
        """
        if document.file != self._file and self._documents:
            self._write()
            self._left.add(self._file)
            if document.file in self._left:
                raise DataError(
                    f"document {document.identity}: other documents of {document.file} came before those of "
                    f"{self._file}. Is this the file that it was read from? Where the records have a field file_path "
                    "of their own, give order='rank'"
                )
        self._file = document.file
        self._documents += 1
        self._pending.append(self._row(document))
        self._pending_bytes += len(document.text)
        if self._pending_bytes >= LARGEST_FED_BYTES:
            self._write()

    def finish(self) -> None:
        """Writes the remaining documents, and marks the rank as complete.

        Raises:
            DataError: the disk is full.
        """
        self._write()
        try:
            with atomic_writer(_record_path(self._folder, self._rank)) as file:
                file.write(json.dumps({"files": self._files, "tokens": self.num_tokens}).encode())
        except OSError as error:
            raise DataError(
                f"{self._folder}: writing failed: {reason_of(error)}; free space or permissions there"
            ) from error

    def _row(self, document: ExternalDocument) -> Document | RejectedLine:
        try:
            document.text.encode()
        except UnicodeEncodeError:
            return RejectedLine(document.identity, self._documents, NoDocument("not Unicode: half a surrogate pair"))
        if not document.text:
            return RejectedLine(document.identity, self._documents, NoDocument("empty text"))
        return Document(document.text, document.identity, self._documents)

    def _write(self) -> None:
        if not self._pending:
            return
        path = shard_path(self._folder, self._rank, len(self._files))
        self.num_tokens += self._tokenizer.make(path, Rows(self._pending, 0)).tokens
        self._files.append(self._file)
        self._pending, self._pending_bytes = [], 0


def join_ranks(tokenizing: Tokenizing, engine: Engine) -> Sidecar:
    """Joins the parts of all ranks into the dataset by copying, and removes them.

    Returns:
        The sidecar; if nothing is left to join, that of the existing dataset.

    Raises:
        ConfigError: there are no parts, or parts of different numbers of ranks.
        DataError: a rank is missing, a part is damaged, or the disk is full.
    """
    settings = _settings(tokenizing, engine)
    found = [
        path
        for path in sorted(parts_path(tokenizing.output).glob("ranks-*"))
        if path.name.endswith(settings.settings_digest)
    ]
    if not found:
        sidecar = read_sidecar(tokenizing.output)
        if sidecar is not None:
            return sidecar
        raise ConfigError(f"output = {tokenizing.output}: no rank has written anything with these settings")
    if len(found) > 1:
        raise ConfigError(
            f"output = {tokenizing.output}: {', '.join(map(str, found))} are of different numbers of tasks; remove the "
            "obsolete ones"
        )
    records = _records(found[0])
    parts = [(file, rank, piece) for rank, record in enumerate(records) for piece, file in enumerate(record["files"])]
    paths = [shard_path(found[0], rank, piece) for _, rank, piece in sorted(parts)]
    files = sorted({file for file, _, _ in parts if file})
    tokens = sum(record["tokens"] for record in records)
    return tokenizing.join(_shards(paths), tokens, None, settings, {}, files)


def refuse_output(output: str, overwrite: bool) -> None:
    """Raises ConfigError if a dataset exists and `overwrite` is not set."""
    for path in (Path(f"{output}.bin"), Path(f"{output}.idx")):
        if path.exists() and not overwrite and not commit_marker_path(output).exists():
            raise ConfigError(f"output = {output}: {path} exists; choose another output or give overwrite=True")


def _settings(tokenizing: Tokenizing, engine: Engine) -> TokenizeSettings:
    # No sample: all ranks must choose the same engine, whatever documents they have. Documents are checked as they
    # arrive.
    return tokenizing.settings(_FIELDS, engine, [])


def _folder(output: str, settings: TokenizeSettings, num_ranks: int) -> Path:
    return parts_path(output) / f"ranks-{num_ranks}-{settings.settings_digest}"


def _record_path(folder: Path, rank: int) -> Path:
    return folder / f"{rank:08d}.json"


def _records(folder: Path) -> Sequence[dict[str, Any]]:
    num_ranks = int(folder.name.split("-")[1])
    missing = [rank for rank in range(num_ranks) if not _record_path(folder, rank).is_file()]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise DataError(f"{folder}: {len(missing)} of {num_ranks} ranks are not complete: {shown}; run them again")
    return [read_json(_record_path(folder, rank)) for rank in range(num_ranks)]


def _shards(paths: Sequence[Path]) -> Iterator[DatasetShard]:
    for path in paths:
        try:
            yield open_shard(path)
        except (ValueError, OSError) as error:
            raise DataError(f"{path}: {error}: the disk lost what was written; run its rank again") from error
