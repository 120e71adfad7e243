"""Dropout of hidden states (Srivastava et al. 2014), and the residual that its result is added to, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.config import KernelOp
from megads.ops.kernels import TORCH, Kernels
from megads.ops.philox import DropoutMask


def dropout(
    x_bsh: Tensor,
    mask: DropoutMask,
    places_s: Tensor | None = None,
    residual_bsh: Tensor | None = None,
    kernels: Kernels = TORCH,
) -> Tensor:
    """x * keep * scale + residual, of x's dtype; the kernel rounds once, keeps nothing and draws the mask again.

    Plain torch keeps the mask, a byte an element: drawing it costs more there.

    Args:
        x_bsh: what `megads.ops.kernels.kernel_takes` goes to the kernel, which computes in fp32 inside.
        mask: its rows are tokens, its elements features.
        places_s: int64 place of every token in its sample; None: 0..s-1.
        residual_bsh: of x's dtype; None: nothing is added.
        kernels: whose kernel computes.
    """
    assert mask.first_head == 0 and len(mask.samples_b) == len(x_bsh), (
        f"{len(x_bsh)} rows, but {len(mask.samples_b)} numbers of samples"
    )
    if kernels.takes(KernelOp.dropout, x_bsh):
        residual_bsh = None if residual_bsh is None else residual_bsh.contiguous()
        samples_b, key, threshold, _ = mask.arguments
        out: Tensor = torch.ops.megads.dropout(x_bsh.contiguous(), residual_bsh, places_s, samples_b, key, threshold)
        return out
    places_s = torch.arange(x_bsh.shape[1], device=x_bsh.device) if places_s is None else places_s
    dropped_bsh = x_bsh * mask.keep(1, places_s, x_bsh.shape[2])[:, 0] * mask.scale
    return dropped_bsh if residual_bsh is None else residual_bsh + dropped_bsh


def register() -> None:
    """Tells torch the shape of the result and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::dropout")
    def _(
        x: Tensor, residual: Tensor | None, places: Tensor | None, samples: Tensor, key: int, threshold: int
    ) -> Tensor:
        return torch.empty_like(x)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, residual, places, samples, ctx.key, ctx.threshold = inputs
        ctx.has_residual = residual is not None
        ctx.save_for_backward(places, samples)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.megads.dropout(grad.contiguous(), None, *ctx.saved_tensors, ctx.key, ctx.threshold)
        return found, grad if ctx.has_residual else None, None, None, None, None

    torch.library.register_autograd("megads::dropout", backward, setup_context=save)
