"""Computes which token ranges of a dataset fill which positions of a batch, for all samples at once.

A run is here a range of consecutive tokens, as in run-length encoding, and not a training run.
`sample_origins` finds the documents of the samples of a step, for inspection.

Shape suffixes: b = samples, s = sequence length, t = s + 1 tokens of a sample, r = runs.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megads.data.indexed.dataset import Array, IndexedDataset, IntArray
from megads.data.sampling.index_maps import EpochMap

_FEW_RUNS = 16
"""Up to this many runs are not sorted before they are read."""


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens, each from one document, that fill the rows of a batch without overlap.

    Attributes:
        dataset: the dataset.
        documents: int64 [r], index of the document.
        starts: int64 [r], position in `.bin` of the first token.
        lengths: int64 [r], number of tokens, above 0.
        rows: int64 [r], row of the batch.
        places: int64 [r], position in the row of the first token.
        counted: int64 [n, 3], (row, first label, end of labels) of the label spans in the loss. None if every label
            with a token is in the loss.
    """

    dataset: IndexedDataset
    documents: IntArray
    starts: IntArray
    lengths: IntArray
    rows: IntArray
    places: IntArray
    counted: IntArray | None = None


class SampleSource(Protocol):
    """Indexed samples for training or validation, from one dataset or several.

    An index counts the samples of this source: for the source of a run it is the sample id, for a dataset in a blend
    the index in the stream of that dataset.
    """

    @property
    def seq_len(self) -> int:
        """S, the number of predicted tokens per sample, which has S + 1 tokens."""

    def runs(self, samples: IntArray) -> Sequence[Runs]:
        """Locates the tokens of samples without reading them.

        Args:
            samples: int64 [b], sample indices; a sample that does not exist (beyond the end of validation) has no runs.

        Returns:
            Runs with rows 0 to b - 1 in the order of `samples`; at least one item per dataset.
        """


class TrainSource(SampleSource, Protocol):
    """An infinite stream of samples."""

    samples_per_epoch: int

    def sample_keys(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, k], the values that determine the content of each of n samples, as hashed by
        `batch_hash`: (epoch, row or bin), preceded by the dataset in a blend."""

    def build_maps(self, samples: int) -> int:
        """Builds and caches the index maps that the first samples need; returns their number."""

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """Builds maps that will soon be needed, in this thread, unless they exist or another process builds them.

        Args:
            samples: number of samples that have been read.
            end: number of samples that will be read; None if unknown.
            stop: event that ends the build.

        Raises:
            ConfigError: data.cache_dir is set and cannot be written to.
        """


class ValidationSource(SampleSource, Protocol):
    """Windows 0 to len - 1, which are read once and in order."""

    def __len__(self) -> int: ...


def ragged_arange(counts: IntArray) -> IntArray:
    """Returns 0..counts[0]-1, 0..counts[1]-1 and so on, int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)


def runs_of_samples(dataset: IndexedDataset, epoch_map: EpochMap, index_rows: IntArray, batch_rows: IntArray) -> Runs:
    """Returns the runs of samples that were cut from concatenated documents.

    Args:
        dataset: the dataset.
        epoch_map: index map of the samples' epoch.
        index_rows: int64 [b], row of the sample index of each sample.
        batch_rows: int64 [b], row of the batch that each sample fills.

    Returns:
        The runs; documents without tokens have none.
    """
    first, last = epoch_map.sample_index[index_rows], epoch_map.sample_index[index_rows + 1]
    counts = last[:, 0] - first[:, 0] + 1
    sample = np.repeat(np.arange(index_rows.size), counts)
    within = ragged_arange(counts)
    documents = epoch_map.document_order[first[sample, 0] + within].astype(np.int64)
    starts, ends = dataset.document_bounds(documents)
    # The last token of a sample is also the first one of the next sample.
    ends = np.where(within == counts[sample] - 1, starts + last[sample, 1] + 1, ends)
    starts = np.where(within == 0, starts + first[sample, 1], starts)
    return _in_order(dataset, documents, starts, ends, batch_rows[sample])


