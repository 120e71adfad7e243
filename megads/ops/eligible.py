"""Which tensors megads' own kernels can compute on."""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""What the kernels of a kind of device read and write; inside they compute in fp32."""


def kernel_takes(x: Tensor, gpu: bool = False) -> bool:
    """Whether the kernels can compute on this tensor: fp32 or bf16 on a CPU, fp16, too, on a GPU where there is one.

    Args:
        x: the tensor.
        gpu: the operator has a kernel for GPUs, too.
    """
    device = x.device.type
    return (gpu or device == "cpu") and x.dtype in KERNEL_DTYPES.get(device, ())
