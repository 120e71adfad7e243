"""The CPU kernels without torch, by a driver that compares them with fp64 loops, on several instruction sets.

aarch64 is emulated. On Debian its tests need the packages g++-aarch64-linux-gnu (or crossbuild-essential-arm64) and
qemu-user; without them they are skipped.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from megads.ops.build import FLAGS, find_compiler, includes, processor, run_compiler, sources_dir

DRIVER = Path(__file__).parent / "portable" / "driver.cpp"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PORTABLE_FLAGS = [*FLAGS, f"-I{sources_dir()}"]


def cross_compiler() -> str:
    """Returns the cross compiler for aarch64; skips the test if it is missing."""
    found = shutil.which(CROSS_COMPILER)
    if found is None:
        pytest.skip(f"{CROSS_COMPILER} is not installed (Debian: apt install g++-aarch64-linux-gnu)")
    return found


def run_driver(command: list[str], emulated: list[str], folder: Path) -> list[str]:
    """Compiles the driver with all kernels, and returns its output lines."""
    objects = []
    for source in [DRIVER, *sorted((sources_dir() / "cpu").glob("*.cpp"))]:
        objects.append(str(folder / f"{source.stem}.o"))
        run_compiler([*command, *PORTABLE_FLAGS, "-c", str(source), "-o", objects[-1]])
    program = str(folder / "driver")
    run_compiler([*command, "-static", *objects, "-o", program])
    done = subprocess.run([*emulated, program], capture_output=True, text=True, timeout=600.0, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.endswith("WRONG")]
    assert done.returncode == 0 and not wrong, "\n".join(wrong) or done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "needs", "lanes"), [("x86-64", "sse2", 4), ("x86-64-v3", "avx2", 8)])
def test_kernels_are_right_on_older_x86_levels(level: str, needs: str, lanes: int, tmp_path: Path) -> None:
    """Catches code that is only right with this machine's instructions, on the level of older processors."""
    if platform.machine() != "x86_64" or needs not in processor().split():
        pytest.skip(f"this processor does not run {level}")
    lines = run_driver([find_compiler(), f"-march={level}"], [], tmp_path)
    assert lines[0] == f"{lanes} fp32 lanes"


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["neoverse-n1", "neoverse-v1"])
def test_kernels_are_right_on_aarch64(cpu: str, tmp_path: Path) -> None:
    """Catches x86 instructions outside of guards, and wrong results on Graviton 2 (N1) and 3 (V1, with bf16)."""
    compiler, emulator = cross_compiler(), shutil.which(EMULATOR)
    if emulator is None:
        pytest.skip(f"{EMULATOR} is not installed (Debian: apt install qemu-user)")
    lines = run_driver([compiler, f"-mcpu={cpu}"], [emulator, "-cpu", "max"], tmp_path)
    assert lines[0] == "4 fp32 lanes"


@pytest.mark.slow
def test_bindings_compile_for_aarch64() -> None:
    """Catches bindings that name an x86 type; PyTorch's headers are the same for both."""
    compiler = cross_compiler()
    for source in sorted((sources_dir() / "bindings").glob("*.cpp")):
        run_compiler([compiler, *PORTABLE_FLAGS, *includes(), "-fsyntax-only", str(source)])
