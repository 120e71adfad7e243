"""Deterministic algorithms on GPUs."""

from __future__ import annotations

import os

import pytest
import torch

from megads.errors import ConfigError
from megads.runtime.deterministic import make_deterministic, sum_in_fp32
from megads.runtime.environment import fix_nccl_algorithms


@pytest.mark.parametrize("theirs", [None, ":16:8"])
def test_gpus_only(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CPU whose bits change with the setting, cuBLAS left to chance, a user's own workspace replaced, and
    memory that is filled for nothing."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
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


@pytest.mark.parametrize(
    ("theirs", "allowed"),
    [(None, True), ("^NVLS", True), ("Ring,Tree", True), ("^Tree", False), ("Ring,NVLSTree", False)],
)
def test_nccl_does_not_sum_in_the_switch(theirs: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches gradients whose bits differ from run to run on NVLink switches, and a user's algorithms replaced."""
    monkeypatch.setenv("NCCL_ALGO", theirs or "")
    if theirs is None:
        monkeypatch.delenv("NCCL_ALGO")
    if allowed:
        fix_nccl_algorithms()
        assert os.environ["NCCL_ALGO"] == (theirs or "^NVLS,NVLSTree")
    else:
        with pytest.raises(ConfigError, match=r"NCCL_ALGO = .*train\.deterministic"):
            fix_nccl_algorithms()


def test_products_are_not_summed_in_bf16() -> None:
    """Catches torch's default, by which cuBLAS may round the parts of a product that is split."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        sum_in_fp32()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
