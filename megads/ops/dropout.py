"""Applies the mask of a dropout (Srivastava et al. 2014), which the model draws, and adds the residual in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.eligible import kernel_takes


def apply_mask(x: Tensor, keep: Tensor, scale: float, residual: Tensor | None, fused: bool) -> Tensor:
    """x * keep * scale + residual, of x's shape and dtype; the kernel rounds once. Backward keeps the mask alone.

    Args:
        x: any shape; what `megads.ops.eligible.kernel_takes` goes to the kernel, which computes in fp32 inside.
        keep: uint8, of x's shape: 1 for what stays, 0 for what is dropped.
        scale: factor of what stays.
        residual: of x's shape and dtype; None: nothing is added.
        fused: take the kernel; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(x, gpu=True):
        residual = None if residual is None else residual.contiguous()
        out: Tensor = torch.ops.megads.dropout(x.contiguous(), keep.contiguous(), scale, residual)
        return out
    dropped = x * keep * scale
    return dropped if residual is None else residual + dropped


def register() -> None:
    """Tells torch the shape of the result and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::dropout")
    def _(x: Tensor, keep: Tensor, scale: float, residual: Tensor | None) -> Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, float, Tensor | None], output: Tensor) -> None:
        _, keep, ctx.scale, residual = inputs
        ctx.has_residual = residual is not None
        ctx.save_for_backward(keep)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        found = torch.ops.megads.dropout(grad.contiguous(), keep, ctx.scale, None)
        return found, None, None, grad if ctx.has_residual else None

    torch.library.register_autograd("megads::dropout", backward, setup_context=save)
