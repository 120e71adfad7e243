"""Megatron-LM's own order of samples, bit for bit, for those who continue a run of it.

It depends on the number of samples that the run is planned for: another length is another order. NumPy's RandomState is
frozen, so its shuffles stay what they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import threading
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.index_maps import FORMAT_VERSION, EpochMap, SampleCutter, build_sample_index
from megads.data.indexed import IndexedDataset
from megads.data.map_writer import MapWriter
from megads.data.random_order import PIECE
from megads.data.samples import TrainSamples

SURPLUS = 1.005
"""Megatron builds so many more samples of each dataset of a blend than its share."""


@dataclass(frozen=True)
class MegatronMapKey:
    """All that determines Megatron's map, of all epochs at once."""

    fingerprint: str
    """Of the dataset."""
    first_document: int
    """Start of the range of documents."""
    end_document: int
    """End of the range of documents, exclusive."""
    seq_len: int
    """Tokens that a sample predicts."""
    seed: int
    """Seed of numpy.random.RandomState."""
    samples: int
    """Samples wanted."""
    theta: float
    """The last epoch is shuffled apart when it gives fewer than this share of an epoch's samples."""

    def name(self) -> str:
        """Returns a file name that differs wherever the map may."""
        content = json.dumps(asdict(self) | {"format": FORMAT_VERSION, "order": "megatron"}, sort_keys=True)
        return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-megatron"

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map in memory; it holds at least the samples wanted."""
        plan = self._plan(dataset)
        random = np.random.RandomState(self.seed)
        order, shuffle = np.empty(plan.documents, np.int32), np.empty(plan.samples, plan.shuffle_dtype)
        self._fill_order(order, plan, random)
        starts, ends = dataset.document_bounds(order.astype(np.int64))
        sample_index = build_sample_index(ends - starts, self.seq_len)
        _fill_shuffle(shuffle, plan, random)
        return EpochMap(order, sample_index, shuffle)

    def size_bytes(self, dataset: IndexedDataset) -> int:
        """Returns the bytes of the map's arrays."""
        plan = self._plan(dataset)
        return 4 * plan.documents + 16 * (plan.samples + 1) + plan.shuffle_dtype.itemsize * plan.samples

    def write(self, dataset: IndexedDataset, writer: MapWriter) -> None:
        """Writes what `build` computes, shuffling in mapped files: each swap depends on all before it."""
        plan = self._plan(dataset)
        random = np.random.RandomState(self.seed)
        cutter = SampleCutter(plan.tokens, self.seq_len)
        with writer.mapped("document_order", np.int32, plan.documents) as order:
            self._fill_order(order, plan, random)
            with writer.pieces("sample_index", "<i8", (cutter.rows, 2)) as append_rows:
                for begin in range(0, order.size, PIECE):
                    starts, ends = dataset.document_bounds(order[begin : begin + PIECE].astype(np.int64))
                    for rows in cutter.cut(ends - starts):
                        append_rows(rows)
        with writer.mapped("shuffle", plan.shuffle_dtype, plan.samples) as shuffle:
            _fill_shuffle(shuffle, plan, random)

    def _plan(self, dataset: IndexedDataset) -> _Plan:
        documents = range(self.first_document, self.end_document)
        tokens = dataset.stream(documents).size
        epochs, apart_from = epochs_for(tokens, self.seq_len, self.samples, self.theta)
        return _Plan(epochs * len(documents), epochs * tokens, (epochs * tokens - 1) // self.seq_len, apart_from)

    def _fill_order(self, order: npt.NDArray[np.int32], plan: _Plan, random: np.random.RandomState) -> None:
        count = self.end_document - self.first_document
        for begin in range(0, order.size, count):
            _count_up(order[begin : begin + count], self.first_document)
        last = order.size - count if plan.apart_from is not None else 0
        for part in (order[:last], order[last:]) if last else (order,):
            random.shuffle(part)


@dataclass(frozen=True)
class _Plan:
    """What a map holds.

    Attributes:
        documents: of all epochs.
        tokens: of all epochs.
        samples: of all epochs.
        apart_from: first sample of the last epoch where that is shuffled apart, else None.
    """

    documents: int
    tokens: int
    samples: int
    apart_from: int | None

    @property
    def shuffle_dtype(self) -> np.dtype[Any]:
        # Megatron's limit. The dtype does not change the order, but half the memory counts.
        return np.dtype(np.uint32 if self.samples < np.iinfo(np.uint32).max - 1 else np.int64)


def _fill_shuffle(shuffle: npt.NDArray[Any], plan: _Plan, random: np.random.RandomState) -> None:
    _count_up(shuffle, 0)
    borders = (0, plan.samples) if plan.apart_from is None else (0, plan.apart_from, plan.samples)
    for begin, end in itertools.pairwise(borders):
        random.shuffle(shuffle[begin:end])


def _count_up(numbers: npt.NDArray[Any], first: int) -> None:
    for begin in range(0, numbers.size, PIECE):
        end = min(begin + PIECE, numbers.size)
        numbers[begin:end] = np.arange(first + begin, first + end)


def epochs_for(tokens: int, seq_len: int, samples: int, theta: float) -> tuple[int, int | None]:
    """Decides how many epochs Megatron lays end to end.

    Args:
        tokens: of one epoch.
        seq_len: tokens that a sample predicts.
        samples: wanted.
        theta: see `MegatronMapKey`.

    Returns:
        The fewest epochs that give the samples, and the first sample of the last epoch where that is shuffled apart,
        else None.
    """
    epochs = max(1, -(-(samples * seq_len + 1) // tokens))
    if epochs == 1:
        return 1, None
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    apart = samples - before_last < int(theta * ((tokens - 1) // seq_len))
    return epochs, before_last if apart else None


class MegatronSamples(TrainSamples):
    """The samples of Megatron's GPTDataset; what the loader reads ahead beyond the planned end wraps around.

    Args:
        dataset: where the tokens are.
        documents: the documents to train on.
        seq_len: S, tokens that a sample predicts.
        seed: Megatron's --seed.
        samples: wanted; the order depends on it.
        theta: see `MegatronMapKey`.
        cache_dir: where index maps are cached; None is beside the dataset.

    Raises:
        DataError: the documents have too few tokens for one sample.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_len: int,
        seed: int,
        samples: int,
        theta: float = 0.80,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(dataset, documents, seq_len, seed, cache_dir)
        self._wanted = MegatronMapKey(
            self._fingerprint, documents.start, documents.stop, seq_len, seed, max(samples, 1), theta
        )
        tokens = dataset.stream(documents).size
        epochs, _ = epochs_for(tokens, seq_len, max(samples, 1), theta)
        self.samples_per_map = (epochs * tokens - 1) // seq_len

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; there is one map, of all epochs."""

    def _map_key(self, turn: int) -> MegatronMapKey:
        return self._wanted


def megatron_share(samples: int, weight: float) -> int:
    """Samples that Megatron-LM builds of a dataset with that share of a blend."""
    return math.ceil(math.ceil(samples * weight) * SURPLUS)
