"""Which matrix products torch is slow at on this processor. Imports no torch: planning asks it, too.

Everything goes by names and instructions, not by a measurement: ranks must agree, and so must a run and the one that
resumes it.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
"""What torch wants of a processor for its AVX-512 code and for oneDNN's products in bf16."""


def multiplies(*, low: bool) -> bool:
    """Whether our kernels multiply matrices here, if they are not too thin, and add gradients of weights to their sums.

    Args:
        low: in bf16, else in fp32.
    """
    return torch_loops_over_bf16() or pairs_are_fast() if low else mkl_is_slow()


def mkl_is_slow() -> bool:
    """Whether this is an AMD processor with AVX-512; elsewhere torch's choice stands."""
    return "AuthenticAMD" in _words() and has_avx512()


def pairs_are_fast() -> bool:
    """Whether this is a Zen 4 or 5, the only processors on which our bf16 kernel has been compared with oneDNN."""
    return mkl_is_slow() and "avx512_bf16" in _words()


def torch_loops_over_bf16() -> bool:
    """Whether this is an x86 processor on which torch has no bf16 product of its own."""
    return platform.machine() == "x86_64" and not has_avx512()


def has_avx512() -> bool:
    """Whether this processor has the instructions of AVX-512 that torch uses."""
    return _words() >= _AVX512


@functools.cache
def _words() -> frozenset[str]:
    """Maker, flags and whatever else Linux says of the processor; empty where there is no such file."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()
