"""Compiles kernels/cuda and its bindings with nvcc, once, into the user's cache; beside `megads.ops.build`.

torch's own extension builder needs a torch with CUDA; nvcc alone compiles anywhere. The library holds its CUDA runtime
and can be loaded beside a torch without CUDA, for which no tensor ever reaches it. The CPU's library declares the
operators, so it is loaded first.

The kernels know neither torch nor the processor: they are compiled once for all versions of torch. The bindings are
compiled for each minor version, without -march=native, so that nodes with different processors share the library too.

`python -m megads.ops.build_cuda` builds what is missing and prints registers and spills of every kernel.
"""

from __future__ import annotations

import functools
import platform
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
"""What ptxas says of every kernel, beside the kernels' objects; it is written last, when they are whole."""
TARGETS = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
"""Machine code for A100 and H100, and PTX for what comes later."""
TIMEOUT_S = 1200.0
BINDING_FLAGS = ("-std=c++20", "-O3", "-fPIC")
"""Without -march=native: bindings compute nothing, and the library is shared by nodes with other processors."""
LINK_FLAGS = ("-Wl,--no-undefined", "-Wl,--no-as-needed")
"""The second: what the bindings take of libtorch_cuda is weak, so a linker would leave that library out, and the loader
the symbol null."""
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
        f"torch with CUDA: {torch_has_cuda()}",
        " ".join((*BINDING_FLAGS, *LINK_FLAGS)),
        report_path().parent.name,
    ]
    folder = build.sources_dir()
    headers = [folder / "bindings" / "tensors.h", folder / "cpu" / "vector.h"]
    return build.cached_path(LIBRARY, parts, [*_bindings("*.*"), *headers])


@functools.cache
def report_path() -> Path:
    """Returns where ptxas' report of the kernels is, or would be, beside their objects.

    Raises:
        KernelsUnavailable: a compiler is missing.
    """
    compilers = [build.compiler_version(compiler) for compiler in (build.find_compiler(), find_nvcc())]
    return build.cached_path(REPORT, [" ".join(NVCC_FLAGS), platform.machine(), *compilers], _kernels("*.*"))


def build_library(say: Callable[[str], None]) -> Path:
    """Compiles the library unless it is there, and returns its path; others that want it at the same time wait.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: a compiler is missing, torch is too old, or it does not compile.
    """
    if build.is_whole(library_path()):
        return library_path()
    build.build_once(report_path(), say, "the CUDA kernels, once (a minute or two)", _compile_kernels)
    return build.build_once(library_path(), say, "the CUDA kernels' bindings for this torch", _compile_bindings)


def _compile_kernels(report: Path) -> None:
    with tempfile.TemporaryDirectory(dir=report.parent) as scratch:
        compiled = build.compile_objects([find_nvcc(), *NVCC_FLAGS], _kernels("*.cu"), Path(scratch), TIMEOUT_S)
        whole = Path(scratch) / REPORT
        whole.write_text("".join(made.with_suffix(".txt").read_text() for made in compiled))
        for made in compiled:
            made.replace(report.parent / made.name)
        whole.replace(report)


def _compile_bindings(library: Path) -> None:
    compiler = build.find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        command = [compiler, *BINDING_FLAGS, *build.includes()]
        bindings = build.compile_objects(command, _bindings("*.cpp"), Path(scratch) / "bindings")
        objects = [str(made) for made in (*sorted(report_path().parent.glob("*.o")), *bindings)]
        torch_libraries = ["-ltorch_cpu", *(["-ltorch_cuda"] if torch_has_cuda() else [])]
        runtime = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        folders = [f"-L{build.torch_dir() / 'lib'}", f"-L{_runtime_dir(find_nvcc())}"]
        whole = Path(scratch) / LIBRARY
        linked = [*LINK_FLAGS, *folders, *torch_libraries, *runtime]
        build.run_compiler([compiler, "-shared", *objects, *linked, "-o", str(whole)])
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


def torch_has_cuda() -> bool:
    """Returns whether the installed torch is a CUDA build; a GPU is not asked for."""
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
    for kernel in reports(report_path().read_text()):
        print(f"{kernel.registers:4d} {kernel.spilled_bytes:4d} {kernel.architecture} {kernel.name}")  # noqa: T201
    print(library)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
