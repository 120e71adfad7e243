"""data_record.json of a run: what its data held when it began, so that a later start knows that it changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from megads.data.config import DataConfig
from megads.data.indexed.dataset import IndexedDataset, bin_path
from megads.data.indexed.sidecar import read_sidecar
from megads.errors import DataError
from megads.runtime.files import atomic_writer, read_json
from megads.runtime.run_dir import DATA_FILE

WHOLE_BYTES = 1 << 26
"""Of a file of tokens up to this size every byte counts."""
PIECES, PIECE_BYTES = 256, 1 << 16
"""Of a larger one so many pieces, evenly spaced from its first byte to its last: a start cannot read terabytes."""


@dataclass(frozen=True)
class DatasetRecord:
    """What one dataset held.

    Attributes:
        path: its prefix, as the config names it.
        documents: how many.
        tokens: how many.
        index: hash of all of its index and of the size of `.bin`.
        content: XXH3 of the tokens, see WHOLE_BYTES.
        tokenizer_sha256: from the sidecar, None where there is none.
    """

    path: str
    documents: int
    tokens: int
    index: str
    content: str
    tokenizer_sha256: str | None

    def change(self, now: DatasetRecord) -> str:
        """Says what differs now; nothing where all is as it was."""
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
    """What a run's data held.

    Attributes:
        datasets: of training and validation.
        raw: data.raw, from which the launcher made them; empty where the user did.
    """

    datasets: tuple[DatasetRecord, ...]
    raw: tuple[str, ...] = ()

    def changes(self, now: DataRecord) -> list[str]:
        """Lists what differs in datasets that both have, and text of the same name that gives another dataset."""
        known = {record.path: record for record in now.datasets}
        found = [record.change(known[record.path]) for record in self.datasets if record.path in known]
        if self.raw and self.raw == now.raw and self.datasets[0].path != now.datasets[0].path:
            found.append(
                f"data.raw = {', '.join(self.raw)} gives {now.datasets[0].path}, before it gave "
                f"{self.datasets[0].path}: its text or the settings of its tokenizer changed"
            )
        return [change for change in found if change]


def record_data(data: DataConfig, raw: Sequence[str] = ()) -> DataRecord:
    """Looks at the datasets that a config names.

    Args:
        data: with data.train set.
        raw: data.raw of which they were made.

    Raises:
        DataError: one is missing or damaged.
    """
    return DataRecord(tuple(_record(path) for path in data.paths), tuple(raw))


def _record(path: str) -> DatasetRecord:
    dataset = IndexedDataset(path)
    sidecar = read_sidecar(path)
    return DatasetRecord(
        path,
        dataset.num_documents,
        dataset.num_tokens,
        dataset.fingerprint(),
        content_digest(bin_path(path)),
        None if sidecar is None else sidecar.tokenizer_sha256,
    )


def content_digest(path: Path) -> str:
    """Returns the XXH3 of a file, 32 hex digits: of all of it, or of evenly spaced pieces of a large one.

    Raises:
        DataError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            begins = np.linspace(0, max(size - PIECE_BYTES, 0), PIECES).astype(np.int64)
            if size <= WHOLE_BYTES:
                begins = np.arange(0, size, PIECE_BYTES)
            for begin in begins.tolist():
                file.seek(begin)
                digest.update(file.read(PIECE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy the dataset again") from error
    return str(digest.hexdigest())


def holds_the_same(record: DatasetRecord, path: Path) -> bool:
    """Whether a file of a dataset, or of a copy of it, holds what was recorded."""
    if path == bin_path(path.with_suffix("")):
        return content_digest(path) == record.content
    return IndexedDataset(path.with_suffix("")).fingerprint() == record.index


def write_record(run_dir: Path, record: DataRecord) -> None:
    """Writes a run's record."""
    with atomic_writer(run_dir / DATA_FILE) as file:
        file.write((json.dumps(asdict(record), indent=1) + "\n").encode())


def read_record(run_dir: Path) -> DataRecord | None:
    """Returns what a run recorded; None where it did not, as in versions before there was a record.

    Raises:
        DataError: the file is damaged.
    """
    path = run_dir / DATA_FILE
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        return DataRecord(tuple(DatasetRecord(**item) for item in content["datasets"]), tuple(content["raw"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: is no record of a run's data: {error}; delete it to go on without knowing whether data changed"
        ) from error


def renamed_datasets(before: DataRecord | None, now: DataRecord) -> dict[str, str]:
    """Returns the new paths, by their old ones, of datasets that lie elsewhere but hold the same."""
    if before is None:
        return {}
    old, new = ({record.path: record for record in some.datasets} for some in (before, now))
    content = {(record.index, record.content): path for path, record in new.items() if path not in old}
    found = {path: content.get((record.index, record.content)) for path, record in old.items() if path not in new}
    return {path: other for path, other in found.items() if other is not None}


def require_recorded(run_dir: Path, now: DataRecord) -> None:
    """Refuses data that changed under its name since a run began.

    Raises:
        DataError: names each dataset and what differs.
    """
    before = read_record(run_dir)
    changes = [] if before is None else before.changes(now)
    if changes:
        raise DataError(
            f"the data of {run_dir} changed since it began: {'; '.join(changes)}. The steps to come would not continue "
            f"those that were trained. Put the data back, or start a new run with another run.id; to go on with the "
            f"changed data on purpose, delete {run_dir / DATA_FILE}"
        )
