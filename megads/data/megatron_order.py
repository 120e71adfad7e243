"""Megatron-LM's greedy blend of datasets, bit for bit: dealt once, cached, and mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megads.data.cached_arrays import ArrayCache, Arrays, CachedArrays, OpenArray
from megads.data.indexed import IntArray
from megads.errors import ConfigError
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import Deal, compiled_deal

FORMAT_VERSION = 1
BLOCK = 1 << 14
"""What each dataset has had is stored once in so many samples; within a block it is counted."""
SMALL_ORDER_SAMPLES = 1 << 16
"""Up to so many samples are dealt faster than they are read and checked."""
FEW_DATASETS = 10
"""Up to so many, a loop of plain Python deals faster than one of array operations."""

log = logging.getLogger(__name__)


def megatron_weights(weights: Sequence[float]) -> list[float]:
    """Weights as Megatron-LM normalises them: by NumPy's sum, which adds eight and more in pairs."""
    shares = np.array(weights, np.float64)
    return (shares / shares.sum()).tolist()


class MegatronOrder:
    """Megatron's blending: each sample goes to the dataset that lags most, the first of equals.

    Its first sample counts as one already due, so a dataset of any weight above 0 is drawn among the first ones,
    and may be drawn once more than its share allows (Megatron-LM issue 705); `BalancedOrder` does not do this.

    Args:
        weights: as `megatron_weights` returns them; Megatron-LM normalises them once more for the order, so this does.
        samples: how many are dealt; numbers beyond start again from 0.
        cache: where the order of many samples is kept; None deals them in memory.

    Raises:
        ConfigError: there are more datasets than Megatron's int16 counts, or the cache was given and cannot be written.
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
        """Returns, int64 [n] each, the dataset of each of n numbers, and how many it had before that one."""
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
        """Returns int64 [datasets], how many of the numbers below `total` each dataset has."""
        if total > self._samples:
            raise ConfigError(f"Megatron's order was made for {self._samples} samples, asked for {total}")
        block = total // BLOCK
        counts = self._counts[block]
        return counts + np.bincount(self._datasets[block * BLOCK : total], minlength=counts.size)


def _occurrences(datasets: npt.NDArray[np.int16]) -> IntArray:
    """How often each item has come before."""
    order = np.argsort(datasets, kind="stable")
    counts = np.bincount(datasets)
    places = np.empty(datasets.size, np.int64)
    places[order] = np.arange(datasets.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _cached_order(shares: npt.NDArray[np.float64], samples: int) -> CachedArrays:
    """All that determines an order, each share to the last bit."""
    key = {"shares": [share.hex() for share in shares.tolist()], "samples": samples, "format": FORMAT_VERSION}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return CachedArrays(f"{digest}-megatron-blend", key, ("datasets", "counts"), "order of the blend")


def _fastest_deal() -> Deal:
    try:
        return compiled_deal(log.info)
    except KernelsUnavailable as error:
        log.warning("data.order=megatron: dealing in Python, some 50 times as slow: %s", error)
        return _deal_in_python


def _dealt(shares: npt.NDArray[np.float64], samples: int, deal: Deal) -> Arrays:
    """The order in memory, as `_write` writes it."""
    datasets = np.empty(samples, np.int16)
    had = np.zeros_like(shares)
    counts = np.empty((samples // BLOCK + 1, shares.size), np.int64)
    for block, first in enumerate(range(0, samples + 1, BLOCK)):
        counts[block] = had
        deal(shares, had, first, datasets[first : first + BLOCK])
    return {"datasets": datasets, "counts": counts}


def _write(shares: npt.NDArray[np.float64], samples: int, open_array: OpenArray) -> None:
    """Writes the dataset of each sample, int16 [samples], and what each dataset has had before each block, int64
    [blocks, datasets], in the memory of the latter."""
    deal = _fastest_deal()
    log.info("data.order=megatron: dealing %d samples to %d datasets, once", samples, shares.size)
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
    """What the compiled loop does, see `Deal`: each choice depends on the rounding of all before it."""
    (_deal_few if shares.size <= FEW_DATASETS else _deal_many)(shares, had, first, dealt)


def _deal_few(
    shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
) -> None:
    """Plain Python, because a call into NumPy takes as long as ten datasets do."""
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
