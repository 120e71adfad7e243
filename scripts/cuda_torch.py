#!/usr/bin/env python3
"""Runs a Python command of this environment under CUDA builds of torch, on a machine with or without a GPU.

python -m scripts.cuda_torch [--torch 2.11.0 ...] [--nvcc] -- -m pytest tests/ops/cuda/test_compile.py

Each torch is installed outside this environment, into a folder of the user's cache that comes first on PYTHONPATH.
NVIDIA's libraries, in the versions required by the newest torch, are installed once and shared by all. triton and
cuda-bindings are omitted, because importing torch needs neither. A folder is used once `import torch` has succeeded
with it; after that nothing is downloaded. With --nvcc CUDA's compiler is installed there too, if there is none.

Exit status: the command's first failure; 69 if something cannot be installed (no network, no such wheel), or if there
is no C++ compiler with --nvcc.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megads.ops.build import KernelsUnavailable, find_compiler, find_nvcc
from megads.runtime.environment import user_cache_dir

TORCHES = ("2.11.0", "2.13.0")
"""The version on the GPU machine, and the one that constraints.txt pins."""
NVCC = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]
"""Wheels of CUDA's compiler, the headers it needs, and the static runtime."""
UNAVAILABLE = 69
"""EX_UNAVAILABLE of sysexits.h."""
PYTHON = f"{platform.python_implementation()}-{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
IMPORT = "import torch; assert torch.version.cuda, f'torch {torch.__version__} is no CUDA build'"


class Unavailable(Exception):
    """No usable torch can be installed on this machine; the message gives the reason."""


def root() -> Path:
    """Folder of all installations of this script, for this Python version."""
    return user_cache_dir() / "cuda_torch" / PYTHON


def install(versions: list[str]) -> dict[str, Path]:
    """Installs what is missing, and returns each torch's folder for PYTHONPATH; concurrent callers wait.

    Raises:
        Unavailable: pip fails, or torch cannot be imported.
    """
    root().mkdir(parents=True, exist_ok=True)
    with (root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return install_alone(versions)


def install_alone(versions: list[str]) -> dict[str, Path]:
    """`install` under the lock."""
    folders = {version: root() / f"torch-{version}" for version in versions}
    if all((folder / "imported").exists() for folder in folders.values()):
        return folders
    started = time.monotonic()
    for version, folder in folders.items():
        if not (folder / "torch").is_dir():
            # "===" compares text: a CPU build in a wheel folder has a local version (2.13.0+cpu), and does not match.
            pip_install(folder, f"torch==={version}")
    newest = folders[max(versions, key=lambda version: tuple(map(int, version.split("."))))]
    libraries = root() / f"libraries-of-{newest.name}"
    if not libraries.is_dir():
        pip_install(libraries, *library_requirements(newest), dependencies=True)
    for folder in folders.values():
        link = folder / "nvidia"
        link.unlink(missing_ok=True)
        link.symlink_to(libraries / "nvidia")
        tried = run(folder, ["-c", IMPORT], capture=True)
        if tried.returncode:
            raise Unavailable(f"{folder.name} cannot be imported with {libraries}: {tried.stderr.strip()[-500:]}")
        (folder / "imported").touch()
    size_gib = sum(path.stat().st_size for path in root().rglob("*") if not path.is_symlink()) / 2**30
    print(f"cuda_torch: {size_gib:.1f} GiB in {root()}, {time.monotonic() - started:.0f} s")
    return folders


def pip_install(folder: Path, *requirements: str, dependencies: bool = False) -> None:
    """Installs into a folder, which exists only once the installation is complete.

    Raises:
        Unavailable: pip says why.
    """
    print(f"cuda_torch: installing {' '.join(requirements)}", flush=True)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--quiet", "--only-binary=:all:", "--no-compile", *([] if dependencies else ["--no-deps"])]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(partial), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = " ".join(errors[:2]) or done.stderr.strip()[-500:]
        raise Unavailable(f"'pip install {' '.join(requirements)}' failed: {reason}")
    partial.rename(folder)


def library_requirements(folder: Path) -> list[str]:
    """NVIDIA's packages required by the torch in a folder."""
    (torch,) = (found for found in importlib.metadata.distributions(path=[str(folder)]) if found.name == "torch")
    wanted = [text.split(";")[0].strip() for text in torch.requires or ()]
    return [text for text in wanted if text.startswith(("nvidia-", "cuda-toolkit"))]


def install_nvcc() -> None:
    """Ensures that there are an nvcc, which `megads.ops.build` finds by CUDA_HOME, and a C++ compiler for it.

    Raises:
        Unavailable: there is none and none can be installed.
    """
    try:
        find_compiler()
    except KernelsUnavailable as error:
        raise Unavailable(str(error)) from None
    try:
        find_nvcc()
    except KernelsUnavailable as error:
        print(f"cuda_torch: {error}; taking that of the package index")
        folder = root() / "nvcc"
        if not folder.is_dir():
            pip_install(folder, *NVCC)
        os.environ["CUDA_HOME"] = str(folder / "nvidia" / "cu13")


def run(folder: Path, arguments: list[str], *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs this Python with the torch of a folder."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, check=False, text=True, capture_output=capture)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"default: {' and '.join(TORCHES)}")
    parser.add_argument("--nvcc", action="store_true", help="see above")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for Python; without one torch is installed only")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if options.nvcc:
            root().mkdir(parents=True, exist_ok=True)
            install_nvcc()
        folders = install(options.torch or list(TORCHES))
    except Unavailable as error:
        print(f"cuda_torch: NOT RUN: {error}", file=sys.stderr)
        return UNAVAILABLE
    for version, folder in folders.items():
        if command:
            print(f"=== torch {version} (CUDA build)", flush=True)
            code = run(folder, command).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
