"""Which stretches of a dataset fill which places of a batch, worked out for all its samples at once.

`sample_origins` names the documents behind them, for whoever asks what a step was trained on.

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
"""So many are not sorted before they are read."""


@dataclass(frozen=True)
class Runs:
    """Stretches of consecutive tokens, each of one document, that fill the rows of a batch without overlap.

    Attributes:
        dataset: where the tokens are.
        documents: int64 [r], number of the document.
        starts: int64 [r], position in `.bin` of the first token.
        lengths: int64 [r], tokens, above 0.
        rows: int64 [r], row of the batch.
        places: int64 [r], place in the row of the first token.
        counted: int64 [n, 3] of (row, first label, end of labels): where the loss counts. None where it does on every
            label that has a token.
    """

    dataset: IndexedDataset
    documents: IntArray
    starts: IntArray
    lengths: IntArray
    rows: IntArray
    places: IntArray
    counted: IntArray | None = None


class SampleSource(Protocol):
    """Numbered samples, for training or validation, of one dataset or of several."""

    @property
    def seq_len(self) -> int:
        """S, tokens that a sample predicts; it has S + 1."""

    def runs(self, samples: IntArray) -> Sequence[Runs]:
        """Where the tokens of samples are; no token is read.

        Args:
            samples: int64 [b] numbers; one that does not exist (beyond the end of validation) has no runs.

        Returns:
            Runs with rows 0 to b - 1 in the order of `samples`; one item a dataset.
        """


class TrainSource(SampleSource, Protocol):
    """Samples without an end."""

    samples_per_epoch: int

    def dataset_samples(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, k], what determines the content of each of n samples; `batch_hash` is of it."""

    def build_maps(self, samples: int) -> int:
        """Builds and caches the index maps that the first samples need; returns how many there are."""

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """Builds the maps that are needed soon, in this thread, where nobody else does and nobody has.

        Args:
            samples: numbers below it have been read.
            end: numbers from it on will not be; None where that is not known.
            stop: ends the build when it is set.

        Raises:
            ConfigError: data.cache_dir was given and cannot be written.
        """


class ValidationSource(SampleSource, Protocol):
    """Windows 0 to len - 1, read once and in order."""

    def __len__(self) -> int: ...


def ragged_arange(counts: IntArray) -> IntArray:
    """Returns 0..counts[0]-1, 0..counts[1]-1 and so on, int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)


def runs_of_samples(dataset: IndexedDataset, epoch_map: EpochMap, index_rows: IntArray, batch_rows: IntArray) -> Runs:
    """Runs of samples that were cut from documents laid end to end.

    Args:
        dataset: where the tokens are.
        epoch_map: the order of the epoch that the samples belong to.
        index_rows: int64 [b], row of its sample index of each sample.
        batch_rows: int64 [b], row of the batch that each shall fill.

    Returns:
        The runs; documents without tokens have none.
    """
    first, last = epoch_map.sample_index[index_rows], epoch_map.sample_index[index_rows + 1]
    counts = last[:, 0] - first[:, 0] + 1
    sample = np.repeat(np.arange(index_rows.size), counts)
    within = ragged_arange(counts)
    documents = epoch_map.document_order[first[sample, 0] + within].astype(np.int64)
    starts, ends = dataset.document_bounds(documents)
    # A sample's last token is the first one of the next sample.
    ends = np.where(within == counts[sample] - 1, starts + last[sample, 1] + 1, ends)
    starts = np.where(within == 0, starts + first[sample, 1], starts)
    return _in_order(dataset, documents, starts, ends, batch_rows[sample])


def runs_of_windows(dataset: IndexedDataset, documents: range, begins: IntArray, ends: IntArray) -> Runs:
    """Runs of windows on consecutive documents, one window a row of the batch; an empty window has none.

    Args:
        dataset: where the tokens are.
        documents: those that the windows lie in.
        begins: int64 [b], position in `.bin` of each window's first token.
        ends: int64 [b], the same of its end, exclusive.

    Returns:
        The runs; the loss counts on all of their tokens but the first of a row.
    """
    # Looked up in the index, of which a search reads a few pages: the starts of all documents may be gigabytes.
    first = _documents_at(dataset, documents, begins)
    last = _documents_at(dataset, documents, ends - 1)
    counts = np.where(ends > begins, last - first + 1, 0)
    rows = np.repeat(np.arange(begins.size), counts)
    numbers = first[rows] + ragged_arange(counts)
    starts, stops = dataset.document_bounds(numbers)
    return _in_order(dataset, numbers, np.maximum(starts, begins[rows]), np.minimum(stops, ends[rows]), rows)


def _documents_at(dataset: IndexedDataset, documents: range, positions: IntArray) -> IntArray:
    """The last document that starts at or before each position."""
    found = [bisect_right(documents, position, key=dataset.document_start) for position in positions.tolist()]
    return np.array(found, np.int64) + (documents.start - 1)


def _in_order(dataset: IndexedDataset, documents: IntArray, starts: IntArray, ends: IntArray, rows: IntArray) -> Runs:
    """Runs that follow each other in their rows, without those that have no token."""
    filled = ends > starts
    documents, starts, rows = documents[filled], starts[filled], rows[filled]
    lengths = ends[filled] - starts
    return Runs(dataset, documents, starts, lengths, rows, places_in_rows(rows, lengths))


def places_in_rows(rows: IntArray, lengths: IntArray) -> IntArray:
    """Returns int64 [r], where each run starts in its row when the runs of a row stand together, end to end."""
    before = np.cumsum(lengths) - lengths
    if not rows.size:
        return before
    new_row = np.concatenate(([True], rows[1:] != rows[:-1]))
    return before - before[new_row][np.cumsum(new_row) - 1]


def blended_runs(parts: Sequence[SampleSource], which: IntArray, numbers: IntArray) -> list[Runs]:
    """Runs of a batch whose samples come from several sources.

    Args:
        parts: the sources, all of one sequence length.
        which: int64 [b], index into `parts` of each sample.
        numbers: int64 [b], its number there.
    """
    found = []
    for part, rows in rows_by_part(which):
        for runs in parts[part].runs(numbers[rows]):
            counted = runs.counted
            if counted is not None:
                counted = np.column_stack((rows[counted[:, 0]], counted[:, 1:]))
            in_batch = rows[runs.rows]
            found.append(Runs(runs.dataset, runs.documents, runs.starts, runs.lengths, in_batch, runs.places, counted))
    return found


def rows_by_part(which: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yields each part that occurs, in order, and the rows in which it does."""
    order = np.argsort(which, kind="stable")
    parts = which[order]
    borders = np.flatnonzero(parts[1:] != parts[:-1]) + 1
    begins = [0, *borders.tolist()] if parts.size else []
    for begin, end, part in zip(begins, [*begins[1:], parts.size], parts[begins].tolist(), strict=True):
        yield part, order[begin:end]


