"""Requirements of torch.compile and CUDA graphs are checked before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.errors import ConfigError
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


def test_graphs_want_a_gpu() -> None:
    """Catches CUDA graphs that are requested on a CPU and silently ignored."""
    with pytest.raises(ConfigError, match=r"ops\.cuda_graphs = true, but the model is on a CPU"):
        choose(OpsConfig(Implementation.torch, cuda_graphs=True), cuda=False)
