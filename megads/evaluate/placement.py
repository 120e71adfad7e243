"""Where a trained model is put, and in which dtype."""

from __future__ import annotations

import torch

from megads.errors import ConfigError
from megads.evaluate.config import WeightPrecision


def choose_device(name: str) -> torch.device:
    """Returns the device that a config means.

    Args:
        name: auto, cpu, cuda or cuda:<number>.

    Raises:
        ConfigError: there is no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name}: must be auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(f"device = {name}: torch sees {gpus} GPUs here; device=auto takes what there is")
    return device


def choose_dtype(precision: WeightPrecision, device: torch.device) -> torch.dtype:
    """Returns the dtype that a config means: CPUs compute fp32 faster, and GPUs bf16."""
    if precision is WeightPrecision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision is WeightPrecision.bf16 else torch.float32
