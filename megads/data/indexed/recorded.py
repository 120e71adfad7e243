"""data_record.json of a run: describes its data at its last start, so that a later start detects changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megads.data.config import DataConfig, StreamConfig
from megads.data.indexed.dataset import IndexedDataset, IntArray, bin_path, idx_path
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import Sidecar, file_checksum, read_sidecar, sidecar_path
from megads.data.indexed.stream import open_indexed
from megads.errors import DataError, reason_of
from megads.runtime.files import atomic_writer, read_json
from megads.runtime.run_dir import DATA_FILE, recorded_data_path

WHOLE_BYTES = 1 << 26
"""Token files up to this size are hashed completely."""
PIECES, PIECE_BYTES = 256, 1 << 16
"""Number and size of the hashed pieces of larger files, evenly spaced from the first byte to the last, because a start
cannot read terabytes."""

_TOGETHER = 32
"""Pieces that are requested at a time from a store."""


@dataclass(frozen=True)
class DatasetRecord:
    """Description of the content of one dataset.

    Attributes:
        path: prefix of the dataset, as in the config.
        documents: number of documents.
        tokens: number of tokens.
        index: hash of the whole index and of the size of `.bin`.
        content: XXH3 of the tokens, see WHOLE_BYTES.
        tokenizer_sha256: sha256 of the tokenizer, from the sidecar; None if there is none.
    """

    path: str
    documents: int
    tokens: int
    index: str
    content: str
    tokenizer_sha256: str | None

    def is_same_as(self, other: DatasetRecord) -> bool:
        """Whether the other record has the same path, or the same content under another path."""
        return self.path == other.path or (self.index, self.content) == (other.index, other.content)

    def change(self, now: DatasetRecord) -> str:
        """Returns a description of what differs now; empty if nothing does."""
        if (self.documents, self.tokens) != (now.documents, now.tokens):
            return (
                f"{self.path} had {self.documents:,} documents of {self.tokens:,} tokens, now {now.documents:,} of "
                f"{now.tokens:,}"
            )
        if self.index != now.index:
            return f"{self.path}.idx has other document lengths than before"
        if self.content != now.content:
            return f"{self.path}.bin holds other tokens than before"
        if self.tokenizer_sha256 != now.tokenizer_sha256:
            before, after = (str(x.tokenizer_sha256)[:12] for x in (self, now))
            return f"{self.path} was made with the tokenizer {before}, now its sidecar says {after}"
        return ""


@dataclass(frozen=True)
class DataRecord:
    """Description of the content of a run's data.

    Attributes:
        datasets: training and validation datasets.
        raw: data.raw, if the launcher made the datasets from it; otherwise empty.
        tokenizer: the run's tokenizer; None if unknown, as in records of earlier versions.
    """

    datasets: tuple[DatasetRecord, ...]
    raw: tuple[str, ...] = ()
    tokenizer: TokenizerRecord | None = None

    def encode(self) -> bytes:
        """Returns the content of data_record.json."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @property
    def digest(self) -> str:
        """sha256 of the encoded record, by which a checkpoint refers to it."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def tokenizer_sha256(self) -> str | None:
        """sha256 of the run's tokenizer; in a record of an earlier version it is taken from the datasets."""
        if self.tokenizer is not None:
            return self.tokenizer.sha256
        return next((item.tokenizer_sha256 for item in self.datasets if item.tokenizer_sha256), None)

    def is_same_as(self, other: DataRecord) -> bool:
        """Whether the other record has the same datasets in the same order, at the same paths or moved."""
        pairs = zip(self.datasets, other.datasets, strict=False)
        return len(self.datasets) == len(other.datasets) and all(one.is_same_as(two) for one, two in pairs)

    def changes(self, now: DataRecord) -> list[str]:
        """Returns the changes of datasets that both records have, and of data.raw if its paths are the same."""
        known = {record.path: record for record in now.datasets}
        found = [record.change(known[record.path]) for record in self.datasets if record.path in known]
        if self.raw and self.raw == now.raw and not self.datasets[0].is_same_as(now.datasets[0]):
            found.append(
                f"data.raw = {', '.join(self.raw)} gives {now.datasets[0].path}, before it gave "
                f"{self.datasets[0].path}: its text or the settings of its tokenizer changed"
            )
        return [change for change in found if change]


