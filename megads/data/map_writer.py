"""Writes index maps piece by piece, so that a map needs no more memory than a piece of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megads.data.cached_arrays import OpenArray

Array = npt.NDArray[Any]
Append = Callable[[Array], None]
"""Writes the next piece of an array; one of another dtype is cast."""


class MapWriter:
    """Writes the arrays of a map.

    Args:
        open_array: opens the file of an array, by its name.
        threads: that build.
        report: told how many bytes there are so far, every few MB; what it raises ends the build.
    """

    def __init__(self, open_array: OpenArray, threads: int, report: Callable[[int], None]) -> None:
        self._open_array = open_array
        self.threads = threads
        self._report = report
        self._written = 0

    @contextmanager
    def pieces(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int]) -> Iterator[Append]:
        """Opens an array that is appended to, along its first axis, until it has its shape.

        Raises:
            OSError: as the system reports it (full disk, no permission).
        """
        left = int(np.prod(shape))
        with self._open_array(name) as file:
            _write_header(file, dtype, shape)

            def append(piece: Array) -> None:
                nonlocal left
                cast = np.ascontiguousarray(piece, dtype)
                left -= cast.size
                file.write(cast.data)
                self._tell(cast.nbytes)

            yield append
            assert not left, f"{name} lacks {left} of {shape}"

    @contextmanager
    def mapped(self, name: str, dtype: npt.DTypeLike, count: int) -> Iterator[Array]:
        """Opens an array of one axis that is written in any order, in pages that the system may put on disk.

        Raises:
            OSError: as in `pieces`.
        """
        with self._open_array(name) as file:
            _write_header(file, dtype, (count,))
            begin = file.tell()
            # Writing to a page that the disk has no room for would be a SIGBUS.
            os.posix_fallocate(file.fileno(), begin, max(np.dtype(dtype).itemsize * count, 1))
            array = np.memmap(file.name, dtype, "r+", begin, (count,))
            yield array.view(np.ndarray)
            array.flush()
            self._tell(array.nbytes)

    def _tell(self, more_bytes: int) -> None:
        self._written += more_bytes
        self._report(self._written)


def _write_header(file: BinaryIO, dtype: npt.DTypeLike, shape: Sequence[int]) -> None:
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": description, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)
    file.flush()
