"""On which CPUs PyTorch's GEMMs are slow. Does not import torch, since planning uses it, too.

Decisions depend on vendor and instruction set, not on a measurement: all ranks must decide the same, and so must a run
and the one that resumes it.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
"""Instruction sets that PyTorch requires for its AVX-512 code and for oneDNN's bf16 GEMMs."""


def multiplies(*, low: bool) -> bool:
    """Whether megads' kernels are used on this CPU for GEMMs that are not too thin, and for fused gradient
    accumulation.

    Args:
        low: bf16, else fp32.
    """
    return torch_loops_over_bf16() or pairs_are_fast() if low else mkl_is_slow()


def mkl_is_slow() -> bool:
    """Whether this is an AMD CPU with AVX-512, on which MKL is slow."""
    return "AuthenticAMD" in _words() and has_avx512()


def pairs_are_fast() -> bool:
    """Whether this is a Zen 4 or 5, the only CPUs on which the bf16 kernel has been compared with oneDNN."""
    return mkl_is_slow() and "avx512_bf16" in _words()


def torch_loops_over_bf16() -> bool:
    """Whether this is an x86 CPU for which oneDNN has no bf16 GEMM, so that PyTorch uses plain loops."""
    return platform.machine() == "x86_64" and not has_avx512()


def has_avx512() -> bool:
    """Whether this CPU has the AVX-512 instruction sets that PyTorch requires."""
    return _words() >= _AVX512


@functools.cache
def _words() -> frozenset[str]:
    """Words in /proc/cpuinfo, including vendor and flags; empty if there is no such file."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()
