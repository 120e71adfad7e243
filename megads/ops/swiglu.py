"""The gated linear unit of SwiGLU (Shazeer 2020): silu(gate) * up.

One projection makes both. Its columns are pairs: column 2 i is gate i, column 2 i + 1 is up i. So a contiguous share
of the columns (rows of the weight), as tensor parallelism and checkpoints cut them, holds matching gates and ups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import KernelOp
from megads.ops.kernels import Kernels


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


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::swiglu_forward")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    @torch.library.register_fake("megads::swiglu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = torch.ops.megads.swiglu_backward(grad.contiguous(), x)
        return found

    torch.library.register_autograd("megads::swiglu_forward", backward, setup_context=keep)
