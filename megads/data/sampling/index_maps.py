"""Index maps: which tokens make up which sample of which epoch, and a cache of the maps.

The order of an epoch depends only on the dataset, the seed and the epoch, so a longer run begins with the same samples.
Each document and each sample has a random key, and sorting by key gives the order. Large maps are built in bounded
memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from megads.data.indexed.dataset import IndexedDataset, IntArray
from megads.data.sampling.cached_arrays import ArrayCache, CachedArrays, MapWriter, OpenArray
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import ENTRY, MOST_ITEMS, KeySort, compiled_key_sort
from megads.runtime.environment import available_cores
from megads.runtime.progress import Progress

FORMAT_VERSION = 1
# Smaller maps are built faster than they are read and verified.
SMALL_MAP_ENTRIES = 1 << 16
ROWS = 1 << 18
"""Rows of a sample index that are computed at a time."""
_NICENESS = 10
"""Niceness of a thread that builds during training, relative to the process."""
MEMORY_BYTES = 1 << 30
"""Memory for random keys."""
PIECE = 1 << 18
"""Items of a random order that are yielded together: few enough for the processor's cache."""
# Key, item and position during sorting, each also in the chunks in which they were drawn.
_NUMPY_BYTES = 48
_DRAWN = 1 << 17
log = logging.getLogger(__name__)


class _BuildStopped(Exception):
    """The build of a map ahead of time was stopped."""


def build_sample_index(sizes: npt.NDArray[np.integer[Any]], seq_len: int) -> IntArray:
    """Cuts a stream of documents into samples of seq_len + 1 tokens; adjacent samples share one token.

    Args:
        sizes: [documents], tokens in each document, in reading order.
        seq_len: number of predicted tokens per sample.

    Returns:
        int64 [samples + 1, 2]: (position in the document order, token offset in that document) of each sample's first
        token, which is also the last token of the previous sample; the final row is the end of the last sample.
    """
    total = int(np.sum(sizes, dtype=np.int64))
    cutter = SampleCutter(total, seq_len)
    index = np.zeros((cutter.rows, 2), np.int64)
    done = 0
    for begin in range(0, len(sizes), PIECE):
        for rows in cutter.cut(sizes[begin : begin + PIECE]):
            index[done : done + len(rows)] = rows
            done += len(rows)
    return index


class SampleCutter:
    """Cuts documents into samples incrementally, see `build_sample_index`.

    Args:
        tokens: total number of tokens of all documents.
        seq_len: number of predicted tokens per sample.
    """

    def __init__(self, tokens: int, seq_len: int) -> None:
        self.rows = max(tokens - 1, 0) // seq_len + 1
        """Number of rows of the whole index."""
        self._seq_len = seq_len
        self._documents = self._tokens = self._row = 0

    def cut(self, sizes: npt.NDArray[np.integer[Any]]) -> Iterator[IntArray]:
        """Yields int64 [n, 2], the rows whose first tokens are in the next documents."""
        ends = np.cumsum(sizes, dtype=np.int64) + self._tokens
        end_token = int(ends[-1]) if ends.size else self._tokens
        end_row = min(-(-end_token // self._seq_len), self.rows)
        # A sample's position is the number of documents, including empty ones, that end at or before its first token.
        # Counting them in one pass is faster than a search for each sample.
        first_row_after = (ends + (self._seq_len - 1)) // self._seq_len
        for begin in range(self._row, end_row, ROWS):
            end = min(begin + ROWS, end_row)
            before, inside = np.searchsorted(first_row_after, (begin, end)).tolist()
            rows = np.empty((end - begin, 2), np.int64)
            ended = np.bincount(first_row_after[before:inside] - begin, minlength=end - begin)
            positions = before + np.cumsum(ended)
            starts = ends[positions] - sizes[positions]
            rows[:, 0] = positions + self._documents
            np.subtract(np.arange(begin, end) * self._seq_len, starts, out=rows[:, 1])
            yield rows
        self._row = max(end_row, self._row)
        self._documents += len(sizes)
        self._tokens = end_token


@dataclass(frozen=True)
class EpochMapKey:
    """All values that determine the map of one epoch."""

    fingerprint: str
    """Fingerprint of the dataset."""
    first_document: int
    """Start of the range of documents."""
    end_document: int
    """End of the range of documents, exclusive."""
    seq_len: int
    """Number of predicted tokens per sample."""
    seed: int
    """Shuffling seed of the run."""
    epoch: int
    """Index of the pass over the documents, from 0."""

    def name(self) -> str:
        """Returns a file name that is unique to the map's content."""
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

    def size_bytes(self, dataset: IndexedDataset) -> int:
        """Returns the size of the map's arrays in bytes."""
        documents, samples = _counts(dataset, self)
        return sum(_order_dtype(count).itemsize * count for count in (documents, samples)) + 16 * (samples + 1)

    def write(self, dataset: IndexedDataset, writer: MapWriter) -> None:
        """Writes the result of `build`, in bounded memory."""
        random = np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch]))
        documents, samples = _counts(dataset, self)
        cutter = SampleCutter(_tokens(dataset, self), self.seq_len)
        with (
            writer.pieces("document_order", _order_dtype(documents), (documents,)) as append_documents,
            writer.pieces("sample_index", "<i8", (cutter.rows, 2)) as append_rows,
        ):
            for piece in random_order(random, documents, writer.threads, dataset, self.first_document):
                assert piece.sizes is not None
                append_documents(piece.items + self.first_document)
                for rows in cutter.cut(piece.sizes):
                    append_rows(rows)
        with writer.pieces("shuffle", _order_dtype(samples), (samples,)) as append_samples:
            for piece in random_order(random, samples, writer.threads):
                append_samples(piece.items)


