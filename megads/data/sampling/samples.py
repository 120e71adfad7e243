"""Samples of a dataset by index: shuffled for training, complete and in order for validation; changing lengths.

`unigram_entropy` is the loss of the best model without context on a validation set, as a baseline.

The sample length can change in the middle of a run (`SampleLengths`), without training on text twice or losing text
unnoticed. The unit is the longest length of the run: concatenated documents are cut into units, which are shuffled like
samples of that length (`TrainSamples`). A shorter sample is a part of a unit, and the parts of a unit are consecutive.
So the consumed part of a dataset is always a prefix of one token stream, and samples of another length continue from
that position, rounded up to a multiple of the new length. Only the tokens in between are lost, less than one sample per
dataset, which is reported in events.jsonl.

Shape suffixes as in `runs`.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megads.data.indexed.dataset import Array, IndexedDataset, IntArray
from megads.data.sampling.index_maps import EpochMap, EpochMapCache, EpochMapKey, MapKey
from megads.data.sampling.runs import (
    Runs,
    ValidationSource,
    copy_tokens,
    loss_mask,
    ragged_arange,
    runs_of_samples,
    runs_of_windows,
    token_at,
    widest_dtype,
)
from megads.errors import DataError

KEPT_EPOCHS = 16
FEW_SAMPLES, FEW_DOCUMENTS = 8, 16
"""Up to this many samples, of up to this many documents each, are located faster one by one than with array
operations."""
_BUILT_AHEAD = 1 / 16
"""The next epoch's map is built in this last part of an epoch."""
CHUNK_TOKENS = 1 << 22
"""Tokens that `unigram_entropy` counts at a time."""
_SAMPLED_TOKENS = 1 << 24
"""Maximum number of tokens that it counts, in windows evenly spaced over the validation set."""
_MAX_TOKEN_ID = 1 << 24
"""A larger token id is treated as damage, since counting it would need memory for that many tokens."""


