"""The CUDA kernels as nvcc compiles them: for all targets, without spills, loadable beside a torch without CUDA.

Slow where nothing is in the user's cache yet: nvcc takes a minute or two.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from megads.ops.build import KernelsUnavailable
from megads.ops.build_cuda import REPORT, KernelReport, build_library, find_nvcc, reports
from megads.ops.library import load_cuda_library

pytestmark = pytest.mark.slow

MOST_REGISTERS = {
    "softmax_forward": 120,
    "softmax_backward": 72,
    "norm_forward": 88,
    "norm_backward": 72,
    "sum_columns": 32,
    "cross_entropy_forward": 40,
    "cross_entropy_backward": 40,
    "gelu_flat": 48,
    "bias_gelu": 64,
    "swiglu_forward": 32,
    "swiglu_backward": 40,
    "dropout": 32,
    "rotary": 48,
    "square_sums": 40,
    "sum_partials": 48,
    "adamw": 40,
}
"""Of a thread, whatever the element type: what the blocks that a multiprocessor holds at a time follow from."""

OPERATORS = (
    "softmax_forward", "softmax_backward", "norm_forward", "add_norm_forward", "norm_backward", "gelu_forward",
    "gelu_backward", "bias_gelu_forward", "bias_gelu_backward", "swiglu_forward", "swiglu_backward", "rotary",
    "cross_entropy_forward", "cross_entropy_gradient_", "cross_entropy_loss_", "square_sums", "adamw_step",
    "dropout",
)  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled CUDA library."""
    try:
        find_nvcc()
    except KernelsUnavailable as error:
        pytest.skip(f"no CUDA compiler here: {error}")
    return build_library(print)


def base_name(kernel: KernelReport) -> str:
    """The kernel's own name in the linker's, which counts each name's letters."""
    found = [name for name in MOST_REGISTERS if f"{len(name)}{name}" in kernel.name]
    assert len(found) == 1, f"{kernel.name}: give it a ceiling in MOST_REGISTERS"
    return found[0]


def test_no_spills_and_few_registers(library: Path) -> None:
    """Catches registers kept in memory, and a kernel so wide that few of its blocks fit on a multiprocessor."""
    kernels = reports((library.parent / REPORT).read_text())
    for architecture in ("sm_80", "sm_90"):
        assert {base_name(kernel) for kernel in kernels if kernel.architecture == architecture} == set(MOST_REGISTERS)
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
    assert [kernel for kernel in kernels if kernel.registers > MOST_REGISTERS[base_name(kernel)]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: a launch would succeed")
def test_a_launch_without_a_gpu_says_so(library: Path) -> None:
    """Catches a launcher that drops CUDA's error: its results would be whatever was in memory."""
    launchers = ctypes.CDLL(str(library))
    launchers.megads_cuda_error.restype = ctypes.c_char_p
    nowhere = ctypes.c_void_p(None)
    error = launchers.megads_cuda_gelu_forward(
        *(ctypes.c_int64(number) for number in (0, 1, 8)), nowhere, nowhere, nowhere, ctypes.c_int64(0)
    )
    assert error != 0
    assert re.search("driver|device", launchers.megads_cuda_error(ctypes.c_int64(error)).decode())
    nothing = [ctypes.c_int64(number) for number in (0, 0, 8)]
    assert launchers.megads_cuda_gelu_forward(*nothing, nowhere, nowhere, nowhere, ctypes.c_int64(0)) == 0


@pytest.mark.usefixtures("kernels")
def test_loads_beside_any_torch(library: Path) -> None:
    """Catches a library that needs symbols of a torch with CUDA, and an operator left without GPU code."""
    load_cuda_library(library)
    missing = [
        name
        for name in OPERATORS
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"megads::{name}", "CUDA")
        or not torch._C._dispatch_has_kernel_for_dispatch_key(f"megads::{name}", "CPU")
    ]
    assert missing == []
