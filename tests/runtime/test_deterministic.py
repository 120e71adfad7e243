"""Deterministic algorithms on GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from megads.runtime.deterministic import make_deterministic


@pytest.mark.parametrize("theirs", [None, ":16:8"])
def test_gpus_only(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CPU whose bits change with the setting, cuBLAS left to chance, a user's own workspace replaced, and
    memory that is filled for nothing."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", theirs or "")
    if theirs is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        make_deterministic(torch.device("cpu"))
        assert not torch.are_deterministic_algorithms_enabled()
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == theirs
        make_deterministic(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (theirs or ":4096:8")
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
