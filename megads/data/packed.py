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
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megads.data.indexed import Array, IndexedDataset, IndexedDatasetWriter, IntArray
from megads.data.packed_bins import Integers, PackedBins, learnt_sequences
from megads.data.runs import Runs, places_in_rows
from megads.errors import DataError

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


def _counted(runs: Runs, offsets: IntArray) -> IntArray:
    """Spans of labels that are learnt, see Runs; each run begins in its document at an offset."""
    which, begins, ends = learnt_sequences(runs.dataset, runs.documents)
    begins = np.maximum(begins - offsets[which], 1)
    ends = np.minimum(ends - offsets[which], runs.lengths[which])
    inside = ends > begins
    which = which[inside]
    # The label of an input token is the token after it.
    labels = runs.places[which] - 1
    return np.stack((runs.rows[which], labels + begins[inside], labels + ends[inside]), axis=1)


def _runs(dataset: IndexedDataset, packed: PackedBins, pieces_by_bin: Integers, bins: IntArray, rows: IntArray) -> Runs:
    """Runs of bins into rows of a batch."""
    which, documents, offsets, lengths = packed.pieces_of(pieces_by_bin, bins)
    starts = dataset.document_bounds(documents)[0] + offsets
    places = places_in_rows(which, lengths)
    found = Runs(dataset, documents, starts, lengths, rows[which], places)
    return replace(found, counted=_counted(found, offsets))


class PackedSamples:
    """The endless stream of packed training samples: a `TrainSource`.

    Which lengths share a sample is the same in every epoch; which of the documents of a length, and the order of the
    samples, are functions of seed and epoch. So an epoch has the same number of samples whatever its number.

    Args:
        dataset: where the tokens are.
        documents: the documents to train on.
        seq_len: S, tokens that a sample predicts.
        seed: of the order.
        cache_dir: see `PackedBins`.

    Raises:
        ConfigError: data.cache_dir was given and cannot be written.
        DataError: no document has a token to learn.
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
        """See `TrainSource`; one map an epoch."""
        maps = -(-samples // self.samples_per_epoch)
        for epoch in range(maps):
            self._epoch(epoch)
        return maps

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; there are none."""

    def runs(self, samples: IntArray) -> list[Runs]:
        """Where the tokens of samples are, see `SampleSource`; one item an epoch."""
        epochs, bins = self.dataset_samples(samples).T
        found = []
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            found.append(_runs(self.dataset, self._bins, self._epoch(int(epoch))[0], bins[rows], rows))
        return found

    def _epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Pieces in the order of the bins, and the bins in the order of training."""
        found = self._epochs.get(epoch)
        if found is None:
            found = self._epochs[epoch] = self._bins.epoch(self._seed, epoch)
            if len(self._epochs) > KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return found


class PackedValidation:
    """Packed documents, each once and in an order that no seed changes: a `ValidationSource`.

    Args:
        dataset: where the tokens are.
        documents: the documents to validate on.
        seq_len: S, tokens that a window predicts.
        cache_dir: see `PackedBins`.

    Raises:
        ConfigError: data.cache_dir was given and cannot be written.
        DataError: no document has a token to learn.
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
        """Where the tokens of windows are, see `SampleSource`; windows beyond the last have none."""
        rows = np.flatnonzero(windows < len(self))
        return [_runs(self.dataset, self._bins, self._order, windows[rows], rows)]


def _packed(dataset: IndexedDataset, documents: range, seq_len: int, cache_dir: str | None) -> PackedBins:
    bins = PackedBins(dataset, documents, seq_len, cache_dir)
    if not len(bins):
        raise DataError(
            f"{dataset.prefix}: none of documents {documents.start} to {documents.stop - 1} has a token to learn "
            f"within train.seq_len + 1 = {seq_len + 1} tokens: give pairs with responses, or a longer train.seq_len"
        )
    return bins
