"""Turns queries and keys by the angles of their positions (Su et al. 2021, RoFormer).

Feature i of a head and feature i + d/2 are one point in the plane, as in `megads.model.attention`.

Shape suffixes: b = batch, s = sequence, n = heads, d = head dim, r = d/2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.config import KernelOp, Kernels


def rotate(x_bsnd: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> Tensor:
    """x turned by the angles, computed in the tables' dtype, [b, s, n, d] in x's dtype.

    Args:
        x_bsnd: queries or keys; fp32 and bf16 on a CPU go to the kernel.
        cos: cosines of every angle, [s, 1, r] or [b, s, 1, r], fp32 beside fp32 and bf16.
        sin: sines, likewise.
        kernels: whose kernel computes.
    """
    if kernels.takes(KernelOp.rotary, x_bsnd) and cos.dtype == torch.float32:
        rows_bsnd = x_bsnd if x_bsnd.stride(-1) == 1 else x_bsnd.contiguous()
        out: Tensor = torch.ops.megads.rotary(rows_bsnd, _table(cos), _table(sin), False)
        return out
    first_bsnr, second_bsnr = x_bsnd.to(cos.dtype).chunk(2, dim=-1)
    turned = (first_bsnr * cos - second_bsnr * sin, second_bsnr * cos + first_bsnr * sin)
    return torch.cat(turned, dim=-1).to(x_bsnd.dtype)


def _table(table: Tensor) -> Tensor:
    """[s, 1, r] or [b, s, 1, r] as [1 or b, s, r]."""
    table = table.squeeze(-2)
    return (table if table.dim() == 3 else table[None]).contiguous()


def register() -> None:
    """Tells torch the shape of the result and the gradient; the library is loaded."""

    @torch.library.register_fake("megads::rotary")
    def _(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
        return x.new_empty(x.shape)

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, cos, sin, ctx.turned_back = inputs
        ctx.save_for_backward(cos, sin)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        found: Tensor = torch.ops.megads.rotary(grad, *ctx.saved_tensors, not ctx.turned_back)
        return found, None, None, None

    torch.library.register_autograd("megads::rotary", backward, setup_context=keep)
