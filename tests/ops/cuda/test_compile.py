"""The CUDA kernels compiled by nvcc, and their library loaded by PyTorch, without a GPU.

`make test-gpu-build` runs this file with the CUDA builds of two versions of PyTorch; otherwise it runs with the
installed one. Slow if the user's cache is empty: nvcc takes a minute or two.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.ops.build import (
    KernelReport,
    KernelsUnavailable,
    build_cuda,
    find_nvcc,
    report_path,
    reports,
    sources_dir,
    torch_has_cuda,
)
from megads.ops.resolve import load_cuda_library

pytestmark = pytest.mark.slow

MOST_REGISTERS = {
    "softmax_forward": 128,
    "softmax_backward": 72,
    "softmax_dropout_forward": 128,
    "softmax_dropout_backward": 104,
    "norm_forward": 96,
    "norm_backward": 72,
    "norm_backward_others": 80,
    "sum_columns": 32,
    "cross_entropy_forward": 32,
    "cross_entropy_backward": 32,
    "gelu_flat": 40,
    "bias_gelu": 48,
    "swiglu_forward": 40,
    "swiglu_backward": 40,
    "dropout": 64,
    "rotary": 48,
    "square_sums": 40,
    "sum_partials": 48,
    "adamw": 40,
    "magnitudes": 48,
    "largest_of_parts": 32,
    "column_magnitudes": 40,
    "largest_of_column": 32,
    "quantize": 40,
    "quantize_rows": 80,
    "quantize_both": 40,
}
"""Maximum registers per thread for any element type; they limit how many blocks fit on a multiprocessor."""

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
NULL_BY_DESIGN = ("_ITM_", "__gmon_start__")
"""Weak symbols in the compiler's start-up code: transactional memory, profiling."""


def calls() -> dict[str, tuple[Any, ...]]:
    """Returns every operator of the CUDA library, with CPU arguments of the right shapes and dtypes."""
    x, row, rows, flag = torch.ones(2, 4), torch.ones(4), torch.ones(2), torch.ones(2, dtype=torch.int64)
    scores, statistics, drawn = torch.ones(1, 1, 2, 4), torch.ones(2, 2), (flag[:1], 7, 9000, 0)
    turned, table = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 2)
    bounds, flat = torch.tensor([[0, 3]]), torch.ones(3)
    bits = torch.ones(2, dtype=torch.int32)
    return {
        "softmax_forward": (scores, 1.0, None, None, None),
        "softmax_backward": (scores, scores, 1.0, None, None),
        "norm_forward": (x, row, row, 1e-5, True),
        "add_norm_forward": (x, x, row, row, 1e-5, True),
        "norm_backward": (x, None, x, row, statistics, True, True),
        "gelu_forward": (x,),
        "gelu_backward": (x, x),
        "bias_gelu_forward": (x, row),
        "bias_gelu_backward": (x, x, row),
        "swiglu_forward": (x,),
        "swiglu_backward": (torch.ones(2, 2), x),
        "softmax_dropout_forward": (scores, 1.0, None, None, None, *drawn),
        "softmax_dropout_backward": (scores, scores, 1.0, None, None, *drawn),
        "dropout": (scores[0], None, None, *drawn[:3]),
        "rotary": (turned, table, table, False),
        "cross_entropy_forward": (x, flag, 4, 0),
        "cross_entropy_gradient_": (x, flag, rows, rows, rows, 4, 0),
        "cross_entropy_loss_": (x, flag, rows, 4, 0),
        "float8_magnitudes": (x,),
        "float8_column_magnitudes": (x,),
        "float8_quantize": (x, bits, 0),
        "float8_quantize_rows": (x, 1),
        "float8_quantize_both": (x, bits, bits[:1]),
        "square_sums": (flat, bounds),
        "adamw_step": (*[flat.clone() for _ in range(5)], torch.ones(1), 1e-3, 0.0, 0.9, 0.95, 1e-8, 1),
    }


BINDINGS = sources_dir() / "bindings" / "cuda"


def said_by(*command: str | Path) -> str:
    """Returns the output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled CUDA library."""
    try:
        find_nvcc()
    except KernelsUnavailable as error:
        pytest.skip(f"no CUDA compiler here: {error}")
    return build_cuda(print)


