"""Which tokens make up which sample of which epoch, and the cache of that answer.

The order of an epoch depends on the dataset, the seed and the epoch alone: a longer run sees the same samples first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from megads.data.indexed import IndexedDataset, IntArray
from megads.data.verified_once import verify_once
from megads.errors import ConfigError, DataError
from megads.runtime.atomic_file import atomic_writer
from megads.runtime.regular_file import read_json

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
    index = np.zeros((max(total - 1, 0) // seq_len + 1, 2), np.int64)
    if not total:
        return index
    # A sample's position is the number of documents that end at or before its first token, those without tokens too.
    # Counting them in one pass is faster than a search for each sample.
    first_sample_after = (ends + (seq_len - 1)) // seq_len
    positions = index[:, 0]
    np.cumsum(np.bincount(first_sample_after, minlength=len(index))[: len(index)], out=positions)
    starts = ends[positions] - sizes[positions]
    np.subtract(np.arange(len(index)) * seq_len, starts, out=index[:, 1])
    return index


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

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map of one epoch over a range of the dataset's documents."""
        random = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch]))
        documents = range(self.first_document, self.end_document)
        order = permutation(random, len(documents))
        sample_index = build_sample_index(dataset.document_sizes(documents)[order], self.seq_len)
        return EpochMap(
            document_order=order + order.dtype.type(self.first_document),
            sample_index=sample_index,
            shuffle=permutation(random, len(sample_index) - 1),
        )


class MapKey(Protocol):
    """All that determines a map, which it can build."""

    @property
    def first_document(self) -> int: ...

    @property
    def end_document(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def name(self) -> str:
        """Returns a file name that differs wherever the map may."""

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map."""


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

    One process of a node builds, the others wait for it. A map is three `.npy` files and a `.json` with their sizes and
    checksums, written last, and held to them once a node and boot. All are renamed into place and their content is
    determined by the name, so builders on several nodes that share a disk do no harm.

    Args:
        prefix: the dataset's; the cache is `<prefix>.cache/`, or the user's cache where that is not writable.
        cache_dir: takes its place; must be writable.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._configured = cache_dir
        self._directories = (
            [Path(cache_dir)] if cache_dir is not None else [Path(f"{prefix}.cache"), Path.home() / ".cache" / "megads"]
        )

    def get(self, dataset: IndexedDataset, key: MapKey) -> EpochMap:
        """Returns the map of one epoch, from the cache or built and cached.

        Raises:
            ConfigError: data.cache_dir was given and cannot be written.
        """
        documents = range(key.first_document, key.end_document)
        samples = dataset.stream(documents).size // key.seq_len
        if len(documents) + samples < SMALL_MAP_ENTRIES:
            return key.build(dataset)
        for directory in self._directories:
            found = load_epoch_map(directory, key)
            if found is not None:
                return found
        built: EpochMap | None = None
        for directory in self._directories:
            try:
                with _one_builder(directory, key):
                    # Another rank of this node may have built it while this one waited.
                    found = load_epoch_map(directory, key)
                    if found is not None:
                        return found
                    built = built or key.build(dataset)
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
        return built or key.build(dataset)


@contextmanager
def _one_builder(directory: Path, key: MapKey) -> Iterator[None]:
    """Lets one process of a node build while the others wait; a killed builder's lock goes with it.

    Where the file system has no locks several build the same thing, which does no harm.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{key.name()}.lock"
    with path.open("ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    # A process that still waits holds the open file: it finds the map, or builds it once more.
    path.unlink(missing_ok=True)


def save_epoch_map(directory: Path, key: MapKey, epoch_map: EpochMap) -> None:
    """Writes a map; raises OSError where the folder cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, int | str]] = {}
    for field in fields(epoch_map):
        path = _array_path(directory, key, field.name)
        with atomic_writer(path) as file:
            np.save(file, getattr(epoch_map, field.name))
        files[field.name] = _file_record(path)
    with atomic_writer(_record_path(directory, key)) as file:
        file.write(json.dumps({"key": asdict(cast(Any, key)), "files": files}, indent=1).encode())


def load_epoch_map(directory: Path, key: MapKey) -> EpochMap | None:
    """Returns a cached map, memory-mapped, or None when there is none or it is damaged."""
    record_path = _record_path(directory, key)
    if not record_path.is_file():
        return None
    try:
        expected = read_json(record_path)["files"]
        paths = {field.name: _array_path(directory, key, field.name) for field in fields(EpochMap)}

        def verify() -> None:
            for name, path in paths.items():
                if _file_record(path) != expected[name]:
                    raise ValueError(f"{path.name} does not match its checksum")

        verify_once(list(paths.values()), f"checksums: {json.dumps(expected, sort_keys=True)}", verify)
        # Plain arrays over the maps: slicing np.memmap objects costs several times as much.
        return EpochMap(**{name: np.asarray(np.load(path, mmap_mode="r")) for name, path in paths.items()})
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        log.warning("%s: the cached index map is damaged (%s) and will be rebuilt", record_path, error)
        return None


def _file_record(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _array_path(directory: Path, key: MapKey, field: str) -> Path:
    return directory / f"{key.name()}-{field}.npy"


def _record_path(directory: Path, key: MapKey) -> Path:
    return directory / f"{key.name()}.json"