def record_data(data: DataConfig, raw: Sequence[str] = (), tokenizer: TokenizerRecord | None = None) -> DataRecord:
    """Describes the datasets of a config.

    Args:
        data: data config with data.train set.
        raw: data.raw from which the datasets were made.
        tokenizer: tokenizer with which they were made, if known.

    Raises:
        DataError: a dataset is missing or damaged.
    """
    return DataRecord(tuple(_record(path, data.stream) for path in data.paths), tuple(raw), tokenizer)


def with_former(record: DataRecord, data: DataConfig) -> DataRecord:
    """Adds the datasets of earlier blends, which a continued run still needs, to a record.

    Args:
        record: record of the datasets that the user names.
        data: data config with data.history filled in.

    Raises:
        DataError: a dataset is missing or damaged.
    """
    known = {item.path for item in record.datasets}
    # Appended, because the dataset of data.raw must stay the first.
    more = tuple(_record(path, data.stream) for path in data.paths if path not in known)
    return replace(record, datasets=record.datasets + more)


def _record(path: str, stream: StreamConfig) -> DatasetRecord:
    dataset = open_indexed(path, stream)
    sidecar = read_sidecar(dataset.prefix)
    record = DatasetRecord(
        path,
        dataset.num_documents,
        dataset.num_tokens,
        dataset.fingerprint(),
        _remote_digest(dataset) if dataset.is_remote else content_digest(bin_path(path)),
        None if sidecar is None else sidecar.tokenizer_sha256,
    )
    if sidecar is not None:
        _require_as_written(record, sidecar, dataset)
    return record


def _require_as_written(record: DatasetRecord, sidecar: Sidecar, dataset: IndexedDataset) -> None:
    """Compares a dataset with the checksums in its sidecar.

    Raises:
        DataError: a file is not the one that was written.
    """
    pairs = [(".idx", record.index, sidecar.index), (".bin", record.content, sidecar.content)]
    if sidecar.content is None and not dataset.is_remote:
        # Written by an older version, which recorded only checksums of whole files.
        files = ((idx_path(record.path), sidecar.idx_checksum), (bin_path(record.path), sidecar.bin_checksum))
        small = [(file, wanted) for file, wanted in files if wanted is not None and file.stat().st_size <= WHOLE_BYTES]
        pairs = [(file.suffix, file_checksum(file), wanted) for file, wanted in small]
    for ending, found, wanted in pairs:
        if wanted is not None and found != wanted:
            raise DataError(
                f"{record.path}{ending}: its checksum is {found}, {sidecar_path(dataset.prefix)} records {wanted}: the "
                "file is not the one that was written; copy the dataset again or make it anew. If you changed it on "
                f"purpose, delete {sidecar_path(dataset.prefix)}"
            )


def written_checksums(prefix: str | Path) -> dict[str, Any]:
    """Returns the fields of the sidecar that describe the files of a dataset that has just been written, except
    `bin_checksum`, which its writer knows."""
    return {
        "idx_checksum": file_checksum(idx_path(prefix)),
        "index": IndexedDataset(prefix, anew=True).fingerprint(),
        "content": content_digest(bin_path(prefix)),
    }


def unverified_data(data: DataConfig) -> str:
    """Returns which datasets a start compares with their checksums only in part; empty if none."""
    found = []
    for path in data.paths:
        dataset = open_indexed(path, data.stream)
        size, sidecar = dataset.num_tokens * dataset.dtype.itemsize, read_sidecar(dataset.prefix)
        if sidecar is not None and size > WHOLE_BYTES:
            pieces = f"{PIECES} pieces of {PIECE_BYTES // 1024} KiB" if sidecar.content else "its index"
            found.append(f"{pieces} of {path} ({size / 2**30:.1f} GiB)")
    if not found:
        return ""
    return f"data: compared with its checksums: {', '.join(found)}; megads dataset check reads every byte"


