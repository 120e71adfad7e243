"""Compiles kernels/ once for this machine; the libraries are kept in the user's cache and shared by all runs.

A library's path contains a hash of everything that it depends on: sources, PyTorch version, compiler and CPU
instruction set. Machines that differ in these can share a home folder.

The CUDA kernels and their bindings are a separate library, compiled with nvcc. PyTorch's extension builder needs a
PyTorch with CUDA; nvcc alone compiles without one. The library links the CUDA runtime statically, so it can also be
loaded with a PyTorch without CUDA, although no tensor reaches it then. The CPU library declares the operators, so it is
loaded first. The kernels depend neither on PyTorch nor on the CPU and are compiled once for all PyTorch versions. The
bindings are compiled for each minor version, without -march=native, so that nodes with different CPUs share the library
too.

`python -m megads.ops.build` builds what is missing and prints its path; `python -m megads.ops.build cuda` builds the
CUDA kernels and prints registers and spills of each.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from megads.runtime.environment import available_cores, cpp_compiler, cpu_isa_limit, cuda_home, user_cache_dir
from megads.runtime.progress import SAID_AGAIN_S, Progress

LIBRARY = "libmegads_ops.so"
OLDEST_TORCH = (2, 10)
"""First version whose stable ABI runs parallel loops on PyTorch's thread pool."""
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
TIMEOUT_S = 300.0
CUDA_LIBRARY = "libmegads_ops_cuda.so"
REPORT = "registers.txt"
"""Output of ptxas for every kernel, next to the object files; written last, when they are complete."""
TARGETS = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
"""Machine code for A100 and H100, and PTX for later GPUs."""
_NVCC_TIMEOUT_S = 1200.0
BINDING_FLAGS = ("-std=c++20", "-O3", "-fPIC")
"""Without -march=native: bindings compute nothing, and nodes with different CPUs share the library."""
LINK_FLAGS = ("-Wl,--no-undefined", "-Wl,--no-as-needed")
"""--no-as-needed because the bindings reference libtorch_cuda by weak symbols only: the linker would drop the library,
and the symbols would be null at run time."""
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xptxas=-v", "-Xcompiler=-fPIC", "--threads=2", *TARGETS)
"""--threads=2 compiles the targets in parallel, which halves the time of the largest source."""


class KernelsUnavailable(Exception):
    """The kernels are not available on this machine; the message gives the reason and the remedy."""


def sources_dir() -> Path:
    """Returns the folder of the kernel sources: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


@functools.cache
def library_path() -> Path:
    """Returns the path of this machine's CPU library, built or not.

    Raises:
        KernelsUnavailable: there is no compiler, or PyTorch is too old.
    """
    parts = [torch_version(), " ".join(FLAGS), target(), compiler_version(find_compiler()), processor()]
    return cached_path(LIBRARY, parts, _sources(".cpp", ".h"))


def cached_path(library: str, parts: list[str], sources: list[Path]) -> Path:
    """Returns the path in the user's cache for a file whose build inputs are these strings and sources."""
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sources:
        digest.update(str(source.relative_to(sources_dir())).encode() + source.read_bytes())
    return user_cache_dir() / "ops" / digest.hexdigest()[:16] / library


def build(print_line: Callable[[str], None]) -> Path:
    """Compiles the CPU library if it is missing, and returns its path; concurrent callers wait.

    Args:
        print_line: called with progress messages.

    Raises:
        KernelsUnavailable: there is no compiler, PyTorch is too old, or the compilation fails.
    """
    return build_once(library_path(), print_line, "the kernels for this machine, once (some seconds)", _compile)


