"""Blends several datasets into one stream of samples; the dataset of a sample is a function of the sample's index.

Nothing is built, cached or counted, so every rank of every layout computes the same result, also after a resume.

If a change of the blend weights in the middle of a run applied from the beginning, some samples would be trained on
twice and others never. A change therefore applies from the sample at which it is made. Earlier blends are kept in
data.history, and every dataset continues where it was.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megads.data.config import DataConfig, MixConfig
from megads.data.indexed.dataset import IntArray
from megads.data.sampling.packed import PackedSamples
from megads.data.sampling.runs import Runs, blended_runs, group_rows
from megads.data.sampling.sampler import Skips
from megads.data.sampling.samples import PartSamples, SampleLengths, TrainSamples
from megads.errors import ConfigError

# Samples that descend the tree together: enough to amortize the overhead per node, and few enough for the processor's
# cache.
CHUNK = 1 << 18
FEW = 4
"""Up to this many samples per dataset descend the tree one by one."""
BlendPart = TrainSamples | PackedSamples | PartSamples
"""The sample stream of one dataset."""


class Interleaving(Protocol):
    """Assigns the samples of the training stream to datasets, by stream index."""

    def place(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Returns, int64 [n] each, the dataset of each of n stream indices, and the sample's index in that
        dataset's stream."""

    def counts(self, total: int) -> IntArray:
        """Returns int64 [datasets], how many of the first `total` samples of the training stream each dataset
        has."""


@dataclass(frozen=True)
class _Node:
    """A leaf with a dataset, or an inner node; `share` is the left child's share of its samples."""

    weight: Fraction
    dataset: int = -1
    left: _Node | None = None
    right: _Node | None = None

    @cached_property
    def share(self) -> float:
        assert self.left is not None
        return float(self.left.weight / self.weight)


class BalancedOrder:
    """Assigns samples by a Huffman tree of the weights: of a node's first n samples, round(n * share) go to the left
    child.

    A node's count is off by at most 1/2 and passes on its share of that error, so dataset d never deviates from its
    exact proportion by more than `bound`: 1/2 * sum of w_d / w_a over d and its ancestors except the root. That is
    about 1 for similar weights and was below 2 for all weights tried, at every prefix, whereas the deviation of random
    assignment is unbounded. The time per sample is proportional to the entropy of the weights, and the order needs no
    memory. Weights are added exactly, as fractions, so every version of Python computes the same tree and shares.

    Args:
        weights: weight of each dataset, at least 0; need not sum to 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._datasets = len(weights)
        self._root = _huffman(weights)

    @cached_property
    def bound(self) -> npt.NDArray[np.float64]:
        """float64 [datasets], maximum deviation of a dataset from its exact proportion at any prefix, in samples."""
        bounds = np.zeros(self._datasets)

        def visit(node: _Node, inherited: float) -> None:
            if node.left is None or node.right is None:
                bounds[node.dataset] = inherited
                return
            for child in (node.left, node.right):
                visit(child, 0.5 + inherited * float(child.weight / node.weight))

        visit(self._root, 0.0)
        return bounds

    def place(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """See `Interleaving`."""
        if numbers.size <= FEW * self._datasets:
            return self._place_few(numbers)
        datasets, places = np.empty_like(numbers), np.empty_like(numbers)
        for begin in range(0, numbers.size, CHUNK):
            part = slice(begin, begin + CHUNK)
            asked = numbers[part]
            if asked[-1] - asked[0] == asked.size - 1 and (np.diff(asked) == 1).all():
                _deal_run(self._root, int(asked[0]), np.arange(asked.size), datasets[part], places[part])
            else:
                _deal(self._root, asked.astype(np.float64), np.arange(asked.size), datasets[part], places[part])
        return datasets, places

    def _place_few(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """As `place`, one sample at a time, which is faster for few samples than NumPy calls at every node."""
        found = []
        for number in numbers.tolist():
            node, place = self._root, number
            while (left := node.left) is not None and (right := node.right) is not None:
                before = floor(place * node.share + 0.5)
                goes_left = floor((place + 1) * node.share + 0.5) != before
                node, place = (left, before) if goes_left else (right, place - before)
            found.append((node.dataset, place))
        datasets, places = np.array(found, np.int64).reshape(-1, 2).T
        return datasets, places

    def counts(self, total: int) -> IntArray:
        """See `Interleaving`."""
        counts = np.zeros(self._datasets, np.int64)

        def visit(node: _Node, count: float) -> None:
            if node.left is None or node.right is None:
                counts[node.dataset] = int(count)
                return
            left = float(_left_count(np.array([count]), node.share)[0])
            visit(node.left, left)
            visit(node.right, count - left)

        visit(self._root, float(total))
        return counts


def _huffman(weights: Sequence[float]) -> _Node:
    # The serial number breaks ties between equal weights, since nodes have no order.
    serial = itertools.count()
    exact = [Fraction(weight) for weight in weights]
    heap = [(w, next(serial), _Node(w, dataset)) for dataset, w in enumerate(exact) if w > 0]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, small), (_, _, large) = heapq.heappop(heap), heapq.heappop(heap)
        node = _Node(small.weight + large.weight, left=small, right=large)
        heapq.heappush(heap, (node.weight, next(serial), node))
    return heap[0][2]


def _left_count(numbers: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Returns how many of a node's first samples go to the left child.

    Integers in float64 are exact up to 2**53, and IEEE arithmetic gives the same result on every machine.
    """
    product = numbers * share
    product += 0.5
    return np.floor(product, out=product)