def copy_tokens(runs: Sequence[Runs], out_bt: Array) -> None:
    """Copies the tokens of a batch.

    They are read in the order of the file, so that pages and disk blocks are visited once and forwards. A loop over
    slices beats `numpy.take` of single tokens even at 50 tokens a document (measured: docs/performance.md).

    Args:
        runs: what to copy.
        out_bt: contiguous, of a dtype that holds all tokens; places without a run stay as they are.
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
    """Returns int64 [b, s]: place at which the document of each input token starts.

    0 for a document in whose middle the sample starts. What follows the last run of a row goes on with its document.
    """
    borders = [np.arange(batch) * seq_len]
    for part in runs:
        inside = part.places < seq_len
        borders.append(part.rows[inside] * seq_len + part.places[inside])
    flat = np.unique(np.concatenate(borders))
    return np.repeat(flat % seq_len, np.diff(flat, append=batch * seq_len)).reshape(batch, seq_len)


def loss_mask(runs: Sequence[Runs], batch: int, seq_len: int, mask_eod: bool) -> npt.NDArray[np.float32]:
    """Returns float32 [b, s]: 1 where the loss counts on a label.

    Args:
        runs: the batch's.
        batch: b, its rows.
        seq_len: s, its labels.
        mask_eod: no loss on a document's first token, which the one before cannot predict: 0 where the input token ends
            a document. Megatron's `eod_mask_loss`, with the borders of the index in place of a token id.
    """
    mask_bs = np.zeros((batch, seq_len), np.float32)
    for part in runs:
        if part.counted is None:
            mask_bs[part.rows] = 1
        else:
            # +1 where counting begins and -1 where it ends, summed up, is 1 in between.
            steps = np.zeros(batch * (seq_len + 1) + 1, np.int32)
            np.add.at(steps, part.counted[:, 0] * (seq_len + 1) + part.counted[:, 1], 1)
            np.add.at(steps, part.counted[:, 0] * (seq_len + 1) + part.counted[:, 2], -1)
            mask_bs += np.cumsum(steps)[:-1].reshape(batch, seq_len + 1)[:, :seq_len]
        if mask_eod:
            starting = part.places > 0
            mask_bs[part.rows[starting], part.places[starting] - 1] = 0
    return mask_bs


def token_at(runs: Sequence[Runs], row: int, place: int) -> tuple[IndexedDataset, int, int]:
    """Returns (dataset, document, offset in the document) of the token of a batch at that place."""
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
class Stretch:
    """Consecutive tokens of one document that stand together in a sample.

    Attributes:
        dataset: prefix of the dataset.
        document: number of the document in it.
        offset: of the first token in the document.
        document_tokens: that the whole document has.
        place: of the first token in the sample.
        tokens: int64 [n].
        counted: bool [n], whether the loss counts on the prediction of each; never on a sample's first token.
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
    """Where one sample came from.

    Attributes:
        sample: its number in the run.
        key: what `batch_hash` is of: (epoch, row of its order), in a blend with the dataset's number before them.
        stretches: in the order of their places.
    """

    sample: int
    key: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    def cut(self, ranges: Sequence[range]) -> SampleOrigin:
        """Returns what a rank reads that holds some places of the sample: those inputs, and the label of the last.

        Args:
            ranges: of places; the first token of each is predicted by another rank.
        """
        parts = [_within(stretch, places) for places in ranges for stretch in self.stretches]
        return replace(self, stretches=tuple(part for part in parts if part.tokens.size))


def sample_origins(source: TrainSource, samples: IntArray, mask_eod: bool) -> list[SampleOrigin]:
    """Finds where samples came from, and reads their tokens.

    Args:
        source: the run's samples.
        samples: int64 [n], their numbers.
        mask_eod: as in `Packing`.
    """
    runs, keys = source.runs(samples), source.dataset_samples(samples)
    mask = loss_mask(runs, samples.size, source.seq_len, mask_eod)
    found: list[list[Stretch]] = [[] for _ in range(samples.size)]
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
                Stretch(part.dataset.prefix, document, start - begin, end - begin, place, tokens, counted)
            )
    return [
        SampleOrigin(int(sample), tuple(key.tolist()), tuple(sorted(stretches, key=lambda stretch: stretch.place)))
        for sample, key, stretches in zip(samples, keys, found, strict=True)
    ]


def _within(stretch: Stretch, places: range) -> Stretch:
    """What of a stretch is in the inputs at some places, or the label of the last of them."""
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