def runs_of_windows(dataset: IndexedDataset, documents: range, begins: IntArray, ends: IntArray) -> Runs:
    """Returns the runs of windows on consecutive documents, one window per row of the batch; an empty window has none.

    Args:
        dataset: the dataset.
        documents: documents that contain the windows.
        begins: int64 [b], position in `.bin` of each window's first token.
        ends: int64 [b], position in `.bin` of each window's end, exclusive.

    Returns:
        The runs; all of their tokens except the first of a row are in the loss.
    """
    # A binary search in the index reads a few pages, whereas the starts of all documents may be gigabytes.
    first = _documents_at(dataset, documents, begins)
    last = _documents_at(dataset, documents, ends - 1)
    counts = np.where(ends > begins, last - first + 1, 0)
    rows = np.repeat(np.arange(begins.size), counts)
    numbers = first[rows] + ragged_arange(counts)
    starts, stops = dataset.document_bounds(numbers)
    return _in_order(dataset, numbers, np.maximum(starts, begins[rows]), np.minimum(stops, ends[rows]), rows)


def _documents_at(dataset: IndexedDataset, documents: range, positions: IntArray) -> IntArray:
    """Returns the last document that starts at or before each position."""
    found = [bisect_right(documents, position, key=dataset.document_start) for position in positions.tolist()]
    return np.array(found, np.int64) + (documents.start - 1)


def _in_order(dataset: IndexedDataset, documents: IntArray, starts: IntArray, ends: IntArray, rows: IntArray) -> Runs:
    """Returns consecutive runs of rows, without empty ones."""
    filled = ends > starts
    documents, starts, rows = documents[filled], starts[filled], rows[filled]
    lengths = ends[filled] - starts
    return Runs(dataset, documents, starts, lengths, rows, row_offsets(rows, lengths))


def row_offsets(rows: IntArray, lengths: IntArray) -> IntArray:
    """Returns int64 [r], the start of each run in its row if the runs of a row are consecutive."""
    before = np.cumsum(lengths) - lengths
    if not rows.size:
        return before
    new_row = np.concatenate(([True], rows[1:] != rows[:-1]))
    return before - before[new_row][np.cumsum(new_row) - 1]


def blended_runs(parts: Sequence[SampleSource], which: IntArray, numbers: IntArray) -> list[Runs]:
    """Returns the runs of a batch whose samples come from several sources.

    Args:
        parts: the sources, all of one sequence length.
        which: int64 [b], index into `parts` of each sample.
        numbers: int64 [b], index of each sample in its source.
    """
    found = []
    for part, rows in group_rows(which):
        for runs in parts[part].runs(numbers[rows]):
            counted = runs.counted
            if counted is not None:
                counted = np.column_stack((rows[counted[:, 0]], counted[:, 1:]))
            in_batch = rows[runs.rows]
            found.append(Runs(runs.dataset, runs.documents, runs.starts, runs.lengths, in_batch, runs.places, counted))
    return found