def build_once(library: Path, print_line: Callable[[str], None], what: str, compile_it: Callable[[Path], None]) -> Path:
    """Returns the path of a library, and compiles it if it is missing or damaged; concurrent callers wait.

    Args:
        library: path of the library.
        print_line: called with progress messages.
        what: description of what is compiled.
        compile_it: compiles the library and puts it there atomically.

    Raises:
        KernelsUnavailable: the compilation fails, or the library cannot be written.
    """
    if is_complete_library(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            with Progress("waiting for another process that compiles the kernels"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete_library(library):
                print_line(f"compiling {what}, into {library.parent}")
                with Progress("compiling kernels", said_after_s=SAID_AGAIN_S):
                    compile_it(library)
                checksum = library.with_suffix(".xxh3")
                partial = checksum.with_suffix(".partial")
                partial.write_text(_checksum(library))
                partial.replace(checksum)
    except OSError as error:
        raise KernelsUnavailable(f"{library.parent} cannot be written ({error}): set XDG_CACHE_HOME") from error
    return library


def is_complete_library(library: Path) -> bool:
    """Whether a library exists and matches its checksum: one truncated by a full disk would kill with SIGBUS."""
    try:
        return library.with_suffix(".xxh3").read_text() == _checksum(library)
    except OSError:
        return False


def _checksum(library: Path) -> str:
    return xxhash.xxh3_128_hexdigest(library.read_bytes())


def find_compiler() -> str:
    """Returns the C++ compiler: the user's CXX, else the first that is installed.

    Raises:
        KernelsUnavailable: there is none.
    """
    wanted = cpp_compiler()
    for candidate in (wanted,) if wanted else ("c++", "g++", "clang++"):
        found = shutil.which(candidate)
        if found:
            return found
    if wanted:
        raise KernelsUnavailable(f"there is no compiler CXX = {wanted}: correct or unset CXX")
    raise KernelsUnavailable("there is no C++ compiler: install one (Debian: apt install g++) or name it in CXX")


def _compile(library: Path) -> None:
    """Compiles the sources in parallel, links them, and moves the complete library into place."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = _compile_objects([compiler, *FLAGS, target(), *includes()], _sources(".cpp"), Path(scratch))
        whole = Path(scratch) / LIBRARY
        run_compiler(
            [compiler, "-shared", *map(str, objects), f"-L{torch_dir() / 'lib'}", "-ltorch_cpu", "-o", str(whole)]
        )
        whole.replace(library)


def includes() -> list[str]:
    """Returns the compiler options for PyTorch's headers."""
    return [f"-I{torch_dir() / 'include'}"]


def _compile_objects(
    command: list[str], sources: list[Path], scratch: Path, timeout_s: float = TIMEOUT_S
) -> list[Path]:
    """Compiles the sources in parallel; the compiler's output is written next to each object, as a .txt file.

    Args:
        command: compiler and options, without the files.
        sources: source files.
        scratch: folder for the objects, used by this call only.
        timeout_s: timeout per source.

    Raises:
        KernelsUnavailable: a source does not compile.
    """
    objects = [scratch / f"{number}_{source.stem}.o" for number, source in enumerate(sources)]
    scratch.mkdir(exist_ok=True)

    def compile_one(pair: tuple[Path, Path]) -> None:
        source, made = pair
        made.with_suffix(".txt").write_text(run_compiler([*command, "-c", str(source), "-o", str(made)], timeout_s))

    with ThreadPoolExecutor(available_cores()) as threads:
        list(threads.map(compile_one, zip(sources, objects, strict=True)))
    return objects


def run_compiler(command: list[str], timeout_s: float = TIMEOUT_S) -> str:
    """Runs a compiler command and returns its stderr.

    Raises:
        KernelsUnavailable: it failed or timed out; names the first error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"'{' '.join(command)}' took more than {timeout_s:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise KernelsUnavailable(f"the kernels do not compile ({errors[0]}); '{' '.join(command)}' shows all of it")
    return done.stderr


def _sources(*suffixes: str) -> list[Path]:
    """Source files of the CPU library."""
    found = (path for path in sources_dir().rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if not {"cuda", "data"} & set(path.relative_to(sources_dir()).parts))


def torch_version() -> str:
    """Returns PyTorch's major.minor version, without importing it: the launcher does not need PyTorch.

    Raises:
        KernelsUnavailable: PyTorch is too old.
    """
    version = importlib.metadata.version("torch")
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise KernelsUnavailable(f"torch {version} is too old for the kernels: install torch >= {oldest}")
    return f"{major}.{minor}"


def torch_dir() -> Path:
    """Returns the folder of the installed PyTorch, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def compiler_version(compiler: str) -> str:
    """Returns the output of `compiler --version`.

    Raises:
        KernelsUnavailable: the command failed.
    """
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise KernelsUnavailable(f"'{compiler} --version' failed: {done.stderr.strip()[:200]}; correct or unset CXX")
    return done.stdout


def target() -> str:
    """Returns the compiler option for the instruction set: this CPU's, or the one that MEGADS_CPU_ISA allows."""
    if platform.machine() == "aarch64":
        return "-mcpu=native"
    return "-march=native" if cpu_isa_limit() is None else "-march=x86-64-v3"


def processor() -> str:
    """Returns the CPU model and flags, which determine what the compiler targets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(known)))


@dataclass(frozen=True)
class KernelReport:
    """Resource usage of one kernel on one architecture, as reported by ptxas.

    Attributes:
        name: mangled name, with template arguments.
        architecture: GPU architecture, for example sm_90.
        registers: registers per thread.
        spilled_bytes: spilled bytes per thread, or the stack frame if that is larger.
    """

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def find_nvcc() -> str:
    """Returns the path of nvcc: in CUDA_HOME, else the first on the path, else in the default folder.

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
def cuda_library_path() -> Path:
    """Returns the path of this machine's CUDA library, built or not.

    Raises:
        KernelsUnavailable: a compiler is missing, or PyTorch is too old.
    """
    parts = [
        torch_version(),
        f"torch with CUDA: {torch_has_cuda()}",
        " ".join((*BINDING_FLAGS, *LINK_FLAGS)),
        report_path().parent.name,
    ]
    folder = sources_dir()
    headers = [folder / "bindings" / "tensors.h", folder / "bindings" / "float8.h", folder / "cpu" / "vector.h"]
    return cached_path(CUDA_LIBRARY, parts, [*_bindings("*.*"), *headers])


@functools.cache
def report_path() -> Path:
    """Returns the path of the ptxas report, written or not; the kernels' object files are in the same folder.

    Raises:
        KernelsUnavailable: a compiler is missing.
    """
    compilers = [compiler_version(compiler) for compiler in (find_compiler(), find_nvcc())]
    return cached_path(REPORT, [" ".join(NVCC_FLAGS), platform.machine(), *compilers], _kernels("*.*"))


def build_cuda(print_line: Callable[[str], None]) -> Path:
    """Compiles the CUDA library if it is missing, and returns its path; concurrent callers wait.

    Args:
        print_line: called with progress messages.

    Raises:
        KernelsUnavailable: a compiler is missing, PyTorch is too old, or the compilation fails.
    """
    if is_complete_library(cuda_library_path()):
        return cuda_library_path()
    build_once(report_path(), print_line, "the CUDA kernels, once (a minute or two)", _compile_kernels)
    return build_once(cuda_library_path(), print_line, "the CUDA kernels' bindings for this torch", _compile_bindings)


def _compile_kernels(report: Path) -> None:
    with tempfile.TemporaryDirectory(dir=report.parent) as scratch:
        compiled = _compile_objects([find_nvcc(), *NVCC_FLAGS], _kernels("*.cu"), Path(scratch), _NVCC_TIMEOUT_S)
        whole = Path(scratch) / REPORT
        whole.write_text("".join(made.with_suffix(".txt").read_text() for made in compiled))
        for made in compiled:
            made.replace(report.parent / made.name)
        whole.replace(report)


def _compile_bindings(library: Path) -> None:
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        command = [compiler, *BINDING_FLAGS, *includes()]
        bindings = _compile_objects(command, _bindings("*.cpp"), Path(scratch) / "bindings")
        objects = [str(made) for made in (*sorted(report_path().parent.glob("*.o")), *bindings)]
        torch_libraries = ["-ltorch_cpu", *(["-ltorch_cuda"] if torch_has_cuda() else [])]
        runtime = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        folders = [f"-L{torch_dir() / 'lib'}", f"-L{_runtime_dir(find_nvcc())}"]
        whole = Path(scratch) / CUDA_LIBRARY
        linked = [*LINK_FLAGS, *folders, *torch_libraries, *runtime]
        run_compiler([compiler, "-shared", *objects, *linked, "-o", str(whole)])
        whole.replace(library)


def reports(said: str) -> list[KernelReport]:
    """Parses the output of ptxas -v.

    Args:
        said: the complete output.
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
    return sorted((sources_dir() / "cuda").glob(pattern))


def _bindings(pattern: str) -> list[Path]:
    return sorted((sources_dir() / "bindings" / "cuda").glob(pattern))


def torch_has_cuda() -> bool:
    """Returns whether the installed PyTorch is a CUDA build; does not require a GPU."""
    return (torch_dir() / "lib" / "libtorch_cuda.so").exists()


def _runtime_dir(nvcc: str) -> Path:
    """Returns the folder of the static CUDA runtime.

    Raises:
        KernelsUnavailable: the runtime is not installed.
    """
    home = Path(nvcc).resolve().parent.parent
    for root in (home, Path("/usr/local/cuda")):
        for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
            if (root / folder / "libcudart_static.a").exists():
                return root / folder
    raise KernelsUnavailable(f"there is no libcudart_static.a beside {nvcc}: install the CUDA runtime to compile with")


def main(arguments: Sequence[str]) -> int:
    """Command line: builds a library. Unavailable kernels are not an error, since PyTorch's operators are used then.

    Args:
        arguments: "cuda" builds the CUDA kernels and prints registers and spills of each; none builds the CPU library.
    """

    def print_line(text: str) -> None:
        print(f"megads: {text}", flush=True)  # noqa: T201

    try:
        library = build_cuda(print_line) if "cuda" in arguments else build(print_line)
    except KernelsUnavailable as error:
        print(f"megads: no kernels, torch's operators are used instead: {error}", file=sys.stderr)  # noqa: T201
        return 0
    if "cuda" in arguments:
        for kernel in reports(report_path().read_text()):
            print(f"{kernel.registers:4d} {kernel.spilled_bytes:4d} {kernel.architecture} {kernel.name}")  # noqa: T201
    print(library)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
