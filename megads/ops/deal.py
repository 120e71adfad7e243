"""Megatron's greedy blend, compiled: kernels/data/deal.cpp, which needs neither torch nor its headers.

Its flags are its own: it must round as Megatron does, while the other kernels may contract sums and products.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
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
)

LIBRARY = "libmegads_deal.so"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")

Deal = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64], int, npt.NDArray[np.int16]], None]
"""Deals consecutive samples. Takes, in order: float64 [datasets], shares that sum to 1; float64 [datasets], samples
that each has had before, which is counted on; number of the first sample; int16 [samples], filled with the datasets."""


@functools.cache
def compiled_deal(say: Callable[[str], None]) -> Deal:
    """Returns the compiled loop, built where it is missing.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: there is no compiler, or it does not compile, load or link.
    """
    library = build_once(_library_path(), say, "Megatron's blending, once (about a second)", _compile)
    try:
        function = ctypes.CDLL(str(library)).megads_deal
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{library} cannot be loaded ({error}): remove it, and it is built anew") from error
    function.restype = None

    def deal(
        shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
    ) -> None:
        assert shares.size == had.size and shares.dtype == had.dtype == np.float64 and dealt.dtype == np.int16
        sizes = map(ctypes.c_int64, (shares.size, first, dealt.size))
        function(_pointer(shares), _pointer(had), *sizes, _pointer(dealt))

    return deal


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _source() -> Path:
    return sources_dir() / "data" / "deal.cpp"


def _library_path() -> Path:
    return cached_path(LIBRARY, [" ".join(FLAGS), compiler_version(find_compiler()), processor()], [_source()])


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        whole = Path(scratch) / LIBRARY
        run_compiler([find_compiler(), *FLAGS, str(_source()), "-o", str(whole)])
        whole.replace(library)
