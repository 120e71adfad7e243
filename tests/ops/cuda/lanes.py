"""Runs the CUDA kernels on the CPU, lane by lane: a C++ compiler compiles their source against tests/ops/cuda/shim.

Errors that the shim detects (accesses outside a buffer, divergence at a barrier, ...) are raised as a KernelFault.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megads.ops.build import find_compiler, run_compiler, sources_dir
from megads.runtime.environment import user_cache_dir

SHIM = Path(__file__).parent / "shim"
# Uninitialized variables hold a pattern; undefined behaviour (misaligned accesses, bounds, overflows) traps.
FLAGS = (
    "-std=c++20", "-O1", "-fPIC", "-fno-strict-aliasing", "-ftrivial-auto-var-init=pattern",
    "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
MAP_NORESERVE = 0x4000
"""From Linux's mman.h; the mmap module defines it since Python 3.13."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The launchers' numbers of element types."""


class KernelFault(Exception):
    """A kernel did something that a GPU would crash on, or would not notice."""


@functools.cache
def translated(kernel: str, change: Callable[[str], str] | None = None) -> ctypes.CDLL:
    """The launchers of kernels/cuda/<kernel>.cu for the CPU, compiled once into the user's cache.

    Args:
        kernel: name of the source without its suffix.
        change: mutates the text of every source file.
    """
    sources = [*sorted((sources_dir() / "cuda").glob("*.*h")), sources_dir() / "cuda" / f"{kernel}.cu"]
    texts = {path.name: change(path.read_text()) if change else path.read_text() for path in sources}
    shim = {path.name: path.read_text() for path in sorted(SHIM.iterdir())}
    digest = hashlib.sha256(repr((find_compiler(), FLAGS, texts, shim)).encode()).hexdigest()[:16]
    library = user_cache_dir() / "lanes" / f"{kernel}-{digest}.so"
    if not library.exists():
        scratch = library.parent / f"{digest}-{os.getpid()}"
        scratch.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (scratch / name).write_text(text)
        made = scratch / library.name
        files = ["-x", "c++", str(scratch / f"{kernel}.cu"), "-x", "none", str(_fibers())]
        run_compiler([find_compiler(), *FLAGS, "-shared", f"-I{SHIM}", f"-I{scratch}", *files, "-o", str(made)])
        made.replace(library)
        for path in scratch.iterdir():
            path.unlink()
        scratch.rmdir()
    loaded = ctypes.CDLL(str(library))
    loaded.shim_allocate.restype = ctypes.c_void_p
    loaded.shim_message.restype = ctypes.c_char_p
    return loaded


@functools.cache
def _fibers() -> Path:
    """Path of the compiled shim, which all kernels are linked with."""
    text = "".join(path.read_text() for path in sorted(SHIM.iterdir()))
    digest = hashlib.sha256(repr((find_compiler(), FLAGS, text)).encode()).hexdigest()[:16]
    compiled = user_cache_dir() / "lanes" / f"fibers-{digest}.o"
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        made = compiled.with_suffix(f".{os.getpid()}.o")
        run_compiler([find_compiler(), *FLAGS, f"-I{SHIM}", "-c", str(SHIM / "fibers.cpp"), "-o", str(made)])
        made.replace(compiled)
    return compiled


class Lanes:
    """Memory of a simulated device, and calls of launchers on it; used in a `with` block.

    Args:
        kernel: source file in kernels/cuda.
        order: order of threads and blocks: 0 forwards, 1 backwards, else the seed of a shuffle.
        residue: buffer i starts i * residue elements after a multiple of 16 bytes (modulo 16 bytes).
        at_end: buffers end at a guard page; otherwise they start at one.
        change: see `translated`.
        last_blocks: number of blocks that run, the last ones of each grid; 0: all.
    """

    def __init__(
        self,
        kernel: str,
        order: int = 0,
        residue: int = 0,
        at_end: bool = True,
        change: Callable[[str], str] | None = None,
        last_blocks: int = 0,
    ) -> None:
        self._library = translated(kernel, change)
        self._order, self._residue, self._at_end, self._last_blocks = order, residue, at_end, last_blocks
        self._buffers: list[int] = []
        self._sparse: dict[int, mmap.mmap] = {}

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            return  # pytest prints tensors in these buffers
        intact = [self._library.shim_free(ctypes.c_void_p(buffer)) for buffer in self._buffers]
        if not all(intact):
            raise KernelFault(f"memory beside buffer {intact.index(0)} of {len(intact)} was written")

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A buffer filled with NaN (or -1), aligned by `residue`."""
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        residue = len(self._buffers) * self._residue * dtype.itemsize % 16
        address = self._library.shim_allocate(ctypes.c_int64(count), ctypes.c_int64(residue), int(self._at_end))
        self._buffers.append(address)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype).view(shape)

    def sparse(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zero-filled buffer of any size; pages are allocated on first access, and nothing guards it."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
        found = torch.frombuffer(memory, dtype=dtype).view(shape)
        self._sparse[found.data_ptr()] = memory
        return found

    def place(self, x: Tensor) -> Tensor:
        """A copy in a buffer that a kernel may write."""
        placed = self.empty(x.shape, x.dtype)
        placed.copy_(x)
        return placed

    def call(self, launcher: str, *arguments: Any) -> None:
        """Calls a launcher of launchers.h on the default stream.

        Args:
            launcher: its name without megads_cuda_.
            arguments: tensors of this device are passed unchanged, others as copies that must not be written.

        Raises:
            KernelFault: the shim detected an error.
        """
        self._library.shim_set_order(ctypes.c_int64(self._order))
        self._library.shim_set_last_blocks(ctypes.c_int64(self._last_blocks))
        error = getattr(self._library, f"megads_cuda_{launcher}")(*map(self._passed, arguments), ctypes.c_int64(0))
        if error:
            raise KernelFault(f"{launcher}: error {error}: {self._message()}")

    def count(self, function: str, *arguments: int) -> int:
        """Calls a function of launchers.h that takes and returns integers."""
        found = getattr(self._library, f"megads_cuda_{function}")
        found.restype = ctypes.c_int64
        return int(found(*map(ctypes.c_int64, arguments)))

    def _passed(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            known = argument.data_ptr() in self._buffers or argument.data_ptr() in self._sparse
            if not known and argument.numel():
                argument = self.place(argument)
                self._library.shim_make_input(ctypes.c_void_p(argument.data_ptr()))
            return ctypes.c_void_p(argument.data_ptr())
        if isinstance(argument, torch.dtype):
            return ctypes.c_int64(DTYPES[argument])
        if isinstance(argument, float):
            return ctypes.c_double(argument)
        return ctypes.c_void_p(None) if argument is None else ctypes.c_int64(argument)

    def _message(self) -> str:
        message: bytes = self._library.shim_message()
        return message.decode()
