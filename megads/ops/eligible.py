"""Which tensors megads' own kernels can compute on."""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels compute in fp32 inside."""


def kernel_takes(x: Tensor, gpu: bool = False) -> bool:
    """Whether the kernels can compute on this tensor: fp32 or bf16 on a CPU, or on a GPU where there is one for it.

    Args:
        x: the tensor.
        gpu: the operator has a kernel for GPUs, too.
    """
    return x.device.type in (("cpu", "cuda") if gpu else ("cpu",)) and x.dtype in KERNEL_DTYPES
