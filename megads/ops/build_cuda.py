"""Compiles kernels/cuda and its bindings with nvcc, once, into the user's cache; beside `megads.ops.build`.

torch's own extension builder needs a torch with CUDA; nvcc alone compiles anywhere. The library holds its CUDA runtime
and can be loaded beside a torch without CUDA, for which no tensor ever reaches it. The CPU's library declares the
operators, so it is loaded first.

`python -m megads.ops.build_cuda` builds what is missing and prints registers and spills of every kernel.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megads.ops import build
from megads.ops.build import KernelsUnavailable
from megads.runtime.environment import cuda_home

LIBRARY = "libmegads_ops_cuda.so"
REPORT = "registers.txt"
"""What ptxas says of every kernel, beside the library."""
TARGETS = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
"""Machine code for A100 and H100, and PTX for what comes later."""
TIMEOUT_S = 1200.0
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xptxas=-v", "-Xcompiler=-fPIC", *TARGETS)


@dataclass(frozen=True)
class KernelReport:
    """What one kernel takes on one architecture, as ptxas says.

    Attributes:
        name: with its template arguments, as the linker knows it.
        architecture: for example sm_90.
        registers: of a thread.
        spilled_bytes: registers kept in memory, of a thread; its stack where that is more.
    """

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def find_nvcc() -> str:
    """Returns nvcc: of CUDA_HOME, else the first on the path, else that of the usual folder.

    Raises:
        KernelsUnavailable: there is none.
    """
    home = cuda_home()
    usual = "/usr/local/cuda/bin/nvcc"
    for candidate in (f"{home}/bin/nvcc",) if home else ("nvcc", usual):
        found = shutil.which(candidate)
        if found:
            return found
    if home:
        raise KernelsUnavailable(f"there is no nvcc in CUDA_HOME = {home}: correct or unset it")
    raise KernelsUnavailable(f"there is no nvcc on the path or at {usual}: install the CUDA toolkit or set CUDA_HOME")


@functools.cache
def library_path() -> Path:
    """Returns where this machine's library is, or would be.

    Raises:
        KernelsUnavailable: a compiler is missing, or torch is too old.
    """
    parts = [
        build.torch_version(),
        f"torch with CUDA: {_torch_has_cuda()}",
        " ".join((*build.FLAGS, *NVCC_FLAGS)),
        build.compiler_version(build.find_compiler()),
        build.compiler_version(find_nvcc()),
    ]
    folder = build.sources_dir()
    headers = [folder / "bindings" / "tensors.h", folder / "cpu" / "vector.h"]
    return build.cached_path(LIBRARY, parts, [*_kernels("*.*"), *_bindings("*.*"), *headers])


def build_library(say: Callable[[str], None]) -> Path:
    """Compiles the library unless it is there, and returns its path; others that want it at the same time wait.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: a compiler is missing, torch is too old, or it does not compile.
    """
    return build.build_once(library_path(), say, "the CUDA kernels, once (a minute or two)", _compile)


def _compile(library: Path) -> None:
    compiler, nvcc = build.find_compiler(), find_nvcc()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        kernels = build.compile_objects([nvcc, *NVCC_FLAGS], _kernels("*.cu"), Path(scratch) / "kernels", TIMEOUT_S)
        command = [compiler, *build.FLAGS, *build.includes()]
        bindings = build.compile_objects(command, _bindings("*.cpp"), Path(scratch) / "bindings")
        torch_libraries = ["-ltorch_cpu", *(["-ltorch_cuda"] if _torch_has_cuda() else [])]
        runtime = ["-Wl,--no-undefined", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        folders = [f"-L{build.torch_dir() / 'lib'}", f"-L{_runtime_dir(nvcc)}"]
        whole = Path(scratch) / LIBRARY
        objects = [str(made) for made in (*kernels, *bindings)]
        build.run_compiler([compiler, "-shared", *objects, *folders, *torch_libraries, *runtime, "-o", str(whole)])
        said = "".join(made.with_suffix(".txt").read_text() for made in kernels)
        (library.parent / REPORT).write_text(said)
        whole.replace(library)


def reports(said: str) -> list[KernelReport]:
    """Reads what ptxas -v says.

    Args:
        said: its whole output.
    """
    found = []
    for block in said.split("Compiling entry function ")[1:]:
        name = re.match(r"'(.+?)' for '(\w+)'", block)
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        registers = re.search(r"Used (\d+) registers", block)
        assert name and memory and registers, block
        spilled = max(int(memory[1]), int(memory[2]), int(memory[3]))
        found.append(KernelReport(name[1], name[2], int(registers[1]), spilled))
    return found


def _kernels(pattern: str) -> list[Path]:
    return sorted((build.sources_dir() / "cuda").glob(pattern))


def _bindings(pattern: str) -> list[Path]:
    return sorted((build.sources_dir() / "bindings" / "cuda").glob(pattern))


def _torch_has_cuda() -> bool:
    return (build.torch_dir() / "lib" / "libtorch_cuda.so").exists()


def _runtime_dir(nvcc: str) -> Path:
    """The folder of the static CUDA runtime.

    Raises:
        KernelsUnavailable: it is not installed.
    """
    home = Path(nvcc).resolve().parent.parent
    for root in (home, Path("/usr/local/cuda")):
        for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
            if (root / folder / "libcudart_static.a").exists():
                return root / folder
    raise KernelsUnavailable(f"there is no libcudart_static.a beside {nvcc}: install the CUDA runtime to compile with")


def main() -> int:
    """Builds and reports; a machine that cannot is no failure, as torch's operators take over."""
    try:
        library = build_library(lambda text: print(f"megads: {text}", flush=True))  # noqa: T201
    except KernelsUnavailable as error:
        print(f"megads: no CUDA kernels: {error}", file=sys.stderr)  # noqa: T201
        return 0
    for kernel in reports((library.parent / REPORT).read_text()):
        print(f"{kernel.registers:4d} {kernel.spilled_bytes:4d} {kernel.architecture} {kernel.name}")  # noqa: T201
    print(library)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
