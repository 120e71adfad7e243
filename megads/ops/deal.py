"""Megatron's greedy blend, compiled: kernels/data/deal.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megads.ops.data_library import data_function, pointer

Deal = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64], int, npt.NDArray[np.int16]], None]
"""Deals consecutive samples. Takes, in order: float64 [datasets], shares that sum to 1; float64 [datasets], samples
that each has had before, which is counted on; number of the first sample; int16 [samples], filled with the datasets."""


def compiled_deal(say: Callable[[str], None]) -> Deal:
    """Returns the compiled loop, built where it is missing.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: there is no compiler, or it does not compile, load or link.
    """
    function = data_function("megads_deal", say)

    def deal(
        shares: npt.NDArray[np.float64], had: npt.NDArray[np.float64], first: int, dealt: npt.NDArray[np.int16]
    ) -> None:
        assert shares.size == had.size and shares.dtype == had.dtype == np.float64 and dealt.dtype == np.int16
        sizes = map(ctypes.c_int64, (shares.size, first, dealt.size))
        function(pointer(shares), pointer(had), *sizes, pointer(dealt))

    return deal
