"""Rotary position embedding of queries and keys (Su et al. 2021, RoFormer).

Features i and i + d/2 of a head form a pair that is rotated, as in `megads.model.attention`; in the interleaved form,
features 2 i and 2 i + 1. If d is less than a head's features, the others are unchanged.

Shape suffixes: b = batch, s = sequence, n = heads, d = rotated features of a head, r = d/2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.config import KernelOp, Kernels


def rotate(x_bsnd: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels, interleaved: bool = False) -> Tensor:
    """Rotates x by the angles, computed in the tables' dtype, in x's shape and dtype.

    Args:
        x_bsnd: queries or keys, of 2 r features or more, of which the first 2 r are rotated; megads' kernel supports
            the dtypes of KERNEL_DTYPES.
        cos: cosines of the angles, [s, 1, r] or [b, s, 1, r]; fp32 for fp32 and bf16 inputs.
        sin: sines, in the same shape and dtype.
        kernels: selects the implementation.
        interleaved: whether pairs are adjacent features; computed by PyTorch.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x_bsnd.shape[-1]:
        first_bsnd, rest_bsne = x_bsnd.split((rotated, x_bsnd.shape[-1] - rotated), dim=-1)
        return torch.cat((rotate(first_bsnd, cos, sin, kernels, interleaved), rest_bsne), dim=-1)
    if interleaved:
        first_bsnr, second_bsnr = x_bsnd.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = (first_bsnr * cos - second_bsnr * sin, second_bsnr * cos + first_bsnr * sin)
        return torch.stack(turned, dim=-1).flatten(-2).to(x_bsnd.dtype)
    if kernels.takes(KernelOp.rotary, x_bsnd) and cos.dtype == torch.float32:
        rows_bsnd = x_bsnd if x_bsnd.stride(-1) == 1 else x_bsnd.contiguous()
        out: Tensor = torch.ops.megads.rotary(rows_bsnd, _table(cos), _table(sin), False)
        return out
    first_bsnr, second_bsnr = x_bsnd.to(cos.dtype).chunk(2, dim=-1)
    turned = (first_bsnr * cos - second_bsnr * sin, second_bsnr * cos + first_bsnr * sin)
    return torch.cat(turned, dim=-1).to(x_bsnd.dtype)


def _table(table: Tensor) -> Tensor:
    """Reshapes [s, 1, r] or [b, s, 1, r] to [1 or b, s, r], contiguous."""
    table = table.squeeze(-2)
    return (table if table.dim() == 3 else table[None]).contiguous()


def register() -> None:
    """Registers the fake implementation and autograd of the operator; requires that the library is loaded."""

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
