"""The tanh approximation of GELU (Hendrycks and Gimpel 2016) of a sum with a bias, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.eligible import kernel_takes
from megads.ops.gelu import gelu


def bias_gelu(x: Tensor, bias: Tensor, fused: bool) -> Tensor:
    """`gelu` of x + bias, of the shape and dtype of x. The kernel neither rounds nor stores the sum.

    Args:
        x: [..., h]; fp32 and bf16 on a CPU go to the kernel, which computes in fp32 inside.
        bias: [h], of x's dtype.
        fused: take the kernel; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(x, gpu=True):
        out: Tensor = torch.ops.megads.bias_gelu_forward(x.reshape(-1, x.shape[-1]).contiguous(), bias)
        return out.view(x.shape)
    return gelu(x + bias, False)


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::bias_gelu_forward")
    def _(x: Tensor, bias: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("megads::bias_gelu_backward")
    def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(bias)

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_x, grad_bias = torch.ops.megads.bias_gelu_backward(grad.contiguous(), *ctx.saved_tensors)
        return grad_x, grad_bias

    torch.library.register_autograd("megads::bias_gelu_forward", backward, setup_context=keep)
