"""The activations of the MLP: GELU (Hendrycks and Gimpel 2016), squared ReLU, SwiGLU and GeGLU (Shazeer 2020).

megads has kernels for GELU's tanh approximation, which can be fused with a bias addition, and for SwiGLU; PyTorch
computes the others. SwiGLU is silu(gate) * up, GeGLU gelu(gate) * up, both from one projection with interleaved
columns: column 2 i is gate i, column 2 i + 1 is up i. So any contiguous shard of the columns (rows of the weight), as
made by tensor parallelism and checkpoints, holds matching gates and ups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import TORCH, KernelOp, Kernels


def gelu(x: Tensor, kernels: Kernels) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), in x's shape and dtype.

    Args:
        x: any shape; megads' kernel supports the dtypes of KERNEL_DTYPES, and computes in fp32 internally.
        kernels: selects the implementation.
    """
    if kernels.takes(KernelOp.gelu, x):
        out: Tensor = torch.ops.megads.gelu_forward(x.contiguous())
        return out
    return F.gelu(x, approximate="tanh")


def register() -> None:
    """Registers fake implementations and autograd of the operators; requires that the library is loaded."""
    _register("gelu", torch.empty_like)
    _register_bias_gelu()
    _register("swiglu", lambda x: x.new_empty(x.shape[0], x.shape[1] // 2))


def _register(name: str, result: Callable[[Tensor], Tensor]) -> None:
    """Registers an operator of one tensor whose gradient needs only that tensor; `result` allocates the output."""

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
    """`gelu` of x + bias, in x's shape and dtype. megads' kernel neither rounds nor stores the sum.

    Args:
        x: [..., h]; see `gelu`.
        bias: [h], in x's dtype.
        kernels: selects the implementation.
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
    """gate * sigmoid(gate) * up, [..., f] in gate_up's dtype.

    Args:
        gate_up: [..., 2 f], gates in the even columns, ups in the odd ones; megads' kernel supports the dtypes of
            KERNEL_DTYPES, and computes in fp32 internally.
        kernels: selects the implementation.
    """
    if kernels.takes(KernelOp.swiglu, gate_up):
        out: Tensor = torch.ops.megads.swiglu_forward(gate_up.reshape(-1, gate_up.shape[-1]).contiguous())
        return out.view(*gate_up.shape[:-1], out.shape[-1])
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor, *, exact: bool) -> Tensor:
    """gelu(gate) * up, [..., f] in gate_up's dtype, computed by PyTorch.

    Args:
        gate_up: [..., 2 f], as in `swiglu`.
        exact: x * Phi(x) with the error function instead of the tanh approximation.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return F.gelu(gate, approximate="none" if exact else "tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, Primer), computed by PyTorch."""
    return F.relu(x).square()
