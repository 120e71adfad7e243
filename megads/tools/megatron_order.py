"""Megatron-LM's index maps and blending of datasets, bit for bit, to continue its runs (data.order=megatron).

The order depends on the planned number of samples, so another run length gives another order. NumPy's RandomState is
frozen, so its shuffles do not change between versions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.api import ConfigError, DataConfig, IndexedDataset, IntArray, KernelsUnavailable, TrainSamples
from megads.data.sampling import index_maps
from megads.data.sampling.blend import BlendPart, Interleaving
from megads.data.sampling.cached_arrays import ArrayCache, Arrays, CachedArrays, MapWriter, OpenArray
from megads.data.sampling.index_maps import PIECE, EpochMap, SampleCutter, build_sample_index
from megads.ops.data_kernels import Deal, compiled_deal

_SURPLUS = 1.005
"""Factor by which Megatron builds more samples of each dataset of a blend than its share."""
FORMAT_VERSION = 1
BLOCK = 1 << 14
"""Counts per dataset are stored once per this many samples, and computed within a block."""
SMALL_ORDER_SAMPLES = 1 << 16
"""Orders of up to this many samples are computed faster than they are read and verified."""
_FEW_DATASETS = 10
"""Up to this many datasets, a plain Python loop is faster than array operations."""
log = logging.getLogger(__name__)


def megatron_blend(
    config: DataConfig,
    datasets: Sequence[IndexedDataset],
    documents: Sequence[range],
    weights: Sequence[float],
    seq_len: int,
    seed: int,
    total: int,
) -> tuple[list[BlendPart], Interleaving | None]:
    """Returns the samples of each dataset of a run, and their order; None for a single dataset.

    Args:
        config: data.megatron_theta, data.cache_dir, and data.train.
        datasets: datasets of data.train.
        documents: documents of each that are trained on.
        weights: weight of each dataset.
        seq_len: number of predicted tokens per sample.
        seed: Megatron's --seed.
        total: number of samples of the run.
    """
    weights = megatron_weights(weights)
    # As in Megatron, a single dataset gets the surplus only if a weight makes it a blend of one.
    blended = len(datasets) > 1 or config.train[0].weight is not None
    parts = list[BlendPart]()
    for dataset, part, weight in zip(datasets, documents, weights, strict=True):
        wanted = megatron_num_samples(total, weight) if blended else total
        parts.append(MegatronSamples(dataset, part, seq_len, seed, wanted, config.megatron_theta, config.cache_dir))
    if len(parts) == 1:
        return parts, None
    return parts, MegatronOrder(weights, total, ArrayCache(datasets[0].prefix, config.cache_dir))


@dataclass(frozen=True)
class MegatronMapKey:
    """All values that determine Megatron's map, which covers all epochs."""

    fingerprint: str
    """Fingerprint of the dataset."""
    first_document: int
    """Start of the range of documents."""
    end_document: int
    """End of the range of documents, exclusive."""
    seq_len: int
    """Number of predicted tokens per sample."""
    seed: int
    """Seed of numpy.random.RandomState."""
    samples: int
    """Required number of samples."""
    theta: float
    """The last epoch is shuffled separately if less than this share of its samples is used."""

    def name(self) -> str:
        """Returns a file name that is unique to the map's content."""
        content = json.dumps(asdict(self) | {"format": index_maps.FORMAT_VERSION, "order": "megatron"}, sort_keys=True)
        return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-megatron"

    def build(self, dataset: IndexedDataset) -> EpochMap:
        """Computes the map in memory; it has at least the required number of samples."""
        plan = self._plan(dataset)
        random = np.random.RandomState(self.seed)
        order, shuffle = np.empty(plan.documents, np.int32), np.empty(plan.samples, plan.shuffle_dtype)
        self._fill_order(order, plan, random)
        starts, ends = dataset.document_bounds(order.astype(np.int64))
        sample_index = build_sample_index(ends - starts, self.seq_len)
        _fill_shuffle(shuffle, plan, random)
        return EpochMap(order, sample_index, shuffle)

    def size_bytes(self, dataset: IndexedDataset) -> int:
        """Returns the size of the map's arrays in bytes."""
        plan = self._plan(dataset)
        return 4 * plan.documents + 16 * (plan.samples + 1) + plan.shuffle_dtype.itemsize * plan.samples

    def write(self, dataset: IndexedDataset, writer: MapWriter) -> None:
        """Writes the result of `build`, shuffling in mapped files, because each swap depends on all previous ones."""
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
        tokens = dataset.num_tokens_of(documents)
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
    """Sizes of a map.

    Attributes:
        documents: number of documents in all epochs.
        tokens: number of tokens in all epochs.
        samples: number of samples in all epochs.
        apart_from: first sample of the last epoch if that is shuffled separately, else None.
    """

    documents: int
    tokens: int
    samples: int
    apart_from: int | None

    @property
    def shuffle_dtype(self) -> np.dtype[Any]:
        # The limit is Megatron's. The dtype does not affect the order, but halves the memory.
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
    """Computes how many epochs Megatron concatenates.

    Args:
        tokens: number of tokens per epoch.
        seq_len: number of predicted tokens per sample.
        samples: required number of samples.
        theta: see `MegatronMapKey`.

    Returns:
        The minimum number of epochs with enough samples, and the first sample of the last epoch if that is shuffled
        separately, else None.
    """
    epochs = max(1, -(-(samples * seq_len + 1) // tokens))
    if epochs == 1:
        return 1, None
    before_last = ((epochs - 1) * tokens - 1) // seq_len
    apart = samples - before_last < int(theta * ((tokens - 1) // seq_len))
    return epochs, before_last if apart else None


class MegatronSamples(TrainSamples):
    """The samples of Megatron's GPTDataset; samples prefetched beyond the planned end wrap around.

    Args:
        dataset: the dataset.
        documents: the documents to train on.
        seq_len: S, the number of predicted tokens per sample.
        seed: Megatron's --seed.
        samples: required number of samples; the order depends on it.
        theta: see `MegatronMapKey`.
        cache_dir: folder in which index maps are cached; None is beside the dataset.

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
        tokens = dataset.num_tokens_of(documents)
        epochs, _ = epochs_for(tokens, seq_len, max(samples, 1), theta)
        self.samples_per_map = (epochs * tokens - 1) // seq_len

    def build_next_maps(self, samples: int, end: int | None, stop: threading.Event) -> None:
        """See `TrainSource`; does nothing, since one map covers all epochs."""

    def _map_key(self, turn: int) -> MegatronMapKey:
        return self._wanted


def megatron_num_samples(samples: int, weight: float) -> int:
    """Returns the number of samples that Megatron-LM builds of a dataset with that share of a blend."""
    return math.ceil(math.ceil(samples * weight) * _SURPLUS)


def megatron_weights(weights: Sequence[float]) -> list[float]:
    """Normalizes weights as Megatron-LM does, by NumPy's sum, which adds eight and more values pairwise."""
    shares = np.array(weights, np.float64)
    return (shares / shares.sum()).tolist()


class MegatronOrder:
    """Megatron's blending: each sample comes from the dataset that lags most behind its share, the first one on ties.

    The first sample already counts as due, so a dataset of any weight above 0 is drawn among the first samples, and may
    be drawn once more than its share allows (Megatron-LM issue 705); `BalancedOrder` does not have this property.

    Args:
        weights: weights from `megatron_weights`; normalized once more for the order, as in Megatron-LM.
        samples: number of assigned samples; larger indices wrap around.
        cache: cache for the order of many samples; None computes it in memory.

    Raises:
        ConfigError: there are more datasets than fit Megatron's int16, or the cache cannot be written to.
    """

    def __init__(self, weights: Sequence[float], samples: int, cache: ArrayCache | None = None) -> None:
        shares = np.array(megatron_weights(weights), np.float64)
        if shares.size > np.iinfo(np.int16).max:
            raise ConfigError(
                f"data.order = megatron blends up to {np.iinfo(np.int16).max} datasets, data.train has {shares.size}: "
                "merge some with `megads dataset merge`"
            )
        self._samples = samples
        found = None
        if samples <= SMALL_ORDER_SAMPLES:
            found = _dealt(shares, samples, _deal_in_python)
        elif cache is not None:
            found = cache.get(_cached_order(shares, samples), lambda open_array: _write(shares, samples, open_array))
        if found is None:
            found = _dealt(shares, samples, _fastest_deal())
        self._datasets: npt.NDArray[np.int16] = found["datasets"]
        self._counts: IntArray = found["counts"]

    def place(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Returns, int64 [n] each, the dataset of each of n stream indices, and the sample's index in that
        dataset's stream."""
        inside = numbers % max(self._samples, 1)
        datasets = self._datasets[inside].astype(np.int64)
        places = np.empty_like(inside)
        blocks, within = np.divmod(inside, BLOCK)
        by_block = np.argsort(blocks, kind="stable")
        met, borders = np.unique(blocks[by_block], return_index=True)
        for block, asked in zip(met.tolist(), np.split(by_block, borders[1:]), strict=False):  # none met splits to one
            content = self._datasets[block * BLOCK : block * BLOCK + int(within[asked].max()) + 1]
            places[asked] = self._counts[block, datasets[asked]] + _occurrences(content)[within[asked]]
        return datasets, places

    def counts(self, total: int) -> IntArray:
        """Returns int64 [datasets], the number of samples below index `total` in each dataset."""
        if total > self._samples:
            raise ConfigError(f"Megatron's order was made for {self._samples} samples, asked for {total}")
        block = total // BLOCK
        counts = self._counts[block]
        return counts + np.bincount(self._datasets[block * BLOCK : total], minlength=counts.size)


def _occurrences(datasets: npt.NDArray[np.int16]) -> IntArray:
    """Returns how often each item has occurred before."""
    order = np.argsort(datasets, kind="stable")
    counts = np.bincount(datasets)
    places = np.empty(datasets.size, np.int64)
    places[order] = np.arange(datasets.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _cached_order(shares: npt.NDArray[np.float64], samples: int) -> CachedArrays:
    """Returns the identity of an order, with each share exact to the last bit."""
    key = {"shares": [share.hex() for share in shares.tolist()], "samples": samples, "format": FORMAT_VERSION}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return CachedArrays(f"{digest}-megatron-blend", key, ("datasets", "counts"), "order of the blend")


def _fastest_deal() -> Deal:
    try:
        return compiled_deal(log.info)
    except KernelsUnavailable as error:
        log.warning("data.order=megatron: blending in Python, some 50 times slower: %s", error)
        return _deal_in_python


def _dealt(shares: npt.NDArray[np.float64], samples: int, deal: Deal) -> Arrays:
    """Computes the order in memory, as `_write` writes it."""
    datasets = np.empty(samples, np.int16)
    had = np.zeros_like(shares)
    counts = np.empty((samples // BLOCK + 1, shares.size), np.int64)
    for block, first in enumerate(range(0, samples + 1, BLOCK)):
        counts[block] = had
        deal(shares, had, first, datasets[first : first + BLOCK])
    return {"datasets": datasets, "counts": counts}


def _write(shares: npt.NDArray[np.float64], samples: int, open_array: OpenArray) -> None:
    """Writes the dataset of each sample, int16 [samples], and the count of each dataset before each block, int64
    [blocks, datasets]. Only the counts are held in memory."""
    deal = _fastest_deal()
    log.info("data.order=megatron: assigning %d samples to %d datasets, once", samples, shares.size)
    had, dealt = np.zeros_like(shares), np.empty(BLOCK, np.int16)
    counts = np.empty((samples // BLOCK + 1, shares.size), np.int64)
    with open_array("datasets") as file:
        header = {"descr": "<i2", "fortran_order": False, "shape": (samples,)}
        np.lib.format.write_array_header_1_0(file, header)
        for block, first in enumerate(range(0, samples + 1, BLOCK)):
            counts[block] = had
            part = dealt[: min(BLOCK, samples - first)]
            deal(shares, had, first, part)
            file.write(part.astype("<i2", copy=False).data)
    with open_array("counts") as file:
        np.save(file, counts)


def _deal_in_python(
    shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
) -> None:
    """Same result as the compiled loop, see `Deal`; each choice depends on the rounding of all previous ones."""
    (_deal_few if shares.size <= _FEW_DATASETS else _deal_many)(shares, had, first, dealt)


def _deal_few(
    shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
) -> None:
    """Plain Python, because a NumPy call takes as long as ten datasets do."""
    weights, counts, chosen_of = shares.tolist(), had.tolist(), dealt.data
    for place in range(dealt.size):
        due = float(first + place or 1)
        most, chosen = -math.inf, 0
        for dataset, (weight, count) in enumerate(zip(weights, counts, strict=True)):
            lag = weight * due - count
            if lag > most:
                most, chosen = lag, dataset
        chosen_of[place] = chosen
        counts[chosen] += 1.0
    had[:] = counts


def _deal_many(
    shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
) -> None:
    lag = np.empty_like(shares)
    for place in range(dealt.size):
        np.multiply(shares, first + place or 1, out=lag)
        lag -= had
        chosen = int(lag.argmax())
        dealt[place] = chosen
        had[chosen] += 1
