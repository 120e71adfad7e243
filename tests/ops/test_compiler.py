"""Requirements of torch.compile and CUDA graphs are checked before a run starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.ops.compiler import compiled_alone
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.ops.resolve import choose


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a run that fails on its ranks, minutes later, with a traceback of the compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    config = OpsConfig(Implementation.torch, Compile.blocks)
    with pytest.raises(ConfigError, match=r"ops\.compile = blocks cannot run: there is no C\+\+ compiler"):
        choose(config, cuda=False)
    assert not choose(OpsConfig(Implementation.torch), cuda=False).loaded


def test_cuda_graphs_are_refused_on_a_cpu() -> None:
    """Catches CUDA graphs that are requested on a CPU and silently ignored."""
    with pytest.raises(ConfigError, match=r"ops\.cuda_graphs = true, but the model is on a CPU"):
        choose(OpsConfig(Implementation.torch, cuda_graphs=True), cuda=False)


def test_undecided_cuda_graphs_are_measured_on_gpus_only() -> None:
    """Catches auto that is refused or taken for true on a CPU, and decided without a measurement on a GPU."""
    for given, cuda, taken in (("auto", False, False), ("auto", True, None), (True, True, True), (False, True, False)):
        assert choose(OpsConfig(Implementation.torch, cuda_graphs=given), cuda=cuda).cuda_graphs is taken
    with pytest.raises(ConfigError, match=r"ops\.cuda_graphs = yes: use true, false or auto"):
        OpsConfig(cuda_graphs="yes").check()


def test_a_killed_builds_lock_does_not_stop_a_later_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a start that waits forever for the lock file which a killed build of torch's left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "restored at the end")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    with compiled_alone():
        folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
        assert folder.is_relative_to(tmp_path)
    left = folder / "cpu_adam" / "lock"
    left.parent.mkdir()
    left.touch()
    with compiled_alone():
        assert not left.exists()
        left.touch()  # torch's own, while it compiles
    assert left.exists()


def test_locks_in_a_users_folder_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the removal of a lock that a process of somebody else holds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    held = tmp_path / "cpu_adam" / "lock"
    held.parent.mkdir()
    held.touch()
    with compiled_alone():
        assert held.exists() and not (tmp_path / "megads.lock").exists()
