"""The activations of the MLP: GELU's tanh approximation (Hendrycks and Gimpel 2016) and SwiGLU (Shazeer 2020).

GELU also takes a sum with a bias, in one pass. SwiGLU is silu(gate) * up, where one projection makes both. Its columns
are pairs: column 2 i is gate i, column 2 i + 1 is up i. So a contiguous share of the columns (rows of the weight), as
tensor parallelism and checkpoints cut them, holds matching gates and ups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import TORCH, KernelOp, Kernels


def gelu(x: Tensor, kernels: Kernels) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), of the shape and dtype of x.

    Args:
        x: any shape; fp32 and bf16 on a CPU go to the kernel, which computes in fp32 inside.
        kernels: whose kernel computes.
    """
    if kernels.takes(KernelOp.gelu, x):
        out: Tensor = torch.ops.megads.gelu_forward(x.contiguous())
        return out
    return F.gelu(x, approximate="tanh")


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""
    _register("gelu", torch.empty_like)
    _register_bias_gelu()
    _register("swiglu", lambda x: x.new_empty(x.shape[0], x.shape[1] // 2))


def _register(name: str, result: Callable[[Tensor], Tensor]) -> None:
    """Registers an operator of one tensor, whose gradient needs that tensor alone; `result` has the output's shape."""

    @torch.library.register_fake(f"megads::{name}_forward")
    def _(x: Tensor) -> Tensor:
        return result(x)

    @torch.library.register_fake(f"megads::{name}_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = getattr(torch.ops.megads, f"{name}_backward")(grad.contiguous(), x)
        return found

    torch.library.register_autograd(f"megads::{name}_forward", backward, setup_context=keep)


def bias_gelu(x: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    """`gelu` of x + bias, of the shape and dtype of x. The kernel neither rounds nor stores the sum.

    Args:
        x: [..., h]; fp32 and bf16 on a CPU go to the kernel, which computes in fp32 inside.
        bias: [h], of x's dtype.
        kernels: whose kernel computes.
    """
    if kernels.takes(KernelOp.gelu, x):
        out: Tensor = torch.ops.megads.bias_gelu_forward(x.reshape(-1, x.shape[-1]).contiguous(), bias)
        return out.view(x.shape)
    return gelu(x + bias, TORCH)


def _register_bias_gelu() -> None:

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


def swiglu(gate_up: Tensor, kernels: Kernels) -> Tensor:
    """gate * sigmoid(gate) * up, [..., f] of x's dtype.

    Args:
        gate_up: [..., 2 f], gates in the even columns, ups in the odd ones; fp32 and bf16 on a CPU go to the kernel,
            which computes in fp32 inside.
        kernels: whose kernel computes.
    """
    if kernels.takes(KernelOp.swiglu, gate_up):
        out: Tensor = torch.ops.megads.swiglu_forward(gate_up.reshape(-1, gate_up.shape[-1]).contiguous())
        return out.view(*gate_up.shape[:-1], out.shape[-1])
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up