def _deal(node: _Node, numbers: npt.NDArray[np.float64], at: IntArray, datasets: IntArray, places: IntArray) -> None:
    """Fills datasets and places at `at`, for any sample indices within a node."""
    if node.left is None or node.right is None:
        datasets[at], places[at] = node.dataset, numbers
        return
    before = _left_count(numbers, node.share)
    goes_left = _left_count(numbers + 1, node.share) != before
    left, right = np.flatnonzero(goes_left), np.flatnonzero(~goes_left)
    if left.size:
        _deal(node.left, before[left], at[left], datasets, places)
    if right.size:
        _deal(node.right, numbers[right] - before[right], at[right], datasets, places)


def _deal_run(node: _Node, first: int, at: IntArray, datasets: IntArray, places: IntArray) -> None:
    """As `_deal`, for consecutive indices from `first` on; several times as fast, since children get consecutive
    ones."""
    if node.left is None or node.right is None:
        datasets[at] = node.dataset
        places[at] = np.arange(first, first + at.size)
        return
    before = _left_count(np.arange(first, first + at.size + 1, dtype=np.float64), node.share)
    goes_left = before[1:] != before[:-1]
    left, right = at.take(np.flatnonzero(goes_left)), at.take(np.flatnonzero(~goes_left))
    first_left = int(before[0])
    if left.size:
        _deal_run(node.left, first_left, left, datasets, places)
    if right.size:
        _deal_run(node.right, first - first_left, right, datasets, places)


@dataclass(frozen=True)
class MixPhase:
    """A blend that applies from a given sample on.

    Attributes:
        first_sample: stream index of its first sample.
        order: assigns the samples from there on, indexed from 0.
    """

    first_sample: int
    order: Interleaving


