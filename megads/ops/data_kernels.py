"""Compiled loops of the data package: kernels/data/*.cpp, which need neither PyTorch nor its headers.

They have separate compiler flags: they must round as Megatron does, while other kernels may use fused multiply-add.
`compiled_deal` is Megatron's greedy blend, `compiled_key_sort` a random order by sorting random keys.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megads.ops.build import (
    KernelsUnavailable,
    build_once,
    cached_path,
    compiler_version,
    find_compiler,
    processor,
    run_compiler,
    sources_dir,
    target,
)

LIBRARY = "libmegads_data.so"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
ENTRY = np.dtype([("key", "<u8"), ("item", "<u4"), ("size", "<u4")])
"""An item of the random order, with its size in tokens, at most 2^32 - 1."""
MOST_ITEMS = 1 << 32
MOST_BITS = 16
BUCKET_BITS = 13
"""log2 of the entries per bucket: 2^13 entries fit in a core's cache while they are sorted."""
Deal = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64], int, npt.NDArray[np.int16]], None]
"""Assigns consecutive samples to datasets. Arguments, in order: float64 [datasets], shares that sum to 1; float64
[datasets], samples assigned to each before, updated in place; number of the first sample; int16 [samples], output: the
dataset of each sample."""


@functools.cache
def data_function(name: str, print_line: Callable[[str], None]) -> Callable[..., None]:
    """Returns a compiled function; builds the library if it is missing.

    Args:
        name: name of the function.
        print_line: called with progress messages.

    Raises:
        KernelsUnavailable: there is no compiler, or the library does not compile, load or link.
    """
    library = build_once(_library_path(), print_line, "the loops over index maps, once (about a second)", _compile)
    try:
        function = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{library} cannot be loaded ({error}): remove it to rebuild it") from error
    function.restype = None
    return function  # type: ignore[no-any-return]


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Returns the address of a contiguous array."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _sources() -> list[Path]:
    return sorted((sources_dir() / "data").glob("*.cpp"))


def _library_path() -> Path:
    return cached_path(LIBRARY, [" ".join(FLAGS), target(), compiler_version(find_compiler()), processor()], _sources())


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        whole = Path(scratch) / LIBRARY
        run_compiler([find_compiler(), *FLAGS, target(), *map(str, _sources()), "-o", str(whole)])
        whole.replace(library)


class DocumentOffsets(ctypes.Structure):
    """Offsets of the documents in an indexed dataset; the arrays must outlive it.

    Attributes:
        document_index: address of the document index entry of the first item.
        offsets: address of the byte offset of sequence 0.
        sequences: number of sequences in the dataset.
        tokens: number of tokens in the dataset.
        token_bytes: bytes per token.
    """

    _fields_ = (
        ("document_index", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("token_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class KeySort:
    """Sorts items by random keys with compiled loops.

    Attributes:
        count: compiled function that counts keys by their leading bits.
        sort: compiled function that sorts the items in a range of leading bits.
    """

    count: Callable[..., None]
    sort: Callable[..., None]

    def passes(
        self, generator: np.random.PCG64, items: int, capacity: int, threads: int, documents: DocumentOffsets | None
    ) -> Iterator[npt.NDArray[Any]]:
        """Yields ENTRY arrays of all items in the order of their keys, equal keys in the order of the items.

        Each array is overwritten by the next one.

        Args:
            generator: generator of the keys; its state is not changed.
            items: number of items, less than MOST_ITEMS.
            capacity: maximum number of entries in memory; exceeded if a single bucket has more.
            threads: number of threads.
            documents: documents whose sizes are stored in the entries; None: no sizes.
        """
        assert items < MOST_ITEMS
        bits = min(max(items.bit_length() - BUCKET_BITS, 1), MOST_BITS)
        counts: npt.NDArray[np.int64] = np.zeros((threads, 1 << bits), np.int64)
        words = _words(generator)
        drawn = (pointer(words), ctypes.c_int64(items), ctypes.c_int(bits), ctypes.c_int(threads))
        self.count(*drawn, pointer(counts))
        ends = np.concatenate(([0], np.cumsum(counts.sum(axis=0))))
        borders = [0]
        while borders[-1] < 1 << bits:
            fits = int(np.searchsorted(ends, ends[borders[-1]] + capacity, side="right")) - 1
            borders.append(max(fits, borders[-1] + 1))
        entries = np.empty(np.diff(ends[borders]).max(), ENTRY)
        given = ctypes.byref(documents) if documents is not None else None
        for first, end in itertools.pairwise(borders):
            self.sort(*drawn, pointer(counts), ctypes.c_int64(first), ctypes.c_int64(end), given, pointer(entries))
            yield entries[: ends[end] - ends[first]]


def compiled_key_sort(print_line: Callable[[str], None]) -> KeySort:
    """Returns the compiled sort; builds the library if it is missing.

    Args:
        print_line: called with progress messages.

    Raises:
        KernelsUnavailable: there is no compiler, or the library does not compile, load or link.
    """
    return KeySort(data_function("megads_count_keys", print_line), data_function("megads_sort_items", print_line))


def _words(generator: np.random.PCG64) -> npt.NDArray[np.uint64]:
    state: Any = generator.state["state"]
    numbers = (state["state"], state["inc"])
    return np.array([half for number in numbers for half in (number >> 64, number & (2**64 - 1))], np.uint64)


def compiled_deal(print_line: Callable[[str], None]) -> Deal:
    """Returns the compiled blend; builds the library if it is missing.

    Args:
        print_line: called with progress messages.

    Raises:
        KernelsUnavailable: there is no compiler, or the library does not compile, load or link.
    """
    function = data_function("megads_deal", print_line)

    def deal(
        shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
    ) -> None:
        assert shares.size == had.size and shares.dtype == had.dtype == np.float64 and dealt.dtype == np.int16
        sizes = map(ctypes.c_int64, (shares.size, first, dealt.size))
        function(pointer(shares), pointer(had), *sizes, pointer(dealt))

    return deal
