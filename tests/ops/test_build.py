"""Compiling the kernels: once, by one process, with a clear message where it is impossible."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.ops import build as building
from megads.ops.build import KernelsUnavailable, build, library_path
from megads.ops.config import Compile, Implementation, KernelOp, Kernels, OpsConfig
from megads.ops.resolve import assumes_fused_kernels, choose, load, prepare

FUSED, AUTO = OpsConfig(Implementation.fused), OpsConfig(Implementation.auto)
TORCH = Implementation.torch


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty build cache, and no cached facts about the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget = [function.cache_clear for function in (library_path, building.cuda_library_path, building.report_path)]
    for clear in forget:
        clear()
    yield tmp_path
    for clear in forget:
        clear()


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.distributed
def test_concurrent_processes_compile_once(fresh: Path) -> None:
    """Catches two ranks that compile at once, and one that loads a half-written file."""
    command = [sys.executable, "-m", "megads.ops.build"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=300)[0].splitlines() for process in started]
    assert sum("compiling" in " ".join(lines) for lines in said) == 1
    assert {lines[-1] for lines in said} == {str(library_path())} and library_path().is_file()
    assert {path.name for path in library_path().parent.iterdir()} == {
        building.LIBRARY,
        "libmegads_ops.lock",
        "libmegads_ops.xxh3",
    }
    assert build(lambda text: pytest.fail(f"built again: {text}")) == library_path()


@pytest.mark.parametrize("damage", [b"", b"half of i", b"half of it", b"hal\x00f of it"])
def test_a_damaged_library_is_rebuilt(damage: bytes, tmp_path: Path) -> None:
    """Catches the use of a library truncated by a full disk, whose first call raises SIGBUS, or of an empty one."""
    library, said = tmp_path / "cache" / "lib.so", list[str]()

    def compile_it(path: Path) -> None:
        path.write_bytes(b"half of it and the rest")

    for _ in range(2):
        building.build_once(library, said.append, "a test", compile_it)
    assert len(said) == 1
    library.write_bytes(damage)
    assert not building.is_complete_library(library)
    building.build_once(library, said.append, "a test", compile_it)
    assert len(said) == 2 and building.is_complete_library(library)


def test_without_a_compiler_auto_falls_back_and_fused_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ops.impl=fused that silently falls back to torch, and ops.impl=auto that fails instead of doing so."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    for decide in (choose, lambda config, cuda: prepare(config, print, cuda=cuda)):
        with pytest.raises(ConfigError, match=r"ops\.impl = fused .*CXX = no-such-compiler.*ops\.impl=auto"):
            decide(FUSED, cuda=False)
        assert decide(AUTO, cuda=False) == Kernels(
            TORCH, TORCH, "there is no compiler CXX = no-such-compiler: correct or unset CXX"
        )
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(ConfigError, match=r"apt install g\+\+"):
        choose(FUSED, cuda=False)


def test_a_compiler_error_is_reported_with_its_cause(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a compiler error that is taken for success, or reported without its cause."""
    (fresh / "broken.cpp").write_text("int main( {}\n")
    monkeypatch.setattr(building, "sources_dir", lambda: fresh)
    with pytest.raises(KernelsUnavailable, match=r"do not compile \(.*broken\.cpp:1"):
        build(lambda text: None)
    assert not library_path().exists()


def test_changed_sources_are_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a changed kernel source for which the old cached library is still used."""
    monkeypatch.setattr(building, "sources_dir", lambda: fresh)
    found = set()
    for text in ("int one;", "int two;"):
        (fresh / "kernel.h").write_text(text)
        library_path.cache_clear()
        found.add(library_path())
    assert len(found) == 2


def test_gpu_operators_are_not_chosen_before_their_trial(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches kernels chosen on a GPU before they are measured there, a missing nvcc that ends a run which does not
    need it, and one that is not reported."""
    if shutil.which("nvcc"):
        untried = choose(AUTO, cuda=True)
        assert untried == Kernels(AUTO.impl, AUTO.impl) and not any(untried.fused(op) for op in KernelOp)
        assert untried.text == "ops.impl: auto (each operator is measured on the GPU)" and not assumes_fused_kernels(
            AUTO, cuda=True
        )
        mixed = replace(choose(AUTO, cuda=True, optimizer=TORCH), tuned=frozenset({KernelOp.norm, KernelOp.adamw}))
        assert [op for op in KernelOp if mixed.fused(op)] == [KernelOp.norm]
        assert mixed.text.startswith("ops.impl: auto (megads' kernels: norm; torch's: the others), optim.impl: t")
        for cached in (building.cuda_library_path, building.report_path):
            cached.cache_clear()
    monkeypatch.setenv("CUDA_HOME", str(fresh))
    without = choose(AUTO, cuda=True)
    assert (without.model, without.optimizer) == (TORCH, TORCH) and "no nvcc in CUDA_HOME" in without.reason
    with pytest.raises(ConfigError, match=r"ops\.impl = fused .*no nvcc in CUDA_HOME"):
        choose(FUSED, cuda=True)
    # A plan for GPUs elsewhere needs neither nvcc nor triton here.
    assert assumes_fused_kernels(OpsConfig(Implementation.fused, Compile.blocks), cuda=True)
    assert load(OpsConfig(Implementation.torch), print, cuda=False) == Kernels(TORCH, TORCH)


WEAK_BINDING = """
#if defined(__AVX__)
#error "compiled for this processor alone"
#endif
extern "C" __attribute__((weak)) int a_symbol_of_torch();
extern "C" bool there() { return a_symbol_of_torch != nullptr; }
"""


@pytest.mark.slow
def test_cuda_bindings_are_cached_per_processor_and_torch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bindings for one CPU type in a home folder shared with other nodes (SIGILL), torch's library dropped by a
    linker that defaults to --as-needed (Ubuntu's), and kernels that are recompiled for another torch version."""
    try:
        building.find_nvcc()
    except KernelsUnavailable as error:
        pytest.skip(f"no CUDA compiler here: {error}")
    sources = {
        "cuda/one.cu": 'extern "C" __global__ void one() {}',
        "bindings/cuda/one.cpp": WEAK_BINDING,
        "bindings/tensors.h": "",
        "cpu/vector.h": "",
    }
    for name, text in sources.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_text(text)
    monkeypatch.setattr(building, "sources_dir", lambda: fresh)
    ubuntu = fresh / "ubuntu-c++"
    ubuntu.write_text(f'#!/bin/sh\nexec {building.find_compiler()} -Wl,--as-needed "$@"\n')
    ubuntu.chmod(0o755)
    monkeypatch.setenv("CXX", str(ubuntu))
    said: list[str] = []
    library = building.build_cuda(said.append)
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "Shared library: [libtorch_cpu.so]" in needed
    (kernel,) = {kernel.name for kernel in building.reports(building.report_path().read_text())}
    assert kernel == "one"
    monkeypatch.setattr(building, "torch_version", lambda: "2.99")
    building.cuda_library_path.cache_clear()
    assert building.build_cuda(said.append) != library
    assert ["bindings for" in text for text in said] == [False, True, True]
