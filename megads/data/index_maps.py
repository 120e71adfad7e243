"""Which tokens make up which sample of which epoch, and the cache of that answer.

The order of an epoch depends on the dataset, the seed and the epoch alone: a longer run sees the same samples first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.atomic_file import atomic_writer
from megads.data.indexed import IndexedDataset, IntArray
from megads.errors import ConfigError

FORMAT_VERSION = 1
# A map this small is built faster than it is read and checked.
SMALL_MAP_ENTRIES = 1 << 16

log = logging.getLogger(__name__)


def build_sample_index(sizes: npt.NDArray[np.integer[Any]], seq_len: int) -> IntArray:
    """Cuts a stream of documents into samples of seq_len + 1 tokens, neighbours sharing one.

    Args:
        sizes: [documents] tokens in each document, in the order in which they are read.
        seq_len: tokens that a sample predicts.

    Returns:
        int64 [samples + 1, 2]: (position in the document order, token offset in that document) of each sample's first
        token, which is the last token of the sample before; the final row is where the last sample ends.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    first_tokens = np.arange(max(total - 1, 0) // seq_len + 1, dtype=np.int64) * seq_len
    # side="right" steps over documents without tokens.
    positions = np.searchsorted(ends, first_tokens, side="right")
    starts = ends[positions] - sizes[positions] if total else np.zeros(1, np.int64)
    return np.stack((positions, first_tokens - starts), axis=1)


@dataclass(frozen=True)
class EpochMapKey:
    """All that determines an epoch's map."""

    fingerprint: str
    """Of the dataset."""
    first_document: int
    """Start of the range of documents."""
    end_document: int
    """End of the range of documents, exclusive."""
    seq_len: int
    """Tokens that a sample predicts."""
    seed: int
    """Seed of the run's data order."""
    epoch: int
    """Number of the pass over the documents, from 0."""

    def name(self) -> str:
        """Returns a file name that differs wherever the map may."""
        content = json.dumps(asdict(self) | {"format": FORMAT_VERSION}, sort_keys=True)
        return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-epoch{self.epoch:05d}"


@dataclass(frozen=True)
class EpochMap:
    """The order of one epoch.

    Attributes:
        document_order: integer [documents], document numbers as they are read.
        sample_index: int64 [samples + 1, 2], see `build_sample_index`.
        shuffle: integer [samples], row of sample_index for each sample in the order of training.
    """

    document_order: npt.NDArray[np.integer[Any]]
    sample_index: IntArray
    shuffle: npt.NDArray[np.integer[Any]]

    @staticmethod
    def build(dataset: IndexedDataset, key: EpochMapKey) -> EpochMap:
        """Computes the map of one epoch over a range of the dataset's documents."""
        random = np.random.PCG64(np.random.SeedSequence([key.seed, key.epoch]))
        documents = range(key.first_document, key.end_document)
        order = permutation(random, len(documents))
        sample_index = build_sample_index(dataset.document_sizes(documents)[order], key.seq_len)
        return EpochMap(
            document_order=order + order.dtype.type(key.first_document),
            sample_index=sample_index,
            shuffle=permutation(random, len(sample_index) - 1),
        )


def permutation(random: np.random.PCG64, count: int) -> npt.NDArray[np.integer[Any]]:
    """Returns a random order of 0..count-1, by sorting random keys.

    NumPy promises the raw stream of a bit generator for ever, but lets Generator.permutation change between versions:
    an update must not change the order of a run's data.
    """
    keys = random.random_raw(count)
    order = np.argsort(keys, kind="stable")
    return order.astype(np.int32) if count < 2**31 else order


class EpochMapCache:
    """Epoch maps on disk: memory-mapped, shared by the ranks of a node, rebuilt where damaged.

    A map is three `.npy` files and a `.json` with their sizes and checksums, written last. All are renamed into
    place and their content is determined by the name, so concurrent builders do no harm.

    Args:
        prefix: the dataset's; the cache is `<prefix>.cache/`, or the user's cache where that is not writable.
        cache_dir: takes its place; must be writable.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._configured = cache_dir
        self._directories = (
            [Path(cache_dir)] if cache_dir is not None else [Path(f"{prefix}.cache"), Path.home() / ".cache" / "megads"]
        )

    def get(self, dataset: IndexedDataset, key: EpochMapKey) -> EpochMap:
        """Returns the map of one epoch, from the cache or built and cached.

        Raises:
            ConfigError: data.cache_dir was given and cannot be written.
        """
        documents = range(key.first_document, key.end_document)
        samples = dataset.stream(documents).size // key.seq_len
        if len(documents) + samples < SMALL_MAP_ENTRIES:
            return EpochMap.build(dataset, key)
        for directory in self._directories:
            found = load_epoch_map(directory, key)
            if found is not None:
                return found
        built = EpochMap.build(dataset, key)
        for directory in self._directories:
            try:
                save_epoch_map(directory, key, built)
            except OSError as error:
                if self._configured is not None:
                    raise ConfigError(
                        f"data.cache_dir = {self._configured}: cannot write index maps there ({error.strerror}); "
                        "give a writable folder, or null"
                    ) from error
                log.info("no index map cache in %s: %s", directory, error)
                continue
            return load_epoch_map(directory, key) or built
        return built


def save_epoch_map(directory: Path, key: EpochMapKey, epoch_map: EpochMap) -> None:
    """Writes a map; raises OSError where the folder cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, int | str]] = {}
    for field in fields(epoch_map):
        path = _array_path(directory, key, field.name)
        with atomic_writer(path) as file:
            np.save(file, getattr(epoch_map, field.name))
        files[field.name] = _file_record(path)
    with atomic_writer(_record_path(directory, key)) as file:
        file.write(json.dumps({"key": asdict(key), "files": files}, indent=1).encode())


def load_epoch_map(directory: Path, key: EpochMapKey) -> EpochMap | None:
    """Returns a cached map, memory-mapped, or None when there is none or it is damaged."""
    record_path = _record_path(directory, key)
    if not record_path.is_file():
        return None
    try:
        expected = json.loads(record_path.read_text())["files"]
        arrays = {}
        for field in fields(EpochMap):
            path = _array_path(directory, key, field.name)
            if _file_record(path) != expected[field.name]:
                raise ValueError(f"{path.name} does not match its checksum")
            # A plain array over the map: slicing np.memmap objects costs several times as much.
            arrays[field.name] = np.asarray(np.load(path, mmap_mode="r"))
        return EpochMap(**arrays)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: the cached index map is damaged (%s) and will be rebuilt", record_path, error)
        return None


def _file_record(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _array_path(directory: Path, key: EpochMapKey, field: str) -> Path:
    return directory / f"{key.name()}-{field}.npy"


def _record_path(directory: Path, key: EpochMapKey) -> Path:
    return directory / f"{key.name()}.json"
