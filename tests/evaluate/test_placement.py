"""Where a model goes."""

from __future__ import annotations

import pytest
import torch

from megads.errors import ConfigError
from megads.evaluate.config import WeightPrecision
from megads.evaluate.placement import choose_device, choose_dtype


def test_device() -> None:
    """Catches torch's own error for a device that does not exist."""
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
    for name, message in (("gpu", "must be auto, cpu"), ("meta", "must be auto, cpu"), ("cuda:99", "torch sees")):
        with pytest.raises(ConfigError, match=f"device = {name}: {message}"):
            choose_device(name)


def test_dtype() -> None:
    """Catches bf16 on a CPU, where it is slow, by default."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (choose_dtype(WeightPrecision.auto, cpu), choose_dtype(WeightPrecision.auto, gpu)) == (
        torch.float32,
        torch.bfloat16,
    )
    assert choose_dtype(WeightPrecision.bf16, cpu) is torch.bfloat16
    assert choose_dtype(WeightPrecision.fp32, gpu) is torch.float32