class MixSchedule:
    """Consecutive blends; every dataset continues where the previous phase left it.

    Args:
        phases: the phases in order; the first one starts at sample 0.
    """

    def __init__(self, phases: Sequence[MixPhase]) -> None:
        assert phases[0].first_sample == 0
        self._phases = list(phases)
        self._starts = np.array([phase.first_sample for phase in phases], np.int64)
        had = [np.zeros_like(phases[0].order.counts(0))]
        for phase, following in itertools.pairwise(phases):
            had.append(had[-1] + phase.order.counts(following.first_sample - phase.first_sample))
        self._had = had

    def place(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """See `Interleaving`."""
        datasets, places = np.empty_like(numbers), np.empty_like(numbers)
        phases = np.searchsorted(self._starts, numbers, side="right") - 1
        for phase in np.unique(phases):
            inside = phases == phase
            found, within = self._phases[phase].order.place(numbers[inside] - self._starts[phase])
            datasets[inside], places[inside] = found, within + self._had[phase][found]
        return datasets, places

    def counts(self, total: int) -> IntArray:
        """See `Interleaving`."""
        phase = int(np.searchsorted(self._starts, total, side="right")) - 1
        return self._had[phase] + self._phases[phase].order.counts(total - int(self._starts[phase]))


class ContinuedOrder:
    """An order whose datasets continue from their position in tokens in a phase with another sample length.

    Sample indices within a dataset refer to samples of the phase's length, counted from the beginning of the dataset's
    stream.

    Args:
        order: order of the whole run; its indices count samples of any length.
        lengths: sample lengths of the run.
    """

    def __init__(self, order: Interleaving, lengths: SampleLengths) -> None:
        self._order = order
        tokens = self.left_out_tokens = np.zeros_like(order.counts(0))
        """int64 [datasets], tokens that are in no sample of this or earlier phases; fewer than one sample."""
        before, length = tokens, 1
        for start, following in lengths.starts[: lengths.place + 1]:
            counts = order.counts(start)
            tokens, length = tokens + (counts - before) * length, following
            begins = -(-tokens // length)
            self.left_out_tokens = begins * length - tokens
            tokens, before = begins * length, counts
        self._shift = tokens // length - before

    def place(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """See `Interleaving`."""
        datasets, places = self._order.place(numbers)
        return datasets, places + self._shift[datasets]

    def counts(self, total: int) -> IntArray:
        """See `Interleaving`; `total` must lie in the phase."""
        return self._order.counts(total) + self._shift


class BlendedSamples:
    """The stream of a run's training samples from one or several datasets, with skipped ranges.

    Args:
        parts: the datasets' sample streams, all of one sequence length.
        order: assigns samples to datasets.
        skips: skipped ranges; None skips nothing.
    """

    def __init__(self, parts: Sequence[BlendPart], order: Interleaving, skips: Skips | None = None) -> None:
        self.parts = list(parts)
        self.seq_len = parts[0].seq_len
        self.samples_per_epoch = sum(part.samples_per_epoch for part in parts)
        """Samples in one pass over all datasets, whatever the blend weights."""
        self.order = order
        self.skips = skips or Skips()

    def place(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Returns, int64 [n] each, the dataset of each of n sample ids, and the index in that dataset's stream."""
        return self.order.place(self.skips.apply(samples))

    def counts_by_dataset(self, samples: int) -> IntArray:
        """Returns int64 [datasets], how many of the run's first samples come from each dataset.

        Skipped ranges are subtracted, so that the sum is `samples`.
        """
        end = self._end(samples)
        taken = self.order.counts(end)
        for first, last in self.skips.left_out():
            taken = taken - self.order.counts(min(last, end)) + self.order.counts(min(first, end))
        return taken

    def sample_keys(self, samples: IntArray) -> IntArray:
        """Returns int64 [n, 3], (dataset, epoch, row or bin) of each of n sample ids.

        With one dataset it is [n, 2], without the dataset, as without a blend, so that batch hashes are the same.
        """
        datasets, places = self.place(samples)
        if len(self.parts) == 1:
            return self.parts[0].sample_keys(places)
        found = np.empty((samples.size, 3), np.int64)
        found[:, 0] = datasets
        for dataset, rows in group_rows(datasets):
            found[rows, 1:] = self.parts[dataset].sample_keys(places[rows])
        return found

    def build_maps(self, samples: int) -> int:
        """See `TrainSource`."""
        counts = self.order.counts(self._end(samples))
        return sum(part.build_maps(int(count)) for part, count in zip(self.parts, counts, strict=True))

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`."""
        # Samples that are read ahead beyond the end are not part of an order made for that many samples.
        read = self.order.counts(self._end(samples if end is None else min(samples, end))).tolist()
        ends = [None] * len(read) if end is None else self.order.counts(self._end(end)).tolist()
        for part, of_part, end_of_part in zip(self.parts, read, ends, strict=True):
            if not stop.is_set():
                part.build_next_maps(of_part, end_of_part, stop)

    def _end(self, samples: int) -> int:
        """Returns the end, in the stream including skipped ranges, of the run's first samples."""
        return int(self.skips.apply(np.array([samples - 1]))[0]) + 1 if samples else 0

    def runs(self, samples: IntArray) -> list[Runs]:
        """Returns the locations of samples' tokens, see `SampleSource`."""
        return blended_runs(self.parts, *self.place(samples))


def mixes(data: DataConfig, weights: Sequence[float]) -> list[MixConfig]:
    """Returns all blends of a run, past and planned, in order; the first one starts at sample 0.

    Args:
        data: data config of the run.
        weights: weights of data.train, see `megads.data.sampling.datasets.blend_weights`.
    """
    paths = [item.path for item in data.train]
    past = list(data.history) or [MixConfig(0, dict(zip(paths, weights, strict=True)))]
    phases = [MixConfig(phase.from_sample, dict(zip(paths, phase.weights, strict=True))) for phase in data.phases]
    return past + [mix for mix in phases if mix.from_sample > past[-1].from_sample]


def continued(
    now: DataConfig,
    before: DataConfig,
    samples: int,
    weigh: Callable[[DataConfig], Sequence[float]],
    renamed: Mapping[str, str],
) -> DataConfig:
    """Returns `now` with the earlier blends of the run; if the requested weights are unchanged, the blends of `before`.

    Args:
        now: requested data config.
        before: data config of the start whose checkpoint the run continues from.
        samples: samples consumed by then, including skipped ranges.
        weigh: returns the weights of data.train.
        renamed: new paths of datasets by old path.

    Raises:
        ConfigError: the blend changes, and a dataset is listed twice.
    """
    if _asked(now) == _asked(before):
        return replace(now, history=list(before.history))
    if samples == 0:
        return now
    paths = [item.path for item in now.train]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ConfigError(
            f"data.train names {twice[0]} twice, in a mix that changes at sample {samples}: it is undefined which of "
            "the two continues; name it once, with the sum of the weights"
        )
    past = [
        MixConfig(mix.from_sample, {renamed.get(path, path): weight for path, weight in mix.weights.items()})
        for mix in mixes(before, weigh(before))
        if mix.from_sample < samples
    ]
    current = [mix for mix in mixes(now, weigh(now)) if mix.from_sample <= samples][-1]
    if _shares(current) != _shares(past[-1]):
        past.append(MixConfig(samples, dict(current.weights)))
    return replace(now, history=past)


def _asked(data: DataConfig) -> tuple[object, ...]:
    """Returns the settings that determine the blend."""
    train = [(item.path, item.weight) for item in data.train]
    return train, data.weights, data.temperature, [(phase.from_sample, phase.weights) for phase in data.phases]


def _shares(mix: MixConfig) -> dict[str, Fraction]:
    total = sum(map(Fraction, mix.weights.values()))
    return {path: Fraction(weight) / total for path, weight in mix.weights.items() if weight}
