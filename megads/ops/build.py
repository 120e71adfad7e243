"""Compiles kernels/ for this machine, once: libraries are kept in the user's cache and shared by all runs.

A file is named after all that it depends on: the sources, torch, the compiler and the processor's instructions. So
several machines may share a home folder.

The CUDA kernels and their bindings are a library of their own, compiled with nvcc. torch's own extension builder needs
a torch with CUDA; nvcc alone compiles anywhere. The library holds its CUDA runtime and can be loaded beside a torch
without CUDA, for which no tensor ever reaches it. The CPU's library declares the operators, so it is loaded first. The
kernels know neither torch nor the processor: they are compiled once for all versions of torch. The bindings are
compiled for each minor version, without -march=native, so that nodes with different processors share the library too.

`python -m megads.ops.build` builds what is missing and says where it is; `python -m megads.ops.build cuda` builds the
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

from megads.runtime.environment import available_cores, cpp_compiler, cuda_home, user_cache_dir
from megads.runtime.progress import SAID_AGAIN_S, Progress

LIBRARY = "libmegads_ops.so"
OLDEST_TORCH = (2, 10)
"""The first whose stable interface runs loops on torch's own threads."""
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
TIMEOUT_S = 300.0
CUDA_LIBRARY = "libmegads_ops_cuda.so"
REPORT = "registers.txt"
"""What ptxas says of every kernel, beside the kernels' objects; it is written last, when they are whole."""
TARGETS = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
"""Machine code for A100 and H100, and PTX for what comes later."""
_NVCC_TIMEOUT_S = 1200.0
BINDING_FLAGS = ("-std=c++20", "-O3", "-fPIC")
"""Without -march=native: bindings compute nothing, and the library is shared by nodes with other processors."""
LINK_FLAGS = ("-Wl,--no-undefined", "-Wl,--no-as-needed")
"""The second: what the bindings take of libtorch_cuda is weak, so a linker would leave that library out, and the loader
the symbol null."""
NVCC_FLAGS = ("-std=c++20", "-O3", "-Xptxas=-v", "-Xcompiler=-fPIC", "--threads=2", *TARGETS)
"""Each target is compiled by a thread of its own: the largest source takes half as long."""


class KernelsUnavailable(Exception):
    """The kernels cannot be had on this machine; the message says why and what to do."""


def sources_dir() -> Path:
    """Returns the folder of the kernels' sources: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


@functools.cache
def library_path() -> Path:
    """Returns where this machine's library is, or would be.

    Raises:
        KernelsUnavailable: there is no compiler, or torch is too old.
    """
    parts = [torch_version(), " ".join(FLAGS), compiler_version(find_compiler()), processor()]
    return cached_path(LIBRARY, parts, _sources(".cpp", ".h"))


def cached_path(library: str, parts: list[str], sources: list[Path]) -> Path:
    """Returns the place in the user's cache of a library that depends on these texts and sources."""
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sources:
        digest.update(str(source.relative_to(sources_dir())).encode() + source.read_bytes())
    return user_cache_dir() / "ops" / digest.hexdigest()[:16] / library


def build(say: Callable[[str], None]) -> Path:
    """Compiles the library unless it is there, and returns its path; others that want it at the same time wait.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: there is no compiler, torch is too old, or it does not compile.
    """
    return build_once(library_path(), say, "the kernels for this machine, once (some seconds)", _compile)