def content_digest(path: Path) -> str:
    """Returns the XXH3 of a file, 32 hex digits: of the whole file, or of evenly spaced pieces of a large one.

    Raises:
        DataError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            for begin in _pieces(path.stat().st_size).tolist():
                file.seek(begin)
                digest.update(file.read(PIECE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}; copy the dataset again") from error
    return str(digest.hexdigest())


def _pieces(size: int) -> IntArray:
    """Returns the byte offsets of the hashed pieces of a file."""
    if size <= WHOLE_BYTES:
        return np.arange(0, size, PIECE_BYTES)
    return np.linspace(0, size - PIECE_BYTES, PIECES).astype(np.int64)


def _remote_digest(dataset: IndexedDataset) -> str:
    """As `content_digest`, for remote tokens, fetching some pieces at a time."""
    digest, width = xxhash.xxh3_128(), dataset.dtype.itemsize
    size = dataset.num_tokens * width
    begins = _pieces(size)
    for first in range(0, begins.size, _TOGETHER):
        some = begins[first : first + _TOGETHER]
        ends = np.minimum(some + PIECE_BYTES, size)
        dataset.fetch(some // width, -(-ends // width))
        for begin, end in zip(some.tolist(), ends.tolist(), strict=True):
            digest.update(dataset.bin_bytes(begin, end).data)
    return str(digest.hexdigest())


def holds_the_same(record: DatasetRecord, path: Path) -> bool:
    """Whether a file of a dataset, or of a copy of it, still has the recorded content."""
    if path == bin_path(path.with_suffix("")):
        return content_digest(path) == record.content
    return IndexedDataset(path.with_suffix("")).fingerprint() == record.index


def write_record(run_dir: Path, record: DataRecord) -> None:
    """Writes the record of a start to the run's data_record.json, and a copy for the checkpoints of that start."""
    kept = recorded_data_path(run_dir, record.digest)
    kept.parent.mkdir(exist_ok=True)
    for path in (kept, run_dir / DATA_FILE):
        with atomic_writer(path) as file:
            file.write(record.encode())


def read_record(run_dir: Path, digest: str | None = None) -> DataRecord | None:
    """Returns a run's data record; None if it has none, as in early versions.

    Args:
        run_dir: run directory.
        digest: digest of the record of the start that wrote a checkpoint; None, or one without a kept copy, selects the
            record of the last start.

    Raises:
        DataError: the file is damaged.
    """
    kept = recorded_data_path(run_dir, digest) if digest is not None else None
    path = kept if kept is not None and kept.is_file() else run_dir / DATA_FILE
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        datasets = tuple(DatasetRecord(**item) for item in content["datasets"])
        tokenizer = content.get("tokenizer")
        return DataRecord(datasets, tuple(content["raw"]), TokenizerRecord(**tokenizer) if tokenizer else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is not a data record: {error}; delete it to continue without the check for changed data"
        ) from error


def renamed_datasets(before: DataRecord | None, now: DataRecord) -> dict[str, str]:
    """Returns the new path by old path of datasets that moved without a change of content."""
    if before is None:
        return {}
    old, new = ({record.path: record for record in some.datasets} for some in (before, now))
    content = {(record.index, record.content): path for path, record in new.items() if path not in old}
    found = {path: content.get((record.index, record.content)) for path, record in old.items() if path not in new}
    return {path: other for path, other in found.items() if other is not None}


def require_recorded(run_dir: Path, now: DataRecord) -> None:
    """Checks that the data is what the launcher recorded at the start.

    Raises:
        DataError: the data differs; the message names each dataset and the difference.
    """
    before = read_record(run_dir)
    changes = [] if before is None else before.changes(now)
    if changes:
        raise DataError(
            f"the data of {run_dir} is not what its launcher saw: {'; '.join(changes)}. Every node must see the same "
            "data, and nothing may write to it: restore it and start again"
        )
