"""Samples of whole documents, packed best-fit: prompt/response pairs with the loss on responses.

A document of several sequences alternates between what is given and what is learnt: prompt, response, prompt and so on.
It is cut where a sample ends, as its rest would lack the prompt. A document of one sequence is learnt whole: a long one
fills samples of its own, and its rest is packed like a document (Ding et al. 2024, "Fewer truncations improve language
modeling"). `TurnWriter` writes them; the files stay Megatron's.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.best_fit import best_fit_decreasing
from megads.data.index_maps import permutation
from megads.data.indexed import Array, IndexedDataset, IndexedDatasetWriter, IntArray
from megads.data.runs import Runs, places_in_rows, ragged_arange
from megads.errors import DataError

Order = npt.NDArray[np.integer[Any]]
KEPT_EPOCHS = 4


class TurnWriter(IndexedDatasetWriter):
    """Writes a dataset of documents of several sequences: prompt, response, prompt and so on."""

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._first_sequences = array("q", [0])
        super().__init__(prefix, dtype)

    def append_turns(self, *turns: Sequence[int] | Array) -> None:
        """Appends one document.

        Args:
            turns: [length] token ids each, what is given and what is learnt by turns; may be empty.

        Raises:
            DataError: as `append` does.
        """
        for turn in turns:
            self.append(turn)
        self._first_sequences.append(self._first_sequences[-1] + len(turns))

    @property
    def num_documents(self) -> int:
        """Documents appended so far."""
        return len(self._first_sequences) - 1

    def _document_index(self, begin: int, end: int) -> IntArray:
        return np.array(self._first_sequences[begin:end], np.int64)


@dataclass(frozen=True)
class PackedCounts:
    """What became of the documents, for events.jsonl.

    Attributes:
        documents: all of them.
        tokens: of all of them.
        samples: bins that they fill in each epoch.
        split: longer than a sample, and trained in several.
        truncated: longer than a sample; cut at its end.
        dropped: with no token to learn, or none within a sample's length.
        left_out_tokens: of documents that were truncated or dropped; never trained.
        fill: share of the samples' places that hold a token.
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
class _Pieces:
    """Documents, the long ones in pieces that share a token with the next: it is predicted once, and predicts once.

    Attributes:
        documents: int64 [pieces], number of the document.
        offsets: int64 [pieces], its first token there.
        sizes: int64 [pieces], tokens.
    """

    documents: IntArray
    offsets: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, dataset: IndexedDataset, documents: range, seq_len: int) -> _Pieces:
        """Those with a token to learn."""
        numbers = np.arange(documents.start, documents.stop)
        numbers = numbers[_learnt_tokens(dataset, numbers, seq_len + 1) > 0]
        starts, ends = dataset.document_bounds(numbers)
        whole = dataset.document_index[numbers + 1] - dataset.document_index[numbers] == 1
        counts = np.where(whole, np.maximum(-(-(ends - starts - 1) // seq_len), 1), 1)
        which, offsets = np.repeat(np.arange(numbers.size), counts), ragged_arange(counts) * seq_len
        return cls(numbers[which], offsets, np.minimum((ends - starts)[which] - offsets, seq_len + 1))


class _Bins:
    """Documents of a dataset, packed into samples of S + 1 tokens; the lengths in a bin are the same in every epoch."""

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self.pieces = _Pieces.of(dataset, documents, seq_len)
        sizes = self.pieces.sizes
        self._by_size = np.argsort(-sizes, kind="stable")
        bin_of = best_fit_decreasing(sizes[self._by_size], seq_len + 1)
        # Places of the documents, sorted by size, in the order of the bins: within a bin the longest comes first.
        self._slots = np.argsort(bin_of, kind="stable")
        self.firsts = np.concatenate(([0], np.cumsum(np.bincount(bin_of))))
        self.counts = self._count(documents)

    def _count(self, documents: range) -> PackedCounts:
        count, capacity, pieces = self.firsts.size - 1, self.seq_len + 1, self.pieces
        sizes, kept = self.dataset.document_sizes(documents), np.unique(pieces.documents)
        # A piece's first token is the last one of the piece before.
        trained = int(pieces.sizes.sum()) - int(np.sum(pieces.offsets > 0))
        split = int(np.unique(pieces.documents[pieces.offsets > 0]).size)
        return PackedCounts(
            documents=len(documents),
            tokens=int(sizes.sum()),
            samples=count,
            split=split,
            truncated=int(np.sum(sizes[kept - documents.start] > capacity)) - split,
            dropped=len(documents) - kept.size,
            left_out_tokens=int(sizes.sum()) - trained,
            fill=float(pieces.sizes.sum()) / max(count * capacity, 1),
        )

    def __len__(self) -> int:
        return self.firsts.size - 1

    def in_order(self, order: Order | None = None) -> IntArray:
        """Pieces of bin 0, then of bin 1 and so on; those of equal size change places as `order`, [pieces], says."""
        if order is None:
            return self._by_size[self._slots]
        by_size = order[np.argsort(-self.pieces.sizes[order], kind="stable")].astype(np.int64, copy=False)
        return by_size[self._slots]

    def runs(self, pieces_by_bin: IntArray, bins: IntArray, rows: IntArray) -> Runs:
        """Runs of bins into rows of a batch."""
        counts = self.firsts[bins + 1] - self.firsts[bins]
        which = np.repeat(np.arange(bins.size), counts)
        pieces = pieces_by_bin[self.firsts[bins][which] + ragged_arange(counts)]
        documents, offsets, lengths = (
            self.pieces.documents[pieces],
            self.pieces.offsets[pieces],
            self.pieces.sizes[pieces],
        )
        starts = self.dataset.document_bounds(documents)[0] + offsets
        places = places_in_rows(which, lengths)
        found = Runs(self.dataset, documents, starts, lengths, rows[which], places)
        return replace(found, counted=_counted(found, offsets))


def _learnt_sequences(dataset: IndexedDataset, documents: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Returns (index into documents, first token, end) of every sequence that is learnt, tokens counted from the
    document's first; the first token of a document is not learnt, because nothing comes before it."""
    first = dataset.document_index[documents]
    counts = dataset.document_index[documents + 1] - first
    which, within = np.repeat(np.arange(documents.size), counts), ragged_arange(counts)
    sequences = first[which] + within
    learnt = (within % 2 == 1) | (counts[which] == 1)
    which, sequences = which[learnt], sequences[learnt]
    begins = dataset.sequence_starts(sequences) - dataset.document_bounds(documents)[0][which]
    return which, np.maximum(begins, 1), begins + dataset.sequence_sizes[sequences]


def _learnt_tokens(dataset: IndexedDataset, documents: IntArray, limit: int) -> IntArray:
    """Returns int64 [documents], learnt tokens among the first `limit` of each."""
    which, begins, ends = _learnt_sequences(dataset, documents)
    return np.bincount(which, np.maximum(np.minimum(ends, limit) - begins, 0), documents.size).astype(np.int64)


def _counted(runs: Runs, offsets: IntArray) -> IntArray:
    """Spans of labels that are learnt, see Runs; each run begins in its document at an offset."""
    which, begins, ends = _learnt_sequences(runs.dataset, runs.documents)
    begins = np.maximum(begins - offsets[which], 1)
    ends = np.minimum(ends - offsets[which], runs.lengths[which])
    inside = ends > begins
    which = which[inside]
    # The label of an input token is the token after it.
    labels = runs.places[which] - 1
    return np.stack((runs.rows[which], labels + begins[inside], labels + ends[inside]), axis=1)


class PackedSamples:
    """The endless stream of packed training samples: a `TrainSource`.

    Which lengths share a sample is the same in every epoch; which of the documents of a length, and the order of the
    samples, are functions of seed and epoch. So an epoch has the same number of samples whatever its number.

    Args:
        dataset: where the tokens are.
        documents: the documents to train on.
        seq_len: S, tokens that a sample predicts.
        seed: of the order.

    Raises:
        DataError: no document has a token to learn.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int, seed: int) -> None:
        self.dataset = dataset
        self.seq_len = seq_len
        self._seed = seed
        self._bins = _packed(dataset, documents, seq_len)
        self._epochs: OrderedDict[int, tuple[IntArray, Order]] = OrderedDict()
        self.samples_per_epoch = len(self._bins)
        """Samples in one pass over the documents."""
        self.counts = self._bins.counts
        """What became of the documents."""

    def dataset_samples(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 2], (epoch, bin) of each of n sample numbers."""
        epochs, positions = np.divmod(samples, self.samples_per_epoch)
        bins = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            bins[of_epoch] = self._epoch(int(epoch))[1][positions[of_epoch]]
        return np.stack((epochs, bins), axis=1)

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`; bins are packed anew at every start, and leave nothing on disk."""
        return 0

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; there are none."""

    def runs(self, samples: IntArray) -> list[Runs]:
        """Where the tokens of samples are, see `SampleSource`; one item an epoch."""
        epochs, bins = self.dataset_samples(samples).T
        found = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found.append(self._bins.runs(self._epoch(int(epoch))[0], bins[rows], rows))
        return found

    def _epoch(self, epoch: int) -> tuple[IntArray, Order]:
        """Pieces in the order of the bins, and the bins in the order of training."""
        found = self._epochs.get(epoch)
        if found is None:
            random = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
            pieces = self._bins.in_order(permutation(random, self._bins.pieces.sizes.size))
            found = self._epochs[epoch] = pieces, permutation(random, self.samples_per_epoch)
            if len(self._epochs) > KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return found


class PackedValidation:
    """Packed documents, each once and in an order that no seed changes: a `ValidationSource`.

    Args:
        dataset: where the tokens are.
        documents: the documents to validate on.
        seq_len: S, tokens that a window predicts.

    Raises:
        DataError: no document has a token to learn.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int) -> None:
        self.dataset = dataset
        self.documents = documents
        self.seq_len = seq_len
        self._bins = _packed(dataset, documents, seq_len)
        self._order = self._bins.in_order()

    def __len__(self) -> int:
        return len(self._bins)

    def runs(self, windows: IntArray) -> list[Runs]:
        """Where the tokens of windows are, see `SampleSource`; windows beyond the last have none."""
        rows = np.flatnonzero(windows < len(self))
        return [self._bins.runs(self._order, windows[rows], rows)]


def _packed(dataset: IndexedDataset, documents: range, seq_len: int) -> _Bins:
    bins = _Bins(dataset, documents, seq_len)
    if not len(bins):
        raise DataError(
            f"{dataset.prefix}: none of documents {documents.start} to {documents.stop - 1} has a token to learn "
            f"within train.seq_len + 1 = {seq_len + 1} tokens: give pairs with responses, or a longer train.seq_len"
        )
    return bins