def group_rows(which: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yields each part that occurs, in order, and its rows."""
    order = np.argsort(which, kind="stable")
    parts = which[order]
    borders = np.flatnonzero(parts[1:] != parts[:-1]) + 1
    begins = [0, *borders.tolist()] if parts.size else []
    for begin, end, part in zip(begins, [*begins[1:], parts.size], parts[begins].tolist(), strict=True):
        yield part, order[begin:end]


def copy_tokens(runs: Sequence[Runs], out_bt: Array) -> None:
    """Copies the tokens of a batch.

    They are read in file order, so that pages and disk blocks are visited once and in ascending order. A loop over
    slices is faster than `numpy.take` of single tokens even at 50 tokens per document (docs/notes/performance.md).

    Args:
        runs: runs to copy.
        out_bt: contiguous output, of a dtype that holds all tokens; positions without a run stay unchanged.
    """
    flat, width = out_bt.reshape(-1), out_bt.shape[1]
    for part in runs:
        starts, lengths, targets = part.starts, part.lengths, part.rows * width + part.places
        if starts.size > _FEW_RUNS:
            order = np.argsort(starts)
            starts, lengths, targets = starts[order], lengths[order], targets[order]
        part.dataset.fetch(starts, starts + lengths)
        tokens = part.dataset.all_tokens
        bounds = zip(
            starts.tolist(), (starts + lengths).tolist(), targets.tolist(), (targets + lengths).tolist(), strict=True
        )
        for start, end, target, target_end in bounds:
            flat[target:target_end] = tokens[start:end]


def document_starts(runs: Sequence[Runs], batch: int, seq_len: int) -> IntArray:
    """Returns int64 [b, s], the position at which the document of each input token starts.

    It is 0 for a document that starts before the sample. Positions after the last run of a row belong to its document.
    """
    flat = _document_borders(runs, batch, seq_len)
    return np.repeat(flat % seq_len, np.diff(flat, append=batch * seq_len)).reshape(batch, seq_len)


def attention_pairs(runs: Sequence[Runs], batch: int, seq_len: int) -> IntArray:
    """Returns int64 [b], the number of pairs of a query and a key that it attends to in each row, if a token attends
    only to its own document and the tokens up to itself."""
    flat = _document_borders(runs, batch, seq_len)
    tokens = np.diff(flat, append=batch * seq_len)
    pairs = np.zeros(batch, np.int64)
    np.add.at(pairs, flat // seq_len, tokens * (tokens + 1) // 2)
    return pairs


def _document_borders(runs: Sequence[Runs], batch: int, seq_len: int) -> IntArray:
    """Returns the first input token of every document in every row, as row * s + position, in order."""
    borders = [np.arange(batch) * seq_len]
    for part in runs:
        inside = part.places < seq_len
        borders.append(part.rows[inside] * seq_len + part.places[inside])
    return np.unique(np.concatenate(borders))


def loss_mask(runs: Sequence[Runs], batch: int, seq_len: int, mask_eod: bool) -> npt.NDArray[np.float32]:
    """Returns float32 [b, s]: 1 for labels in the loss.

    Args:
        runs: runs of the batch.
        batch: b, number of rows.
        seq_len: s, number of labels.
        mask_eod: no loss on a document's first token, which cannot be predicted from the previous document: 0 where the
            input token ends a document. Megatron's `eod_mask_loss`, based on the document boundaries of the index
            instead of a token id.
    """
    mask_bs = np.zeros((batch, seq_len), np.float32)
    for part in runs:
        if part.counted is None:
            mask_bs[part.rows] = 1
        else:
            # The cumulative sum of +1 at each begin and -1 at each end is 1 in between.
            steps = np.zeros(batch * (seq_len + 1) + 1, np.int32)
            np.add.at(steps, part.counted[:, 0] * (seq_len + 1) + part.counted[:, 1], 1)
            np.add.at(steps, part.counted[:, 0] * (seq_len + 1) + part.counted[:, 2], -1)
            mask_bs += np.cumsum(steps)[:-1].reshape(batch, seq_len + 1)[:, :seq_len]
        if mask_eod:
            starting = part.places > 0
            mask_bs[part.rows[starting], part.places[starting] - 1] = 0
    return mask_bs


def token_at(runs: Sequence[Runs], row: int, place: int) -> tuple[IndexedDataset, int, int]:
    """Returns (dataset, document, offset in the document) of the token at a position of a batch."""
    for part in runs:
        found = np.flatnonzero((part.rows == row) & (part.places <= place) & (place < part.places + part.lengths))
        if found.size:
            run = int(found[0])
            document = int(part.documents[run])
            position = int(part.starts[run]) + place - int(part.places[run])
            return part.dataset, document, position - part.dataset.document_start(document)
    raise IndexError(f"no token at place {place} of row {row}")


def widest_dtype(runs: Sequence[Runs]) -> np.dtype[Any]:
    """Returns the narrowest dtype that holds the tokens of all datasets."""
    return np.result_type(*(part.dataset.dtype for part in runs)) if runs else np.dtype(np.int64)


@dataclass(frozen=True)
class DocumentSpan:
    """Consecutive tokens of one document within a sample.

    Attributes:
        dataset: prefix of the dataset.
        document: index of the document.
        offset: offset of the first token in the document.
        document_tokens: number of tokens of the whole document.
        place: position of the first token in the sample.
        tokens: int64 [n].
        counted: bool [n], whether the prediction of each token is in the loss; False for a sample's first token.
    """

    dataset: str
    document: int
    offset: int
    document_tokens: int
    place: int
    tokens: IntArray
    counted: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SampleOrigin:
    """Origin of one sample.

    Attributes:
        sample: index of the sample in the run.
        key: values that `batch_hash` hashes, see `TrainSource.sample_keys`.
        stretches: token ranges, in the order of their positions.
    """

    sample: int
    key: tuple[int, ...]
    stretches: tuple[DocumentSpan, ...]

    def cut(self, ranges: Sequence[range]) -> SampleOrigin:
        """Returns the part that a rank reads which holds some positions of the sample: those inputs, and the label of
        the last.

        Args:
            ranges: ranges of positions; the first token of each is predicted by another rank.
        """
        parts = [_within(stretch, places) for places in ranges for stretch in self.stretches]
        return replace(self, stretches=tuple(part for part in parts if part.tokens.size))


def sample_origins(source: TrainSource, samples: IntArray, mask_eod: bool) -> list[SampleOrigin]:
    """Finds the origins of samples, and reads their tokens.

    Args:
        source: sample source of the run.
        samples: int64 [n], sample indices.
        mask_eod: as in `Packing`.
    """
    runs, keys = source.runs(samples), source.sample_keys(samples)
    mask = loss_mask(runs, samples.size, source.seq_len, mask_eod)
    found: list[list[DocumentSpan]] = [[] for _ in range(samples.size)]
    for part in runs:
        bounds = part.dataset.document_bounds(part.documents)
        for number in range(part.documents.size):
            row, place, length = (int(array[number]) for array in (part.rows, part.places, part.lengths))
            start, begin, end = (int(array[number]) for array in (part.starts, *bounds))
            # The label at a place is the token after it.
            counted = np.zeros(length, bool)
            predicted = max(place, 1)
            counted[predicted - place :] = mask[row, predicted - 1 : place + length - 1] > 0
            tokens = part.dataset.all_tokens[start : start + length].astype(np.int64)
            document = int(part.documents[number])
            found[row].append(
                DocumentSpan(part.dataset.prefix, document, start - begin, end - begin, place, tokens, counted)
            )
    return [
        SampleOrigin(int(sample), tuple(key.tolist()), tuple(sorted(stretches, key=lambda stretch: stretch.place)))
        for sample, key, stretches in zip(samples, keys, found, strict=True)
    ]


def _within(stretch: DocumentSpan, places: range) -> DocumentSpan:
    """Returns the part of a stretch that is in the inputs at some positions, or is the label of the last one."""
    first = min(max(places.start - stretch.place, 0), stretch.tokens.size)
    end = min(max(places.stop + 1 - stretch.place, first), stretch.tokens.size)
    counted = stretch.counted[first:end].copy()
    if counted.size and stretch.place + first == places.start:
        counted[0] = False
    return replace(
        stretch,
        offset=stretch.offset + first,
        place=stretch.place + first,
        tokens=stretch.tokens[first:end],
        counted=counted,
    )
