"""Which tokens make up which sample of which epoch, and the cache of that answer.

The order of an epoch depends on the dataset, the seed and the epoch alone: a longer run sees the same samples first.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from megads.data.cached_arrays import ArrayCache, CachedArrays, OpenArray
from megads.data.indexed import IndexedDataset, IntArray

FORMAT_VERSION = 1
# A map this small is built faster than it is read and checked.
SMALL_MAP_ENTRIES = 1 << 16


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
    """Epoch maps in an `ArrayCache`; small ones are built whenever they are asked for.

    Args:
        prefix: the dataset's, see `ArrayCache`.
        cache_dir: see there.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._arrays = ArrayCache(prefix, cache_dir)

    def get(self, dataset: IndexedDataset, key: MapKey) -> EpochMap:
        """Returns the map of one epoch, from the cache or built and cached.

        Raises:
            ConfigError: data.cache_dir was given and cannot be written.
        """
        documents = range(key.first_document, key.end_document)
        samples = dataset.stream(documents).size // key.seq_len
        if len(documents) + samples < SMALL_MAP_ENTRIES:
            return key.build(dataset)
        build = functools.cache(lambda: key.build(dataset))

        def write(open_array: OpenArray) -> None:
            for name, array in vars(build()).items():
                with open_array(name) as file:
                    np.save(file, array)

        names = [field.name for field in fields(EpochMap)]
        found = self._arrays.get(CachedArrays(key.name(), asdict(cast(Any, key)), names, "index map"), write)
        return EpochMap(**found) if found is not None else build()