def build_once(library: Path, say: Callable[[str], None], what: str, compile_it: Callable[[Path], None]) -> Path:
    """Returns the library, compiled unless it is there and whole; others that want it at the same time wait.

    Args:
        library: where it is to be.
        say: told what is being waited for.
        what: is compiled, in words.
        compile_it: puts it there, whole.

    Raises:
        KernelsUnavailable: it does not compile, or cannot be written.
    """
    if is_whole(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            with Progress("waiting for another process that compiles the kernels"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole(library):
                say(f"compiling {what}, into {library.parent}")
                with Progress("compiling kernels", said_after_s=SAID_AGAIN_S):
                    compile_it(library)
                checksum = library.with_suffix(".xxh3")
                partial = checksum.with_suffix(".partial")
                partial.write_text(_checksum(library))
                partial.replace(checksum)
    except OSError as error:
        raise KernelsUnavailable(f"{library.parent} cannot be written ({error}): set XDG_CACHE_HOME") from error
    return library


def is_whole(library: Path) -> bool:
    """Whether a library is there as it was built: one cut short by a full disk would end a process by SIGBUS."""
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
    """Compiles the sources beside each other, links them, and puts the library in place when it is whole."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = _compile_objects([compiler, *FLAGS, *includes()], _sources(".cpp"), Path(scratch))
        whole = Path(scratch) / LIBRARY
        run_compiler(
            [compiler, "-shared", *map(str, objects), f"-L{torch_dir() / 'lib'}", "-ltorch_cpu", "-o", str(whole)]
        )
        whole.replace(library)


def includes() -> list[str]:
    """Returns where torch's headers are, as the compiler wants it."""
    return [f"-I{torch_dir() / 'include'}"]


def _compile_objects(
    command: list[str], sources: list[Path], scratch: Path, timeout_s: float = TIMEOUT_S
) -> list[Path]:
    """Compiles the sources beside each other; what a compiler says is kept beside each object, as a .txt.

    Args:
        command: of the compiler, without the files.
        sources: to compile.
        scratch: folder of the objects, of this call alone.
        timeout_s: for each.

    Raises:
        KernelsUnavailable: one does not compile.
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
    """Runs one command of a compiler, and returns what it said.

    Raises:
        KernelsUnavailable: it failed, with its first error, or took too long.
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
    """Those of the CPU's library."""
    found = (path for path in sources_dir().rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if not {"cuda", "data"} & set(path.relative_to(sources_dir()).parts))


def torch_version() -> str:
    """Returns the minor version; torch itself is not imported, as the launcher needs none of it.

    Raises:
        KernelsUnavailable: it is too old.
    """
    version = importlib.metadata.version("torch")
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise KernelsUnavailable(f"torch {version} is too old for the kernels: install torch >= {oldest}")
    return f"{major}.{minor}"


def torch_dir() -> Path:
    """Returns the folder of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def compiler_version(compiler: str) -> str:
    """Returns what a compiler says of itself.

    Raises:
        KernelsUnavailable: it does not run.
    """
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise KernelsUnavailable(f"'{compiler} --version' failed: {done.stderr.strip()[:200]}; correct or unset CXX")
    return done.stdout


def processor() -> str:
    """Returns what -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(known)))


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
def cuda_library_path() -> Path:
    """Returns where this machine's library is, or would be.

    Raises:
        KernelsUnavailable: a compiler is missing, or torch is too old.
    """
    parts = [
        torch_version(),
        f"torch with CUDA: {torch_has_cuda()}",
        " ".join((*BINDING_FLAGS, *LINK_FLAGS)),
        report_path().parent.name,
    ]
    folder = sources_dir()
    headers = [folder / "bindings" / "tensors.h", folder / "cpu" / "vector.h"]
    return cached_path(CUDA_LIBRARY, parts, [*_bindings("*.*"), *headers])


@functools.cache
def report_path() -> Path:
    """Returns where ptxas' report of the kernels is, or would be, beside their objects.

    Raises:
        KernelsUnavailable: a compiler is missing.
    """
    compilers = [compiler_version(compiler) for compiler in (find_compiler(), find_nvcc())]
    return cached_path(REPORT, [" ".join(NVCC_FLAGS), platform.machine(), *compilers], _kernels("*.*"))


def build_cuda(say: Callable[[str], None]) -> Path:
    """Compiles the library unless it is there, and returns its path; others that want it at the same time wait.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: a compiler is missing, torch is too old, or it does not compile.
    """
    if is_whole(cuda_library_path()):
        return cuda_library_path()
    build_once(report_path(), say, "the CUDA kernels, once (a minute or two)", _compile_kernels)
    return build_once(cuda_library_path(), say, "the CUDA kernels' bindings for this torch", _compile_bindings)


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
    return sorted((sources_dir() / "cuda").glob(pattern))


def _bindings(pattern: str) -> list[Path]:
    return sorted((sources_dir() / "bindings" / "cuda").glob(pattern))


def torch_has_cuda() -> bool:
    """Returns whether the installed torch is a CUDA build; a GPU is not asked for."""
    return (torch_dir() / "lib" / "libtorch_cuda.so").exists()


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


def main(arguments: Sequence[str]) -> int:
    """Builds; a machine that cannot is no failure, as torch's operators take over.

    Args:
        arguments: "cuda" builds the CUDA kernels, and prints registers and spills of each; nothing, the CPU's.
    """

    def say(text: str) -> None:
        print(f"megads: {text}", flush=True)  # noqa: T201

    try:
        library = build_cuda(say) if "cuda" in arguments else build(say)
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