class MapKey(Protocol):
    """All values that determine a map; builds the map."""

    @property
    def first_document(self) -> int: ...

    @property
    def end_document(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def name(self) -> str:
        """Returns a file name that is unique to the map's content."""

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map in memory."""

    def size_bytes(self, dataset: IndexedDataset) -> int:
        """Returns the size of the map's arrays in bytes."""

    def write(self, dataset: IndexedDataset, writer: MapWriter) -> None:
        """Writes the result of `build`, in bounded memory."""


@dataclass(frozen=True)
class EpochMap:
    """The order of one epoch.

    Attributes:
        document_order: integer [documents], document indices in reading order.
        sample_index: int64 [samples + 1, 2], see `build_sample_index`.
        shuffle: integer [samples], row of sample_index for each sample in training order.
    """

    document_order: npt.NDArray[np.integer[Any]]
    sample_index: IntArray
    shuffle: npt.NDArray[np.integer[Any]]


def _tokens(dataset: IndexedDataset, key: MapKey) -> int:
    return dataset.num_tokens_of(range(key.first_document, key.end_document))


def _counts(dataset: IndexedDataset, key: MapKey) -> tuple[int, int]:
    """Returns the number of documents and of samples in one pass."""
    return key.end_document - key.first_document, max(_tokens(dataset, key) - 1, 0) // key.seq_len


class EpochMapCache:
    """Epoch maps in an `ArrayCache`; small maps are built whenever they are needed.

    Args:
        prefix: prefix of the dataset, see `ArrayCache`.
        cache_dir: see `ArrayCache`.
    """

    def __init__(self, prefix: str, cache_dir: str | None = None) -> None:
        self._prefix = prefix
        self._arrays = ArrayCache(prefix, cache_dir)

    def get(self, dataset: IndexedDataset, key: MapKey) -> EpochMap:
        """Returns the map of one epoch, from the cache or built and cached.

        Raises:
            ConfigError: no folder can hold it, and it is too large for the memory of every rank; or data.cache_dir is
                set and cannot be written to.
        """
        if sum(_counts(dataset, key)) < SMALL_MAP_ENTRIES:
            return key.build(dataset)
        size = key.size_bytes(dataset)

        def write(open_array: OpenArray) -> None:
            with Progress(f"index map of {self._prefix}", size) as progress:
                key.write(dataset, MapWriter(open_array, available_cores(), progress.update))

        found = self._arrays.get(_cached(key, size), write)
        return EpochMap(**found) if found is not None else key.build(dataset)

    def build_ahead(self, dataset: IndexedDataset, key: MapKey, stop: threading.Event) -> None:
        """Builds a map ahead of time in this thread, unless it exists or another process builds it.

        Args:
            dataset: dataset of the map.
            key: identity of the map.
            stop: event that ends the build.

        Raises:
            ConfigError: data.cache_dir is set and cannot be written to.
        """
        if sum(_counts(dataset, key)) < SMALL_MAP_ENTRIES:
            return

        def report(_: int) -> None:
            if stop.is_set():
                raise _BuildStopped

        with suppress(_BuildStopped):
            self._arrays.build_ahead(
                _cached(key, key.size_bytes(dataset)),
                lambda open_array: key.write(dataset, MapWriter(open_array, 1, report)),
            )


def lower_thread_priority() -> None:
    """Permanently lowers the priority of this thread, and of threads that it starts."""
    # Only Linux has priorities per thread.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _cached(key: MapKey, size_bytes: int) -> CachedArrays:
    names = [field.name for field in fields(EpochMap)]
    return CachedArrays(key.name(), asdict(cast(Any, key)), names, "index map", size_bytes)


def permutation(random: np.random.PCG64, count: int) -> npt.NDArray[np.integer[Any]]:
    """Returns a random permutation of 0..count-1, by sorting random keys; `random_order` gives the same in less memory.

    NumPy guarantees the raw stream of a bit generator, but Generator.permutation may change between versions, and an
    update must not change the order of a run's data.
    """
    return np.argsort(random.random_raw(count), kind="stable").astype(_order_dtype(count))


def _order_dtype(count: int) -> np.dtype[Any]:
    """Returns the dtype of a permutation of this many items."""
    return np.dtype("<i4" if count < 2**31 else "<i8")


@dataclass(frozen=True)
class _Piece:
    """Consecutive items of a random order.

    Attributes:
        items: integer [n].
        sizes: int64 [n], tokens of each item if the items are documents; else None.
    """

    items: npt.NDArray[np.integer[Any]]
    sizes: IntArray | None


def random_order(
    random: np.random.PCG64, count: int, threads: int, dataset: IndexedDataset | None = None, first: int = 0
) -> Iterator[_Piece]:
    """Yields a random permutation of 0..count-1 in pieces.

    Keys are not stored: each pass draws all of them again and keeps those of a range that fits into MEMORY_BYTES. It
    also reads the sizes of the documents in order, so that the index need not fit into memory.

    Args:
        random: generator of one number per item; advanced past them after the last piece.
        count: number of items, at least one.
        threads: number of sorting threads.
        dataset: dataset of the documents if the items are documents, else None.
        first: index in the dataset of document 0 of the order.
    """
    sort = _compiled() if count < MOST_ITEMS else None
    if sort is not None:
        yield from _compiled_pieces(sort, random, count, threads, dataset, first)
    else:
        yield from _numpy_pieces(random, count, dataset, first)
    random.advance(count)


def _compiled() -> KeySort | None:
    try:
        return compiled_key_sort(log.info)
    except KernelsUnavailable as error:
        log.warning("sorting index maps with NumPy, some ten times slower: %s", error)
        return None


def _compiled_pieces(
    sort: KeySort, random: np.random.PCG64, count: int, threads: int, dataset: IndexedDataset | None, first: int
) -> Iterator[_Piece]:
    documents = dataset.addresses(first) if dataset is not None else None
    for entries in sort.passes(random, count, MEMORY_BYTES // ENTRY.itemsize, threads, documents):
        for begin in range(0, entries.size, PIECE):
            part = entries[begin : begin + PIECE]
            items, sizes = part["item"].astype(np.int64), None
            if dataset is not None:
                sizes = part["size"].astype(np.int64)
                long = np.flatnonzero(part["size"] == np.iinfo(np.uint32).max)
                if long.size:
                    sizes[long] = _sizes(dataset, items[long] + first)
            yield _Piece(items, sizes)


def _numpy_pieces(random: np.random.PCG64, count: int, dataset: IndexedDataset | None, first: int) -> Iterator[_Piece]:
    passes = -(-count * _NUMPY_BYTES // MEMORY_BYTES)
    for low, end in itertools.pairwise((number << 64) // passes for number in range(passes + 1)):
        order = _numpy_pass(random, count, np.uint64(low), np.uint64(end - 1))
        for begin in range(0, order.size, PIECE):
            items = order[begin : begin + PIECE]
            yield _Piece(items, None if dataset is None else _sizes(dataset, items + first))


def _numpy_pass(random: np.random.PCG64, count: int, lowest: np.uint64, highest: np.uint64) -> IntArray:
    """Returns the items whose keys are in a range, sorted by key."""
    generator = np.random.PCG64()
    generator.state = random.state
    keys, items = [], []
    for begin in range(0, count, _DRAWN):
        drawn = generator.random_raw(min(_DRAWN, count - begin))
        inside = np.flatnonzero((drawn >= lowest) & (drawn <= highest))
        keys.append(drawn[inside])
        items.append(inside + begin)
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate(items)[order]


def _sizes(dataset: IndexedDataset, documents: IntArray) -> IntArray:
    starts, ends = dataset.document_bounds(documents)
    return ends - starts
