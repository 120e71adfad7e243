"""Random orders in bounded memory: each item has a random key, and the keys in order give the order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.data.indexed import IndexedDataset, IntArray
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import ENTRY, MOST_ITEMS, KeySort, compiled_key_sort

MEMORY_BYTES = 1 << 30
"""Of keys at a time."""
PIECE = 1 << 18
"""Items of a piece: what is made of them stays in the processor's cache."""
# Key, item and place while they are sorted, each also in the parts that they were drawn in.
_NUMPY_BYTES = 48
_DRAWN = 1 << 17

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Items that follow each other in a random order.

    Attributes:
        items: integer [n].
        sizes: int64 [n], tokens of each where the items are documents; else None.
    """

    items: npt.NDArray[np.integer[Any]]
    sizes: IntArray | None


def order_dtype(count: int) -> np.dtype[Any]:
    """Returns the dtype of an order of so many items."""
    return np.dtype("<i4" if count < 2**31 else "<i8")


def random_order(
    random: np.random.PCG64, count: int, threads: int, dataset: IndexedDataset | None = None, first: int = 0
) -> Iterator[Piece]:
    """Yields a random order of 0..count-1 in pieces.

    Keys are not stored: a pass draws all of them anew and keeps those of a range that fits into MEMORY_BYTES. It also
    reads the sizes of the documents, from first to last, so that the index need not fit into memory.

    Args:
        random: draws one number an item; stands after them when the last piece is taken.
        count: of items; at least one.
        threads: that sort.
        dataset: whose documents the items are; None where they are none.
        first: number of document 0 of the order.
    """
    sort = _compiled() if count < MOST_ITEMS else None
    if sort is not None:
        yield from _compiled_pieces(sort, random, count, threads, dataset, first)
    else:
        yield from _numpy_pieces(random, count, dataset, first)
    random.advance(count)


def _compiled() -> KeySort | None:
    try:
        return compiled_key_sort(log.info)
    except KernelsUnavailable as error:
        log.warning("sorting index maps by NumPy, some ten times as slow: %s", error)
        return None


def _compiled_pieces(
    sort: KeySort, random: np.random.PCG64, count: int, threads: int, dataset: IndexedDataset | None, first: int
) -> Iterator[Piece]:
    documents = dataset.addresses(first) if dataset is not None else None
    for entries in sort.passes(random, count, MEMORY_BYTES // ENTRY.itemsize, threads, documents):
        for begin in range(0, entries.size, PIECE):
            part = entries[begin : begin + PIECE]
            items, sizes = part["item"].astype(np.int64), None
            if dataset is not None:
                sizes = part["size"].astype(np.int64)
                long = np.flatnonzero(part["size"] == np.iinfo(np.uint32).max)
                if long.size:
                    sizes[long] = _sizes(dataset, items[long] + first)
            yield Piece(items, sizes)


def _numpy_pieces(random: np.random.PCG64, count: int, dataset: IndexedDataset | None, first: int) -> Iterator[Piece]:
    passes = -(-count * _NUMPY_BYTES // MEMORY_BYTES)
    for low, end in itertools.pairwise((number << 64) // passes for number in range(passes + 1)):
        order = _numpy_pass(random, count, np.uint64(low), np.uint64(end - 1))
        for begin in range(0, order.size, PIECE):
            items = order[begin : begin + PIECE]
            yield Piece(items, None if dataset is None else _sizes(dataset, items + first))


def _numpy_pass(random: np.random.PCG64, count: int, lowest: np.uint64, highest: np.uint64) -> IntArray:
    """The items whose keys are in a range, in the order of the keys."""
    generator = np.random.PCG64()
    generator.state = random.state
    keys, items = [], []
    for begin in range(0, count, _DRAWN):
        drawn = generator.random_raw(min(_DRAWN, count - begin))
        inside = np.flatnonzero((drawn >= lowest) & (drawn <= highest))
        keys.append(drawn[inside])
        items.append(inside + begin)
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.concatenate(items)[order]


def _sizes(dataset: IndexedDataset, documents: IntArray) -> IntArray:
    starts, ends = dataset.document_bounds(documents)
    return ends - starts
