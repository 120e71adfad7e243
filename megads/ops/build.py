"""Compiles kernels/ for this machine, once: the library is kept in the user's cache and shared by all runs.

The file is named after all that it depends on: the sources, torch, the compiler and the processor's instructions. So
several machines may share a home folder.

`python -m megads.ops.build` builds what is missing and says where it is.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megads.runtime.environment import available_cores, cpp_compiler, user_cache_dir

LIBRARY = "libmegads_ops.so"
OLDEST_TORCH = (2, 10)
"""The first whose stable interface runs loops on torch's own threads."""
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC")
TIMEOUT_S = 300.0


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
    parts = [_torch_version(), " ".join(FLAGS), _compiler_version(find_compiler()), _processor()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in _sources(".cpp", ".h"):
        digest.update(str(source.relative_to(sources_dir())).encode() + source.read_bytes())
    return user_cache_dir() / "ops" / digest.hexdigest()[:16] / LIBRARY


def build(say: Callable[[str], None]) -> Path:
    """Compiles the library unless it is there, and returns its path; others that want it at the same time wait.

    Args:
        say: told what is being waited for.

    Raises:
        KernelsUnavailable: there is no compiler, torch is too old, or it does not compile.
    """
    library = library_path()
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                say(f"compiling the kernels for this machine, once (some seconds), into {library.parent}")
                _compile(library)
    except OSError as error:
        raise KernelsUnavailable(f"{library.parent} cannot be written ({error}): set XDG_CACHE_HOME") from error
    return library


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
    torch_dir, compiler = _torch_dir(), find_compiler()
    include = [f"-I{torch_dir / 'include'}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = {Path(scratch) / f"{number}.o": source for number, source in enumerate(_sources(".cpp"))}
        with ThreadPoolExecutor(available_cores()) as threads:
            for _ in threads.map(
                lambda pair: run_compiler([compiler, *FLAGS, *include, "-c", str(pair[1]), "-o", str(pair[0])]),
                objects.items(),
            ):
                pass
        whole = Path(scratch) / LIBRARY
        run_compiler(
            [compiler, "-shared", *map(str, objects), f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-o", str(whole)]
        )
        whole.replace(library)


def run_compiler(command: list[str]) -> None:
    """Runs one command of a compiler.

    Raises:
        KernelsUnavailable: it failed, with its first error, or took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"'{' '.join(command)}' took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise KernelsUnavailable(f"the kernels do not compile ({errors[0]}); '{' '.join(command)}' shows all of it")


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in sources_dir().rglob("*") if path.suffix in suffixes)


def _torch_version() -> str:
    """The minor version; torch itself is not imported, as the launcher needs none of it."""
    version = importlib.metadata.version("torch")
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise KernelsUnavailable(f"torch {version} is too old for the kernels: install torch >= {oldest}")
    return f"{major}.{minor}"


def _torch_dir() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _compiler_version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise KernelsUnavailable(f"'{compiler} --version' failed: {done.stderr.strip()[:200]}; correct or unset CXX")
    return done.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(known)))


def main() -> int:
    """Builds; a machine that cannot is no failure, as torch's operators take over."""
    try:
        print(build(lambda text: print(f"megads: {text}", flush=True)))  # noqa: T201
    except KernelsUnavailable as error:
        print(f"megads: no kernels, torch's operators are used instead: {error}", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
