"""Prepares the dataset and the tokenizer of data.raw once, and finds the result again by a hash of the text.

A text file is one document. If data.split would hold out no document for validation, the end of the last document is
cut off for it. Digests of files are cached, so unchanged files are not read again.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import xxhash

from megads.api import (
    ConfigError,
    DataConfig,
    DataError,
    IndexedDataset,
    IndexedDatasetWriter,
    MegadsError,
    Progress,
    Sidecar,
    TextTokenizerConfig,
    atomic_writer,
    carried_path,
    embedding_rows,
    load_tokenizer,
    read_json,
    read_sidecar,
    reason_of,
    sync_directory,
    write_sidecar,
    written_checksums,
)
from megads.data.config import AUTO_ENCODING
from megads.data.indexed.verified_once import SETTLED_NS, FileState, file_state, require_unchanged
from megads.runtime.registry import READERS
from megads.tools.prepare.chat import Conversations
from megads.tools.prepare.preprocess import document_fields
from megads.tools.prepare.records import Fields
from megads.tools.prepare.rejections import rejected_count
from megads.tools.prepare.text import DocumentReader, converted_text, custom_reader, has_prompts
from megads.tools.prepare.text_files import CACHE_TAG, Kind, first_encoding, kind, size_text, text_bytes_estimate
from megads.tools.prepare.tokenizer import learn_tokenizer
from megads.tools.prepare.tokenizing import Tokenizing, document_token_id

# Part of the cache key: raise it whenever the prepared files change.
FORMAT_VERSION = 2
TOKENS = "tokens"
# Copy of the tokenizer beside the dataset, whether it was given or trained.
_TOKENIZER_FILE = carried_path(TOKENS).name
SMALLEST_DEFAULT_VOCABULARY, LARGEST_DEFAULT_VOCABULARY = 512, 32_768
# More text does not improve a tokenizer and costs memory: of a larger corpus, every n-th document is used.
_TOKENIZER_TEXT_BYTES = 1 << 29
# For cutting a corpus of few documents into parts.
_WANTED_PARTS, _SMALLEST_PART_TOKENS = 100, 256
_BLOCK_BYTES = 1 << 22
_CACHE_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n# Text that megads has prepared.\n"
PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class PreparedCorpus:
    """A prepared corpus.

    Attributes:
        prefix: prefix of the dataset, for data.train.
        tokenizer_file: tokenizer file, for tokenizer.path.
        sidecar: the dataset's sidecar.
        passed_over: description of the files in the folders of data.raw that were skipped, with counts.
    """

    prefix: Path
    tokenizer_file: Path
    sidecar: Sidecar
    passed_over: str = ""

    def __str__(self) -> str:
        made = self.sidecar
        text = (
            f"{made.documents:,} documents, {made.tokens:,} tokens of {size_text(made.text_bytes)} of text, "
            f"vocabulary {made.vocab_size:,}, in {self.prefix.parent}"
        )
        said = [self.passed_over, converted_text(made.converted_files)]
        if made.rejected_lines:
            count = rejected_count(made.rejected_lines, made.rejected_files)
            said.append(f"{count} rejected, the first: {made.rejected_examples[0]}")
        return "; ".join([text, *filter(None, said)])


@dataclass(frozen=True)
class Preparation:
    """What to prepare from data.raw, and where; created by `plan_preparation`.

    Attributes:
        folder: folder of the prepared corpus, which may not exist yet; its name is a hash of the text and the settings.
        data: settings of the text.
        tokenizer: settings of the tokenizer.
        states: state of every file when its content was hashed.
        vocab_size: vocabulary size of a given tokenizer, or the maximum of one to train.
        tokenizer_content: content of a given tokenizer file; None trains a tokenizer.
        held_out: share of the tokens to cut off the last document for validation; None cuts few documents into parts of
            equal length.
        fields: fields of a record that make up a document.
        passed_over: description of the files in the folders of data.raw that are skipped, with counts.
    """

    folder: Path
    data: DataConfig
    tokenizer: TextTokenizerConfig
    states: dict[Path, FileState]
    vocab_size: int
    tokenizer_content: bytes | None
    fields: Fields
    held_out: float | None = None
    passed_over: str = ""

    @property
    def prefix(self) -> Path:
        """Prefix of the dataset, for data.train."""
        return self.folder / TOKENS

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer file, for tokenizer.path."""
        return self.folder / _TOKENIZER_FILE

    @property
    def text_bytes(self) -> int:
        """Approximate size of the text, uncompressed."""
        return text_bytes_estimate(list(self.states))

    def __str__(self) -> str:
        size = sum(state[0] for state in self.states.values())
        given = self.tokenizer.path
        tokenizer = f"tokenizer {given}" if given else f"a tokenizer of up to {self.vocab_size:,} tokens learnt from it"
        files = f"{len(self.states):,} file{'s' if len(self.states) > 1 else ''}"
        text = f"{files}, {size_text(size)}, {tokenizer}"
        return f"{text}; {self.passed_over}" if self.passed_over else text

    def find(self) -> PreparedCorpus | None:
        """Returns the corpus that an earlier start prepared; None if there is none.

        Raises:
            DataError: the prepared corpus is damaged.
        """
        if not self.folder.is_dir():
            return None
        dataset = IndexedDataset(self.prefix)
        sidecar = read_sidecar(self.prefix)
        found = None if sidecar is None else (sidecar.documents, sidecar.tokens)
        if sidecar is None or found != (dataset.num_documents, dataset.num_tokens):
            raise DataError(f"{self.prefix}: the dataset and its sidecar do not belong together")
        load_tokenizer(self.tokenizer_file)
        if _sha256(self.tokenizer_file.read_bytes()) != sidecar.tokenizer_sha256:
            raise DataError(f"{self.tokenizer_file}: is not the tokenizer that made the dataset beside it")
        return PreparedCorpus(self.prefix, self.tokenizer_file, sidecar, self.passed_over)

    def make(self, print_line: PrintLine) -> PreparedCorpus:
        """Prepares the text, unless another process does so meanwhile; the folder appears under its name only when
        complete.

        Args:
            print_line: receives progress messages.

        Raises:
            ConfigError: the folder cannot be written to.
            DataError: the text cannot be read, has no documents, or changed meanwhile.
        """
        with _locked(self.folder, print_line):
            try:
                found = self.find()
            except DataError as error:
                print_line(f"the text that an earlier start prepared is damaged and is prepared again: {error}")
                found = None
            if found is not None:
                return found
            partial = self.folder.with_name(f".{self.folder.name}.partial")
            try:
                self._make_in(partial, print_line)
                for path, state in self.states.items():
                    require_unchanged(path, state)
                shutil.rmtree(self.folder, ignore_errors=True)
                partial.rename(self.folder)
                sync_directory(self.folder.parent)
            except MegadsError:
                # Its content is useless after an error; after a kill or Ctrl-C its finished blocks are reused.
                shutil.rmtree(partial, ignore_errors=True)
                raise
        made = self.find()
        assert made is not None
        return made

    def _make_in(self, folder: Path, print_line: PrintLine) -> None:
        # May exist already, left by a killed process with the same text and settings, since the name is their hash. The
        # lock excludes other processes.
        folder.mkdir(exist_ok=True)
        for cut in folder.glob(".*.partial"):
            cut.unlink()
        tokenizer_file = folder / _TOKENIZER_FILE
        if tokenizer_file.is_file():
            print_line("continuing from the finished parts of an earlier start")
        elif self.tokenizer_content is not None:
            with atomic_writer(tokenizer_file) as file:
                file.write(self.tokenizer_content)
        else:
            every = -(-self.text_bytes // _TOKENIZER_TEXT_BYTES)
            learn_tokenizer(
                self._reader(),
                tokenizer_file,
                self.vocab_size,
                self.tokenizer.min_frequency,
                self.tokenizer.end_of_document,
                max(1, every),
            )
        tokenizing = Tokenizing(
            str(tokenizer_file),
            str(folder / TOKENS),
            self.tokenizer.end_of_document,
            "tokenizer.end_of_document",
            self.tokenizer.text_special_tokens,
            self.data.max_rejected,
            self.tokenizer.begin_of_document,
        )
        sidecar = tokenizing.run(self._reader(), self.fields, None, self.tokenizer.engine)
        if tokenizing.kept_shards:
            print_line(f"{tokenizing.kept_shards} parts kept from an earlier start")
        if self.held_out is None:
            cut_few_documents(folder / TOKENS, sidecar, self.data.cut_documents)
        elif self.held_out > 0:
            split_off_end(folder / TOKENS, sidecar, self.held_out)

    def _reader(self) -> DocumentReader:
        # Uses the files that were hashed, since the patterns may match more by now.
        return _reader(self.data, self.fields, [str(path) for path in self.states])


def plan_preparation(
    data: DataConfig,
    tokenizer: TextTokenizerConfig,
    model_vocab_size: int | None,
    cache_dir: Path,
    *,
    remember: bool = True,
) -> Preparation:
    """Finds the files of data.raw and hashes them; later starts read only files that changed.

    Args:
        data: settings of the text.
        tokenizer: settings of the tokenizer.
        model_vocab_size: maximum vocabulary size of a tokenizer to train, if tokenizer.vocab_size is not set.
        cache_dir: folder of prepared corpora.
        remember: save the files' hashes for the next start.

    Raises:
        ConfigError: the tokenizer's settings do not fit it.
        DataError: no files match, a file cannot be read, or a given tokenizer file is invalid.
    """
    given_file = None if tokenizer.path is None else Path(tokenizer.path)
    fields = document_fields(data, given_file, tokenizer.end_of_document, tokenizer.text_special_tokens, "data.")
    reader = _reader(data, fields, data.raw_patterns)
    given_content, vocab_size = _tokenizer_to_use(tokenizer, model_vocab_size, reader)
    digests = ContentDigests(cache_dir / "content-digests.json")
    contents = digests.digest_files(reader.files)
    if remember:
        _make_folder(cache_dir)
        digests.save()
    identity = {
        "format_version": FORMAT_VERSION,
        "files": [_file_identity(reader, path, content) for path, content in zip(reader.files, contents, strict=True)],
        "text_field": data.text_field,
        "end_of_document": tokenizer.end_of_document,
        "text_special_tokens": tokenizer.text_special_tokens.value,
        "tokenizer": _sha256(given_content) if given_content is not None else [vocab_size, tokenizer.min_frequency],
    }
    if data.reader.name != "auto":
        identity["reader"] = [data.reader.name, data.reader.options, READERS.source_version(data.reader.name)]
    held_out = 0.0 if has_prompts(fields) else _held_out_share(reader, data)
    # Added only if set, so that the keys of corpora prepared before these settings existed stay valid.
    changed: dict[str, Any] = {
        "encoding": None if data.encoding == AUTO_ENCODING else data.encoding,
        "held_out": held_out,
        "cut_documents": data.cut_documents,
        "begin_of_document": tokenizer.begin_of_document,
    }
    if has_prompts(fields):
        changed["fields"] = dataclasses.asdict(fields) if isinstance(fields, Conversations) else fields
    identity |= {name: value for name, value in changed.items() if value is not None}
    key = _sha256(json.dumps(identity, sort_keys=True).encode())[:16]
    states = {path: content.state for path, content in zip(reader.files, contents, strict=True)}
    return Preparation(
        cache_dir / key, data, tokenizer, states, vocab_size, given_content, fields, held_out, reader.passed_over
    )


def _tokenizer_to_use(
    tokenizer: TextTokenizerConfig, model_vocab_size: int | None, reader: DocumentReader
) -> tuple[bytes | None, int]:
    """Returns (content, vocabulary size) of a given tokenizer; (None, vocabulary size to train) if none is given."""
    if tokenizer.path is not None:
        given = load_tokenizer(tokenizer.path)
        for key in ("end_of_document", "begin_of_document"):
            document_token_id(given, tokenizer.path, getattr(tokenizer, key), f"tokenizer.{key}")
        return Path(tokenizer.path).read_bytes(), embedding_rows(given)
    if tokenizer.vocab_size is not None:
        return None, tokenizer.vocab_size
    return None, min(default_vocab_size(text_bytes_estimate(reader.files)), model_vocab_size or 1 << 30)


def _reader(data: DataConfig, fields: Fields, patterns: Sequence[str]) -> DocumentReader:
    custom = custom_reader(data.reader)
    return DocumentReader(
        patterns, fields, "data.raw", custom, data.extensions, data.encoding, max_rejected=data.max_rejected
    )


def _file_identity(reader: DocumentReader, path: Path, content: FileContent) -> tuple[str, ...]:
    """The file's content, and what determines how it is read."""
    identity = ("".join(path.suffixes[-2:]), content.digest)
    converts = reader.custom is None and kind(path) is not Kind.parquet and content.marked_encoding is not None
    return (*identity, str(content.marked_encoding)) if converts else identity


def _held_out_share(reader: DocumentReader, data: DataConfig) -> float | None:
    """Share of the text to hold out if a corpus of few documents stays whole; None cuts it into parts."""
    few = reader.custom is None and len(reader.files) < _WANTED_PARTS
    if data.cut_documents is not None or not few or any(kind(path) is not Kind.text for path in reader.files):
        return None
    return data.split[1] / sum(data.split) if data.valid is None else 0.0


def default_vocab_size(text_bytes: int) -> int:
    """Returns the largest power of two up to 3 * sqrt(text_bytes), clamped: 2,048 for 1 MB, 16,384 for 100 MB."""
    root = int(3 * text_bytes**0.5)
    return max(SMALLEST_DEFAULT_VOCABULARY, min(LARGEST_DEFAULT_VOCABULARY, 1 << max(root, 1).bit_length() - 1))


@contextmanager
def _locked(folder: Path, print_line: PrintLine) -> Iterator[None]:
    """Prevents two processes from preparing the same text; the kernel releases the lock if its holder dies."""
    _make_folder(folder.parent)
    descriptor = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            print_line(f"waiting for process {holder}, which prepares the same text")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    try:
        made = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        if made:
            (folder / CACHE_TAG).write_bytes(_CACHE_SIGNATURE)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "no permission to write")
    except OSError as error:
        raise ConfigError(
            f"prepared text cannot be stored in {folder} ({reason_of(error)}): choose another folder with "
            "data.cache_dir=<path>"
        ) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def cut_few_documents(prefix: Path, sidecar: Sidecar, parts: int | None = None) -> Sidecar:
    """Cuts the documents of a dataset of fewer than a hundred documents into parts of equal length.

    Tokens do not change: there is no end-of-document token between parts of one document.

    Args:
        prefix: prefix of the dataset, which is replaced.
        sidecar: its sidecar.
        parts: number of parts; None is about a hundred.

    Returns:
        The new sidecar, as written; the old one if there are a hundred documents or more.
    """
    if sidecar.documents >= _WANTED_PARTS:
        return sidecar
    dataset = IndexedDataset(prefix)
    wanted_tokens = dataset.num_tokens // parts if parts else -(-dataset.num_tokens // _WANTED_PARTS)
    part_tokens = max(_SMALLEST_PART_TOKENS, wanted_tokens)

    def documents() -> Iterator[npt.NDArray[Any]]:
        for document in range(dataset.num_documents):
            tokens = dataset.document_tokens(document)
            count = max(1, tokens.size // part_tokens)
            for part in range(count):
                yield tokens[tokens.size * part // count : tokens.size * (part + 1) // count]

    return _rewritten(prefix, sidecar, dataset, documents())


def split_off_end(prefix: Path, sidecar: Sidecar, share: float) -> Sidecar:
    """Makes the end of a dataset's last document a separate document, for validation.

    Args:
        prefix: prefix of the dataset, which is replaced.
        sidecar: its sidecar.
        share: share of all tokens for validation.

    Returns:
        The new sidecar, as written; the old one if a split by documents gives validation its share, or if the last
        document is too short to be cut.
    """
    dataset = IndexedDataset(prefix)
    last = dataset.num_documents - 1
    end_tokens = max(_SMALLEST_PART_TOKENS, round(share * dataset.num_tokens))
    tokens = dataset.document_tokens(last)
    validates_on_end = round(share * (dataset.num_documents + 1)) <= 1
    if not validates_on_end or tokens.size < 2 * end_tokens:
        return sidecar

    def parts() -> Iterator[npt.NDArray[Any]]:
        yield from (dataset.document_tokens(document) for document in range(last))
        yield from (tokens[:-end_tokens], tokens[-end_tokens:])

    return _rewritten(prefix, sidecar, dataset, parts())


def _rewritten(
    prefix: Path, sidecar: Sidecar, dataset: IndexedDataset, documents: Iterator[npt.NDArray[Any]]
) -> Sidecar:
    """Rewrites a dataset's tokens with other document boundaries; returns the new sidecar."""
    with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
        for tokens in documents:
            writer.append(tokens)
    # The bytes of .bin are the same.
    cut = dataclasses.replace(sidecar, documents=writer.num_documents, **written_checksums(prefix))
    write_sidecar(prefix, cut)
    return cut


class FileContent(NamedTuple):
    """State of a file, the digest of its bytes, and the encoding that its first bytes show, if any."""

    state: FileState
    digest: str
    marked_encoding: str | None


class ContentDigests:
    """Computes digests of files; a cached digest is used if size, times and inode of the file are unchanged.

    Args:
        memory: file in which digests are cached between processes.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known = _read_memory(memory)
        self._learnt = False

    def digest_files(self, files: Sequence[Path]) -> list[FileContent]:
        """Returns the content of every file, in order.

        Raises:
            DataError: a file cannot be read, or is being written to.
        """
        found: dict[Path, FileContent] = {}
        unknown: list[Path] = []
        for path in files:
            state = file_state(path)
            known = self._known.get(str(path.absolute()))
            if known is not None and tuple(known[:4]) == state:
                # Entries of earlier versions have no encoding.
                encoding = known[5] if len(known) > 5 else first_encoding(path)
                found[path] = FileContent(state, str(known[4]), encoding)
            else:
                unknown.append(path)
        with Progress("reading the text", sum(path.stat().st_size for path in unknown)) as progress:
            done_bytes = 0
            for path in unknown:
                state = file_state(path)
                digest = _digest(path, progress, done_bytes)
                found[path] = FileContent(state, digest, first_encoding(path))
                require_unchanged(path, state)
                done_bytes += state[0]
                self._remember(path, found[path])
        return [found[path] for path in files]

    def save(self) -> None:
        """Saves new digests; a write failure is ignored, since it only makes the next start slower."""
        if self._learnt:
            with suppress(OSError), atomic_writer(self._memory) as file:
                file.write(json.dumps(self._known).encode())

    def _remember(self, path: Path, content: FileContent) -> None:
        if time.time_ns() - max(content.state[1], content.state[2]) > SETTLED_NS:
            self._known[str(path.absolute())] = [*content.state, content.digest, content.marked_encoding]
            self._learnt = True


def _digest(path: Path, progress: Progress, done_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done_bytes += len(block)
                progress.update(done_bytes)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}; make it readable or leave it out") from error
    return str(digest.hexdigest())


def _read_memory(memory: Path) -> dict[str, list[Any]]:
    """Returns the cached digests; empty if the file is missing or damaged."""
    try:
        content = read_json(memory)
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {path: entry for path, entry in content.items() if isinstance(entry, list) and len(entry) in (5, 6)}
