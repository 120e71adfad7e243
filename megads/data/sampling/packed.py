"""Best-fit packing: samples of whole documents; for prompt/response pairs the loss is computed on responses.

A document of several sequences alternates between prompts and responses. It is truncated at the length of a sample,
because its rest would lack the prompt. A document of one sequence is trained on as a whole: a long one fills samples of
its own, and its rest is packed like a document (Ding et al. 2024, "Fewer truncations improve language modeling").
`megads.data.indexed.writer.TurnWriter` writes such documents in Megatron's file format.

Which lengths share a sample depends only on the lengths of the documents. This is computed once, cached, and
memory-mapped by every rank. Which document of a given length is used depends on the epoch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.indexed.dataset import IndexedDataset, IntArray
from megads.data.sampling.cached_arrays import ArrayCache, Arrays, CachedArrays, OpenArray
from megads.data.sampling.index_maps import SMALL_MAP_ENTRIES, permutation
from megads.data.sampling.runs import Runs, ragged_arange, row_offsets
from megads.errors import DataError

FORMAT_VERSION = 1
CHUNK = 1 << 20
"""Documents that are processed together, to bound memory."""
Integers = npt.NDArray[np.integer[Any]]
KEPT_EPOCHS = 4


def best_fit_decreasing(sizes: IntArray, capacity: int) -> IntArray:
    """Assigns items to bins, the largest first, each to the fullest bin with enough free capacity.

    Items of one size are placed at once into all bins of one free capacity, as many per bin as fit, so the work grows
    with the number of distinct sizes, not of items. Every such step except the last of a size uses up a free capacity
    and leaves at most two others, so there are at most three steps per size. (Best-fit decreasing: Johnson 1973; for
    sequences: Ding et al. 2024, "Fewer truncations improve language modeling".)

    Args:
        sizes: int64 [n], in descending order, from 1 to capacity.
        capacity: size of a bin.

    Returns:
        int64 [n], index of the bin of each item; bins are numbered from 0 in the order in which they are opened.
    """
    assert not sizes.size or (sizes[-1] >= 1 and sizes[0] <= capacity and np.all(np.diff(sizes) <= 0))
    bin_of = np.empty(sizes.size, np.int64)
    free = _FreeBins(capacity)
    firsts = np.flatnonzero(np.diff(sizes, prepend=capacity + 1))
    for start, end in itertools.pairwise([*firsts.tolist(), sizes.size]):
        size, first = int(sizes[start]), start
        for space in [*free.free_capacities(size), capacity]:
            each = space // size
            bins = free.take(space, -(-(end - first) // each))
            placed = min(end - first, bins.size * each)
            bin_of[first : first + placed] = np.repeat(bins, each)[:placed]
            filled = placed // each
            free.put(space - each * size, bins[:filled])
            free.put(space - placed % each * size, bins[filled:])
            first += placed
            if first == end:
                break
    return bin_of


class _FreeBins:
    """Bins by free capacity. All bins that were never opened have a free capacity of `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_capacity: list[list[IntArray]] = [[] for _ in range(capacity)]
        self._counts = np.zeros(capacity, np.int64)
        self._opened = 0

    def free_capacities(self, size: int) -> list[int]:
        """Free capacities of opened bins that fit an item of that size, in ascending order."""
        found: list[int] = (size + np.flatnonzero(self._counts[size:])).tolist()
        return found

    def take(self, space: int, wanted: int) -> IntArray:
        """Removes and returns up to `wanted` bins with free capacity `space`."""
        if space == self._capacity:
            self._opened += wanted
            return np.arange(self._opened - wanted, self._opened)
        bins = np.concatenate(self._by_capacity[space])
        self._by_capacity[space] = [bins[wanted:]]
        self._counts[space] = max(bins.size - wanted, 0)
        return bins[:wanted]

    def put(self, space: int, bins: IntArray) -> None:
        """Returns bins, which now have free capacity `space`."""
        if space and bins.size:
            self._by_capacity[space].append(bins)
            self._counts[space] += bins.size


@dataclass(frozen=True)
class PackedCounts:
    """Packing statistics of the documents, for events.jsonl.

    Attributes:
        documents: number of documents.
        tokens: number of tokens in the documents.
        samples: samples per epoch.
        split: documents longer than a sample that are trained on in several pieces.
        truncated: documents longer than a sample that are truncated.
        dropped: documents without a token for the loss, or with none within a sample's length.
        left_out_tokens: tokens of truncated or dropped documents that are never trained on.
        fill: share of the samples' positions that hold a token.
    """

    documents: int
    tokens: int
    samples: int
    split: int
    truncated: int
    dropped: int
    left_out_tokens: int
    fill: float


@dataclass(frozen=True)
class _Bins:
    """Pieces of documents, and their assignment to bins by length.

    Adjacent pieces of a long document share one token: it is predicted in the first piece and is an input of the
    second.

    Attributes:
        documents: integer [pieces], index of the document.
        offsets: int32 [pieces], first token of the piece within its document.
        sizes: int32 [pieces], length in tokens.
        slots: integer [pieces], in bin order: rank of the piece among all pieces sorted by descending length. Within a
            bin, pieces are in descending length too.
        firsts: int64 [bins + 1], index of the first piece of each bin, in bin order.
        totals: int64 [5]: tokens, left_out_tokens, split, truncated and dropped of `PackedCounts`.
    """

    documents: Integers
    offsets: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    slots: Integers
    firsts: IntArray
    totals: IntArray


class _PackedBins:
    """Documents of a dataset packed into samples of S + 1 tokens; the lengths in a bin are the same in every epoch.

    Args:
        dataset: the dataset.
        documents: the documents to pack.
        seq_len: S, the number of predicted tokens per sample.
        cache_dir: folder in which bins are cached; None is beside the dataset. Bins of few documents are not cached.

    Raises:
        ConfigError: data.cache_dir is set and cannot be written to.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int, cache_dir: str | None = None) -> None:
        self._small = len(documents) + dataset.num_tokens_of(documents) // seq_len < SMALL_MAP_ENTRIES
        self._cache = ArrayCache(dataset.prefix, cache_dir)
        self._key = {
            "fingerprint": dataset.fingerprint(),
            "first_document": documents.start,
            "end_document": documents.stop,
            "seq_len": seq_len,
        }
        self._capacity = seq_len + 1
        names = [field.name for field in fields(_Bins)]
        self._bins = _Bins(**self._cached("bins", {}, names, lambda: vars(_pack(dataset, documents, self._capacity))))
        self.counts = self._count(len(documents))
        """Packing statistics of the documents."""

    def __len__(self) -> int:
        return self._bins.firsts.size - 1

    def epoch(self, seed: int, epoch: int) -> tuple[Integers, Integers]:
        """Returns the pieces in bin order, and the bins in training order."""

        def build() -> Arrays:
            random = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
            pieces = self._in_bins(permutation(random, self._bins.sizes.size))
            return {"pieces": pieces, "bins": permutation(random, len(self))}

        found = self._cached(f"epoch{epoch:05d}", {"seed": seed, "epoch": epoch}, ("pieces", "bins"), build)
        return found["pieces"], found["bins"]

    def unshuffled(self) -> Integers:
        """Returns the pieces in bin order, pieces of equal length in document order."""

        def build() -> Arrays:
            return {"pieces": self._in_bins(_narrow(np.arange(self._bins.sizes.size)))}

        return self._cached("unshuffled", {"order": "unshuffled"}, ("pieces",), build)["pieces"]

    def pieces_of(self, pieces_by_bin: Integers, bins: IntArray) -> tuple[IntArray, ...]:
        """Locates the content of n bins.

        Args:
            pieces_by_bin: pieces in bin order, of an epoch or unshuffled.
            bins: int64 [n], indices of the bins.

        Returns:
            Four int64 [pieces of these bins]: index into `bins`, document, first token in the document, length in
            tokens.
        """
        firsts, found = self._bins.firsts[bins], self._bins
        counts = found.firsts[bins + 1] - firsts
        which = np.repeat(np.arange(bins.size), counts)
        pieces = pieces_by_bin[firsts[which] + ragged_arange(counts)]
        return which, *(part[pieces].astype(np.int64) for part in (found.documents, found.offsets, found.sizes))

    def _in_bins(self, order: Integers) -> Integers:
        """Returns the pieces in bin order; pieces of equal size are permuted according to `order`, [pieces]."""
        by_size = order[_longest_first(self._bins.sizes[order], self._capacity)]
        return by_size[self._bins.slots]

    def _count(self, documents: int) -> PackedCounts:
        tokens, left_out, split, truncated, dropped = self._bins.totals.tolist()
        # The first token of a piece is also the last one of the previous piece.
        placed = tokens - left_out + self._bins.sizes.size - (documents - dropped)
        return PackedCounts(
            documents=documents,
            tokens=tokens,
            samples=len(self),
            split=split,
            truncated=truncated,
            dropped=dropped,
            left_out_tokens=left_out,
            fill=float(placed) / max(len(self) * self._capacity, 1),
        )

    def _cached(self, name: str, more: dict[str, Any], arrays: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """Returns arrays that are determined by the dataset's key and `more`; cached and memory-mapped if they are
        large."""
        if self._small:
            return build()
        built = functools.cache(build)

        def write(open_array: OpenArray) -> None:
            for part, content in built().items():
                with open_array(part) as file:
                    np.save(file, content)

        key = self._key | more | {"packing": "best_fit", "format": FORMAT_VERSION}
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        found = self._cache.get(CachedArrays(f"{digest}-packed-{name}", key, arrays, "packing"), write)
        return found if found is not None else built()


def _loss_sequences(dataset: IndexedDataset, documents: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Returns (index into documents, first token, end) of every sequence in the loss, token positions relative to the
    document. The first token of a document is not in the loss, because nothing precedes it."""
    first = dataset.document_index[documents]
    counts = dataset.document_index[documents + 1] - first
    which, within = np.repeat(np.arange(documents.size), counts), ragged_arange(counts)
    sequences = first[which] + within
    learnt = (within % 2 == 1) | (counts[which] == 1)
    which, sequences = which[learnt], sequences[learnt]
    begins = dataset.sequence_starts(sequences) - dataset.document_bounds(documents)[0][which]
    return which, np.maximum(begins, 1), begins + dataset.sequence_sizes[sequences]


def _pack(dataset: IndexedDataset, documents: range, capacity: int) -> _Bins:
    chunks = [
        _pieces(dataset, range(begin, min(begin + CHUNK, documents.stop)), capacity)
        for begin in range(documents.start, max(documents.stop, documents.start + 1), CHUNK)
    ]
    numbers, offsets, sizes, totals = (list(part) for part in zip(*chunks, strict=True))
    all_sizes = np.concatenate(sizes)
    by_size = _longest_first(all_sizes, capacity)
    bin_of = best_fit_decreasing(all_sizes[by_size].astype(np.int64), capacity)
    return _Bins(
        documents=np.concatenate(numbers),
        offsets=np.concatenate(offsets),
        sizes=all_sizes,
        slots=_narrow(np.argsort(bin_of, kind="stable")),
        firsts=np.concatenate(([0], np.cumsum(np.bincount(bin_of)))),
        totals=np.sum(totals, axis=0, dtype=np.int64),
    )


def _pieces(dataset: IndexedDataset, documents: range, capacity: int) -> tuple[Integers, Integers, Integers, IntArray]:
    """Returns documents, offsets, sizes and totals (see `_Bins`) of the documents with a token in the loss."""
    all_sizes = dataset.document_sizes(documents)
    numbers = np.arange(documents.start, documents.stop)
    kept = _num_loss_tokens(dataset, numbers, capacity) > 0
    numbers, sizes = numbers[kept], all_sizes[kept]
    whole = dataset.document_index[numbers + 1] - dataset.document_index[numbers] == 1
    counts = np.where(whole, np.maximum(-(-(sizes - 1) // (capacity - 1)), 1), 1)
    which, offsets = np.repeat(np.arange(numbers.size), counts), ragged_arange(counts) * (capacity - 1)
    # A sequence, and so a document that is split, has fewer than 2^31 tokens.
    lengths = np.minimum(sizes[which] - offsets, capacity).astype(np.int32)
    long = sizes > capacity
    trained = int(lengths.sum(dtype=np.int64)) - (which.size - numbers.size)
    tokens, split = int(all_sizes.sum()), int(np.sum(long & whole))
    totals = np.array([tokens, tokens - trained, split, int(long.sum()) - split, len(documents) - numbers.size])
    dtype = np.int32 if dataset.num_documents < 2**31 else np.int64
    return numbers[which].astype(dtype), offsets.astype(np.int32), lengths, totals


def _num_loss_tokens(dataset: IndexedDataset, documents: IntArray, limit: int) -> IntArray:
    """Returns int64 [documents], the number of loss tokens among the first `limit` tokens of each document."""
    which, begins, ends = _loss_sequences(dataset, documents)
    return np.bincount(which, np.maximum(np.minimum(ends, limit) - begins, 0), documents.size).astype(np.int64)


def _longest_first(sizes: npt.NDArray[np.int32], capacity: int) -> Integers:
    """Returns the stable descending order of sizes from 0 to the capacity; NumPy radix-sorts 16-bit keys."""
    keys = np.subtract(capacity, sizes)
    return _narrow(np.argsort(keys.astype(np.uint16) if capacity < 2**16 else keys, kind="stable"))


def _narrow(places: IntArray) -> Integers:
    """Returns indices into an array of the same size as int32 if they fit, which halves their memory."""
    return places.astype(np.int32) if places.size < 2**31 else places


def _counted(runs: Runs, offsets: IntArray) -> IntArray:
    """Returns the label spans in the loss, see `Runs`; `offsets` are where the runs begin in their documents."""
    which, begins, ends = _loss_sequences(runs.dataset, runs.documents)
    begins = np.maximum(begins - offsets[which], 1)
    ends = np.minimum(ends - offsets[which], runs.lengths[which])
    inside = ends > begins
    which = which[inside]
    # The label of an input token is the token after it.
    labels = runs.places[which] - 1
    return np.stack((runs.rows[which], labels + begins[inside], labels + ends[inside]), axis=1)


def _runs(
    dataset: IndexedDataset, packed: _PackedBins, pieces_by_bin: Integers, bins: IntArray, rows: IntArray
) -> Runs:
    """Returns the runs that fill rows of a batch with the content of bins."""
    which, documents, offsets, lengths = packed.pieces_of(pieces_by_bin, bins)
    starts = dataset.document_bounds(documents)[0] + offsets
    places = row_offsets(which, lengths)
    found = Runs(dataset, documents, starts, lengths, rows[which], places)
    return replace(found, counted=_counted(found, offsets))


class PackedSamples:
    """The infinite stream of packed training samples: a `TrainSource`.

    Which lengths share a sample is the same in every epoch. Which documents of each length are used, and the order of
    the samples, are functions of seed and epoch. So every epoch has the same number of samples.

    Args:
        dataset: the dataset.
        documents: the documents to train on.
        seq_len: S, the number of predicted tokens per sample.
        seed: shuffling seed.
        cache_dir: see `_PackedBins`.

    Raises:
        ConfigError: data.cache_dir is set and cannot be written to.
        DataError: no document has a token for the loss.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: range, seq_len: int, seed: int, cache_dir: str | None = None
    ) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self._seed = seed
        self._bins = _packed(dataset, documents, seq_len, cache_dir)
        self._epochs: OrderedDict[int, tuple[Integers, Integers]] = OrderedDict()
        self.samples_per_epoch = len(self._bins)
        """Samples in one pass over the documents."""
        self.counts = self._bins.counts
        """Packing statistics of the documents."""

    def sample_keys(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 2], (epoch, bin) of n samples of the dataset's stream."""
        epochs, positions = np.divmod(samples, self.samples_per_epoch)
        bins = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            bins[of_epoch] = self._epoch(int(epoch))[1][positions[of_epoch]]
        return np.stack((epochs, bins), axis=1)

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`; there is one map per epoch."""
        maps = -(-samples // self.samples_per_epoch)
        for epoch in range(maps):
            self._epoch(epoch)
        return maps

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; does nothing."""

    def runs(self, samples: IntArray) -> list[Runs]:
        """Returns the locations of samples' tokens, see `SampleSource`; one item per epoch."""
        epochs, bins = self.sample_keys(samples).T
        found = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found.append(_runs(self.dataset, self._bins, self._epoch(int(epoch))[0], bins[rows], rows))
        return found

    def _epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Returns the pieces in bin order, and the bins in training order."""
        found = self._epochs.get(epoch)
        if found is None:
            found = self._epochs[epoch] = self._bins.epoch(self._seed, epoch)
            if len(self._epochs) > KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return found


class PackedValidation:
    """Packed documents, each once and in an order that does not depend on a seed: a `ValidationSource`.

    Args:
        dataset: the dataset.
        documents: the documents to validate on.
        seq_len: S, the number of predicted tokens per window.
        cache_dir: see `_PackedBins`.

    Raises:
        ConfigError: data.cache_dir is set and cannot be written to.
        DataError: no document has a token for the loss.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int, cache_dir: str | None = None) -> None:
        self.dataset = dataset
        self.documents = documents
        self.seq_len = seq_len
        self._bins = _packed(dataset, documents, seq_len, cache_dir)
        self._order = self._bins.unshuffled()

    def __len__(self) -> int:
        return len(self._bins)

    def runs(self, windows: IntArray) -> list[Runs]:
        """Returns the locations of windows' tokens, see `SampleSource`; windows after the last have none."""
        rows = np.flatnonzero(windows < len(self))
        return [_runs(self.dataset, self._bins, self._order, windows[rows], rows)]


def _packed(dataset: IndexedDataset, documents: range, seq_len: int, cache_dir: str | None) -> _PackedBins:
    bins = _PackedBins(dataset, documents, seq_len, cache_dir)
    if not len(bins):
        raise DataError(
            f"{dataset.name}: none of documents {documents.start} to {documents.stop - 1} has a token to learn "
            f"within train.seq_len + 1 = {seq_len + 1} tokens: give pairs with responses, or a longer train.seq_len"
        )
    return bins