def base_name(kernel: KernelReport) -> str:
    """Returns a kernel's name from its mangled name, which contains its length."""
    found = [name for name in MOST_REGISTERS if f"{len(name)}{name}" in kernel.name]
    assert len(found) == 1, f"{kernel.name}: give it a ceiling in MOST_REGISTERS"
    return found[0]


@pytest.mark.usefixtures("library")
def test_kernels_spill_no_registers() -> None:
    """Catches spilled registers, and a kernel with so many registers that few of its blocks fit on a multiprocessor."""
    kernels = reports(report_path().read_text())
    for architecture in ("sm_80", "sm_90"):
        assert {base_name(kernel) for kernel in kernels if kernel.architecture == architecture} == set(MOST_REGISTERS)
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
    assert [kernel for kernel in kernels if kernel.registers > MOST_REGISTERS[base_name(kernel)]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: a launch would succeed")
def test_a_launch_without_a_gpu_raises(library: Path) -> None:
    """Catches a launcher that ignores CUDA's error: its results would be uninitialized memory."""
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


def test_every_gpu_target_has_machine_code(library: Path, tmp_path: Path) -> None:
    """Catches a build without machine code for A100 or H100, or without the PTX that later GPUs translate."""
    section = tmp_path / "fatbin"
    said_by("objcopy", "-O", "binary", "--only-section=.nv_fatbin", library, section)
    data, at, found = section.read_bytes(), 0, set()
    # Containers of entries, as in NVIDIA's fatbinary_section.h and observed with nvcc 13.0: the header of an entry
    # has its kind, both sizes and, at byte 28, the architecture.
    while (at := data.find(FATBIN_MAGIC, at)) >= 0:
        header_size, size = struct.unpack_from("<6xHQ", data, at)
        at += header_size
        end = at + size
        while at < end:
            kind, header_size, size, architecture = struct.unpack_from("<H2xIQ12xI", data, at)
            found.add((kind, architecture))
            at += header_size + size
    ptx, machine_code = 1, 2
    assert found == {(machine_code, 80), (machine_code, 90), (ptx, 90)}


@pytest.mark.usefixtures("kernels")
def test_every_symbol_of_the_bindings_resolves(library: Path) -> None:
    """Catches a symbol that this torch lacks, and a weak one left null: the kernels would raise at the first call."""
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", said_by("readelf", "-d", library)))
    undefined = [line.split()[-1].split("@")[0] for line in said_by("nm", "-D", "-u", library).splitlines()]
    null = [name for name in undefined if not name.startswith(NULL_BY_DESIGN) and not hasattr(loaded, name)]
    assert "libtorch_cpu.so" in needed and "aoti_torch_get_current_cuda_stream" in undefined
    if torch_has_cuda():
        assert "libtorch_cuda.so" in needed and null == []
    else:
        assert null == ["aoti_torch_get_current_cuda_stream"]


@pytest.fixture
def loaded(kernels: None, library: Path) -> Callable[[str], Any]:
    """Loads the library into PyTorch; returns a getter of operators by name."""
    load_cuda_library(library)
    return lambda name: getattr(torch.ops.megads, name).default


def test_operators_are_registered(loaded: Callable[[str], Any], library: Path) -> None:
    """Catches an operator without a CUDA implementation, and one that the test below does not call."""
    bound = re.findall(r'library\.impl\("(\w+)"', "".join(path.read_text() for path in BINDINGS.glob("*.cpp")))
    assert sorted(bound) == sorted(calls())
    missing = [
        name
        for name in calls()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"megads::{name}", "CUDA")
        or not torch._C._dispatch_has_kernel_for_dispatch_key(f"megads::{name}", "CPU")
    ]
    assert missing == []


@pytest.mark.parametrize("name", calls())
def test_tensors_on_the_cpu_are_refused(loaded: Callable[[str], Any], name: str) -> None:
    """Catches a CUDA kernel that accepts pointers to host memory, and arguments that do not match the operator."""
    on_gpus = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="megads: the CUDA kernels take tensors on a GPU"):
        loaded(name).redispatch(on_gpus, *calls()[name])
