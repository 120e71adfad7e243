"""Which implementation multiplies matrices on this CPU. Does not import torch, since planning uses it, too.

Decisions depend on vendor and instruction set, not on a measurement: all ranks must decide the same, and so must a run
and the one that resumes it.
"""

from __future__ import annotations

import functools
import platform
from enum import StrEnum
from pathlib import Path

from megads.runtime.environment import cpu_isa_limit, onednn_below_avx512

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
"""Instruction sets that PyTorch requires for its AVX-512 code and for oneDNN's bf16 GEMMs."""


class GemmBackend(StrEnum):
    """Implementation of the GEMMs of one dtype on a CPU."""

    torch = "torch"
    """PyTorch's, which calls MKL or oneDNN."""
    megads = "megads"
    """kernels/cpu/gemm.cpp and gemm_bf16.cpp."""
    widened = "widened"
    """PyTorch's in fp32: bf16 operands are converted first, and the result is rounded."""


def gemm(*, bf16: bool, kernels: bool) -> GemmBackend:
    """Returns the implementation of GEMMs that are not too thin; it is never PyTorch's plain loop over bf16.

    Args:
        bf16: operands are bf16, else fp32.
        kernels: whether megads' kernels are available.
    """
    if bf16 and torch_loops_over_bf16():
        return GemmBackend.megads if kernels else GemmBackend.widened
    ours = bf16_pairs_are_fast() if bf16 else is_mkl_slow()
    return GemmBackend.megads if ours and kernels else GemmBackend.torch


def is_mkl_slow() -> bool:
    """Whether this is an AMD CPU with AVX-512, on which MKL is slow."""
    return "AuthenticAMD" in _words() and has_avx512()


def bf16_pairs_are_fast() -> bool:
    """Whether this is a Zen 4 or 5, the only CPUs on which the bf16 kernel has been compared with oneDNN."""
    return is_mkl_slow() and "avx512_bf16" in _words()


def torch_loops_over_bf16() -> bool:
    """Whether oneDNN has no bf16 GEMM for this CPU, so that PyTorch uses plain loops: up to 80 times slower than fp32.

    oneDNN has them for x86 with AVX-512 and for Arm with the BF16 extension (Graviton 3, Grace, not Graviton 2).
    """
    match platform.machine():
        case "x86_64":
            return not has_avx512() or onednn_below_avx512()
        case "aarch64":
            return "bf16" not in _words()
        case _:
            return True


def has_avx512() -> bool:
    """Whether this CPU has the AVX-512 instruction sets that PyTorch requires."""
    return _words() >= _AVX512


def instruction_sets() -> str:
    """Describes the instruction sets that matter for GEMMs, for example "AVX-512, bf16 units"."""
    words = _words()
    if platform.machine() == "aarch64":
        vectors = "SVE" if "sve" in words else "NEON"
    else:
        vectors = "AVX-512" if has_avx512() else "AVX2" if "avx2" in words else platform.machine()
    units = " and AMX" if "amx_bf16" in words else ""
    low = f"bf16 units{units}" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "no bf16 units"
    return f"{vectors}, {low}"


def describe_gemm(*, bf16: bool, kernels: bool) -> str:
    """Describes this CPU's instruction sets and, where it has no bf16 GEMM, what computes bf16 instead.

    Args:
        bf16: operands are bf16, else fp32.
        kernels: whether megads' kernels are available.
    """
    if not (bf16 and torch_loops_over_bf16()):
        return instruction_sets()
    how = "megads' kernels" if gemm(bf16=True, kernels=kernels) is GemmBackend.megads else "PyTorch's fp32 GEMMs"
    return f"{instruction_sets()}: bf16 saves memory, not time; {how} multiply it in fp32"


@functools.cache
def _words() -> frozenset[str]:
    """Words in /proc/cpuinfo, including vendor and flags; empty if there is no such file."""
    try:
        words = frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()
    limited = cpu_isa_limit() is not None
    return frozenset(word for word in words if not (limited and word.startswith(("avx512", "avx10", "amx_"))))