class TrainSamples:
    """The infinite stream of a run's training samples, in a different order in every epoch.

    Args:
        dataset: the dataset.
        documents: the documents to train on.
        seq_len: S, the number of predicted tokens per sample.
        seed: shuffling seed.
        cache_dir: folder in which index maps are cached; None is beside the dataset.

    Raises:
        DataError: the documents have too few tokens for one sample.
    """

    def __init__(
        self, dataset: IndexedDataset, documents: range, seq_len: int, seed: int, cache_dir: str | None = None
    ) -> None:
        self.dataset = dataset
        self.documents = documents
        self.seq_len = seq_len
        self._seed = seed
        self._fingerprint = dataset.fingerprint()
        self._cache = EpochMapCache(dataset.prefix, cache_dir)
        self._maps: OrderedDict[int, EpochMap] = OrderedDict()
        self._built_ahead: set[int] = set()
        tokens = dataset.num_tokens_of(documents)
        self.samples_per_epoch = max(tokens - 1, 0) // seq_len
        """Samples in one pass over the documents."""
        self.samples_per_map = self.samples_per_epoch
        """Number of samples covered by one index map."""
        if self.samples_per_epoch == 0:
            raise DataError(
                f"{dataset.name}: documents {documents.start} to {documents.stop - 1} have {tokens} tokens, one "
                f"sample needs train.seq_len + 1 = {seq_len + 1}; give more text, a shorter train.seq_len, or a larger "
                "training share in data.split"
            )

    def sample_keys(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 2], (epoch, row of `EpochMap.sample_index`) of n samples of the dataset's stream."""
        if samples.size <= FEW_SAMPLES:
            return np.array([self._row(sample) for sample in samples.tolist()], np.int64).reshape(-1, 2)
        epochs, positions = np.divmod(samples, self.samples_per_map)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            rows[of_epoch] = self._epoch_map(int(epoch)).shuffle[positions[of_epoch]]
        return np.stack((epochs, rows), axis=1)

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`; there is one map per epoch."""
        maps = -(-samples // self.samples_per_map)
        for epoch in range(maps):
            self._epoch_map(epoch)
        return maps

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; builds the next epoch's map in the last part of an epoch."""
        epoch, place = divmod(samples, self.samples_per_map)
        first = (epoch + 1) * self.samples_per_map
        due = place >= self.samples_per_map * (1 - _BUILT_AHEAD) and (end is None or first < end)
        if due and epoch + 1 not in self._built_ahead:
            # Tried only once: if it fails, the map is built, or the error is raised, when the map is needed.
            self._built_ahead.add(epoch + 1)
            self._cache.build_ahead(self.dataset, self._map_key(epoch + 1), stop)

    def runs(self, samples: IntArray) -> list[Runs]:
        """Returns the locations of samples' tokens, see `SampleSource`; one item per epoch, or one for few samples."""
        if samples.size <= FEW_SAMPLES:
            found = self._runs_of_few(samples.tolist())
            if found is not None:
                return [found]
        epochs, rows = self.sample_keys(samples).T
        by_epoch = []
        for epoch in np.unique(epochs):
            batch_rows = np.flatnonzero(epochs == epoch)
            by_epoch.append(runs_of_samples(self.dataset, self._epoch_map(int(epoch)), rows[batch_rows], batch_rows))
        return by_epoch

    def _row(self, sample: int) -> tuple[int, int]:
        epoch, position = divmod(sample, self.samples_per_map)
        return epoch, int(self._epoch_map(epoch).shuffle.item(position))

    def _runs_of_few(self, samples: Sequence[int]) -> Runs | None:
        """Returns the runs of a few samples of few documents without NumPy, whose overhead would dominate; else
        None."""
        start_of = self.dataset.document_start
        # document, start, length, row, place
        found: list[tuple[int, int, int, int, int]] = []
        for row, sample in enumerate(samples):
            epoch, index_row = self._row(sample)
            epoch_map = self._epoch_map(epoch)
            index, order = epoch_map.sample_index, epoch_map.document_order
            first, offset = index.item(index_row, 0), index.item(index_row, 1)
            last, last_offset = index.item(index_row + 1, 0), index.item(index_row + 1, 1)
            if last - first >= FEW_DOCUMENTS:
                return None
            place = 0
            for position in range(first, last + 1):
                document = order.item(position)
                start = start_of(document)
                # The last token of a sample is also the first one of the next sample.
                end = start + last_offset + 1 if position == last else start_of(document + 1)
                start += offset
                offset = 0
                if end > start:
                    found.append((document, start, end - start, row, place))
                    place += end - start
        return Runs(self.dataset, *np.array(found, np.int64).T)

    def _epoch_map(self, epoch: int) -> EpochMap:
        found = self._maps.get(epoch)
        if found is None:
            found = self._maps[epoch] = self._cache.get(self.dataset, self._map_key(epoch))
            if len(self._maps) > KEPT_EPOCHS:
                self._maps.popitem(last=False)
        return found

    def _map_key(self, epoch: int) -> MapKey:
        return EpochMapKey(
            self._fingerprint, self.documents.start, self.documents.stop, self.seq_len, self._seed, epoch
        )


class ValidationSamples:
    """Windows that predict every token of the concatenated documents except the first exactly once.

    Window i predicts tokens i*S + 1 to (i+1)*S of the stream; the excess of the last window is masked.

    Args:
        dataset: the dataset.
        documents: the documents to validate on.
        seq_len: S, the number of predicted tokens per window.

    Raises:
        DataError: the documents have no token to predict.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, seq_len: int) -> None:
        self.dataset = dataset
        self.documents = documents
        self.seq_len = seq_len
        self._tokens = dataset.num_tokens_of(documents)
        if self._tokens < 2:
            raise DataError(
                f"{dataset.name}: documents {documents.start} to {documents.stop - 1} have {self._tokens} "
                "tokens, validation needs at least 2; give a larger share in data.split or another data.valid"
            )

    def __len__(self) -> int:
        return math.ceil(self.num_predicted_tokens / self.seq_len)

    @property
    def num_predicted_tokens(self) -> int:
        """Number of unmasked labels over all windows."""
        return self._tokens - 1

    def runs(self, windows: IntArray) -> list[Runs]:
        """Returns the locations of windows' tokens, see `SampleSource`; windows after the last have none."""
        start, end = map(self.dataset.document_start, (self.documents.start, self.documents.stop))
        begins = start + windows * self.seq_len
        ends = np.minimum(begins + self.seq_len + 1, end)
        ends = np.where(windows < len(self), ends, begins)
        found = runs_of_windows(self.dataset, self.documents, begins, ends)
        sizes = ends - begins
        filled = np.flatnonzero(sizes)
        counted = np.stack((filled, np.zeros_like(filled), sizes[filled] - 1), axis=1)
        return [replace(found, counted=counted)]


class WindowSubset:
    """Windows evenly spaced over a validation set: a `ValidationSource`.

    Args:
        source: the whole set.
        max_tokens: total length of the windows, rounded up to whole windows.
    """

    def __init__(self, source: ValidationSource, max_tokens: int) -> None:
        self._source = source
        self.seq_len = source.seq_len
        self._windows = min(len(source), -(-max_tokens // source.seq_len))

    def __len__(self) -> int:
        return self._windows

    def runs(self, windows: IntArray) -> Sequence[Runs]:
        """Returns the locations of windows' tokens, see `SampleSource`; windows after the last have none."""
        whole = len(self._source)
        return self._source.runs(np.where(windows < self._windows, windows * whole // self._windows, whole))


def split_documents(dataset: IndexedDataset, shares: Sequence[float]) -> list[range]:
    """Divides a dataset's documents, in order, by the largest remainder method.

    Args:
        dataset: the dataset.
        shares: weight of each part; need not sum to 1.

    Returns:
        A range of documents for each share; empty only if the share is 0.

    Raises:
        DataError: there are fewer documents than shares above 0.
    """
    total, parts = sum(shares), range(len(shares))
    exact = [dataset.num_documents * share / total for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted((part for part in parts if shares[part] > 0), key=lambda part: counts[part] - exact[part])
    for part in by_remainder[: dataset.num_documents - sum(counts)]:
        counts[part] += 1
    if dataset.num_documents < len(by_remainder):
        raise DataError(
            f"{dataset.name}: {dataset.num_documents} documents of {dataset.num_tokens} tokens cannot be split by "
            f"{list(shares)}: every share above 0 needs one; give more text, or data.split=[1,0] for no validation"
        )
    for part in by_remainder:
        if counts[part] == 0:
            counts[counts.index(max(counts))] -= 1
            counts[part] = 1
    ends = [sum(counts[: part + 1]) for part in parts]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def unigram_entropy(valid: ValidationSource) -> float:
    """Computes the loss of the best model that ignores context, on the tokens that validation predicts, or on a sample.

    Args:
        valid: the validation set.

    Returns:
        Entropy, in nats, of the distribution of its labels.

    Raises:
        DataError: a token id is negative or too large.
    """
    valid = WindowSubset(valid, _SAMPLED_TOKENS)
    counts: IntArray = np.zeros(0, np.int64)
    windows_a_chunk = max(CHUNK_TOKENS // (valid.seq_len + 1), 1)
    for begin in range(0, len(valid), windows_a_chunk):
        windows = np.arange(begin, min(begin + windows_a_chunk, len(valid)))
        runs = valid.runs(windows)
        tokens_bt = np.zeros((windows.size, valid.seq_len + 1), widest_dtype(runs))
        copy_tokens(runs, tokens_bt)
        if tokens_bt.min() < 0 or tokens_bt.max() > _MAX_TOKEN_ID:
            raise _impossible_token(runs, tokens_bt)
        counted = loss_mask(runs, windows.size, valid.seq_len, mask_eod=False) == 1
        more = np.bincount(tokens_bt[:, 1:][counted], minlength=counts.size)
        more[: counts.size] += counts
        counts = more
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _impossible_token(runs: Sequence[Runs], tokens_bt: Array) -> DataError:
    row, place = (int(at) for at in np.argwhere((tokens_bt < 0) | (tokens_bt > _MAX_TOKEN_ID))[0])
    dataset, document, _ = token_at(runs, row, place)
    return DataError(
        f"{dataset.name}: document {document} holds token {tokens_bt[row, place]}, which no vocabulary has; "
        "make the dataset anew with `megads preprocess`"
    )


@dataclass(frozen=True)
class SampleLengths:
    """The sample lengths of a run.

    Attributes:
        starts: (index in the training stream of the first sample, sample length in tokens) of every phase, in order.
        place: index of the selected phase.
    """

    starts: tuple[tuple[int, int], ...]
    place: int

    @property
    def unit(self) -> int:
        """The longest length, which all others divide."""
        return max(length for _, length in self.starts)


class PartSamples:
    """The infinite stream of samples that are parts of longer ones.

    Args:
        units: the longer samples.
        seq_len: number of predicted tokens per sample; divides that of the units.
    """

    def __init__(self, units: TrainSamples, seq_len: int) -> None:
        assert units.seq_len % seq_len == 0
        self.dataset = units.dataset
        self.seq_len = seq_len
        self._units = units
        self._parts = units.seq_len // seq_len
        self.samples_per_epoch = units.samples_per_epoch * self._parts
        """Samples in one pass over the documents."""

    def sample_keys(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 2], (epoch, row that `EpochMap.sample_index` would have if cut to this length)."""
        found = self._units.sample_keys(samples // self._parts)
        found[:, 1] = found[:, 1] * self._parts + samples % self._parts
        return found

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`."""
        return self._units.build_maps(-(-samples // self._parts))

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`."""
        self._units.build_next_maps(samples // self._parts, None if end is None else -(-end // self._parts), stop)

    def runs(self, samples: IntArray) -> list[Runs]:
        """Returns the locations of samples' tokens, see `SampleSource`."""
        units, unit_of = np.unique(samples // self._parts, return_inverse=True)
        counts = np.bincount(unit_of, minlength=units.size)
        first, by_unit = np.cumsum(counts) - counts, np.argsort(unit_of, kind="stable")
        begins = samples % self._parts * self.seq_len
        return [self._cut(runs, counts, first, by_unit, begins) for runs in self._units.runs(units)]

    def _cut(self, runs: Runs, counts: IntArray, first: IntArray, by_unit: IntArray, begins: IntArray) -> Runs:
        """Cuts the runs of units, indexed by `runs.rows`, to the samples within them.

        Args:
            runs: runs of units.
            counts: number of samples of each unit.
            first: index into `by_unit` of each unit's first sample.
            by_unit: rows of the batch, sorted by unit.
            begins: position in its unit of each sample's first token.
        """
        times = counts[runs.rows]
        run = np.repeat(np.arange(runs.rows.size), times)
        row = by_unit[first[runs.rows][run] + ragged_arange(times)]
        begin = np.maximum(runs.places[run], begins[row])
        # A sample's last token is the first one of the next sample.
        end = np.minimum(runs.places[run] + runs.lengths[run], begins[row] + self.seq_len + 1)
        kept = end > begin
        run, row, begin, end = run[kept], row[kept], begin[kept], end[kept]
        starts = runs.starts[run] + begin - runs.places[run]
        return Runs(runs.dataset, runs.documents[run], starts, end - begin, row, begin - begins[row])
