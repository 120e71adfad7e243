"""Soft-capping of logits: cap * tanh(x / cap), which is close to x for |x| far below the cap, and bounded by the cap.

Gemma 2 (Gemma Team 2024, section 2) caps attention logits at 50 and final logits at 30; earlier Bello et al. 2016.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, cap: float) -> Tensor:
        out, slope = _capped(x, scale, cap)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def _capped(x: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """The result and its derivative, scale * (1 - tanh^2); computed in fp32 or wider, returned in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    bent = (wide * (scale / cap)).tanh_()
    out = (bent * cap).to(x.dtype)
    return out, bent.square_().neg_().add_(1.0).mul_(scale).to(x.dtype)


def softcap(x: Tensor, cap: float, scale: float = 1.0) -> Tensor:
    """cap * tanh(scale * x / cap), in x's dtype. Saves the derivative for backward; the result may be overwritten.

    Args:
        x: fp64, fp32 or bf16, any shape.
        cap: bound of the result, positive.
        scale: factor of x.
    """
    out: Tensor = _Softcap.apply(x, scale, cap)
    return out


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Soft-caps in place, without autograd; returns the derivative, in x's shape and dtype."""
    out, slope = _capped(x, 1.0, cap)
    x.copy_(out)
    return slope
