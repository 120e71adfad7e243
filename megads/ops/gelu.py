"""The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.eligible import kernel_takes


def gelu(x: Tensor, fused: bool) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), of the shape and dtype of x.

    Args:
        x: any shape; fp32 and bf16 on a CPU go to the kernel, which computes in fp32 inside.
        fused: take the kernel; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(x, gpu=True):
        out: Tensor = torch.ops.megads.gelu_forward(x.contiguous())
        return out
    return F.gelu(x, approximate="tanh")


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::gelu_forward")
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("megads::gelu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = torch.ops.megads.gelu_backward(grad.contiguous(), x)
        return found

    torch.library.register_autograd("megads::gelu_forward", backward, setup_context=keep)
