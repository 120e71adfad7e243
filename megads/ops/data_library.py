"""The compiled loops of the data room: kernels/data/*.cpp, which need neither torch nor its headers.

Their flags are their own: they must round as Megatron does, while the other kernels may contract sums and products.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

LIBRARY = "libmegads_data.so"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


@functools.cache
def data_function(name: str, say: Callable[[str], None]) -> Callable[..., None]:
    """Returns a compiled function, which is built where it is missing.

    Args:
        name: of the function.
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: there is no compiler, or the library does not compile, load or link.
    """
    library = build_once(_library_path(), say, "the loops over index maps, once (about a second)", _compile)
    try:
        function = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{library} cannot be loaded ({error}): remove it, and it is built anew") from error
    function.restype = None
    return function  # type: ignore[no-any-return]


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Returns where a contiguous array is."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _sources() -> list[Path]:
    return sorted((sources_dir() / "data").glob("*.cpp"))


def _library_path() -> Path:
    return cached_path(LIBRARY, [" ".join(FLAGS), compiler_version(find_compiler()), processor()], _sources())


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        whole = Path(scratch) / LIBRARY
        run_compiler([find_compiler(), *FLAGS, *map(str, _sources()), "-o", str(whole)])
        whole.replace(library)
