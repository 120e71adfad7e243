"""Loads the compiled operators into torch, with what torch.compile and autograd must know of them."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from megads.ops import (
    adamw,
    attention,
    cross_entropy,
    dropout,
    gelu,
    linear,
    norm,
    rotary,
    softmax,
    square_sums,
    swiglu,
)
from megads.ops.build import LIBRARY, KernelsUnavailable
from megads.ops.build_cuda import LIBRARY as CUDA_LIBRARY

OPERATORS = (
    *(adamw, attention, cross_entropy, dropout, gelu),
    *(linear, norm, rotary, softmax, square_sums, swiglu),
)


@functools.cache
def load_library(path: Path) -> None:
    """Registers the operators of namespace megads; once in a process.

    Args:
        path: what `megads.ops.build.build` returned.

    Raises:
        KernelsUnavailable: the file does not fit this torch.
    """
    _load(path)
    for operator in OPERATORS:
        operator.register()


@functools.cache
def load_cuda_library(path: Path) -> None:
    """Registers the operators' implementations for GPUs, beside what `load_library` registered; once in a process.

    Args:
        path: what `megads.ops.build_cuda.build_library` returned.

    Raises:
        KernelsUnavailable: the file does not fit this torch.
    """
    _load(path)


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded ({error}): remove it, and it is built anew") from error


def loaded_kernels() -> str:
    """Returns which builds of the kernels this process has loaded, the CPU's first, or "torch" for none."""
    paths = [Path(path) for path in torch.ops.loaded_libraries]
    builds = [path.parent.name for name in (LIBRARY, CUDA_LIBRARY) for path in paths if path.name == name]
    return "+".join(builds) or "torch"
