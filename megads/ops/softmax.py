"""Softmax of scaled attention scores with ALiBi, causality, padding and document borders: Megatron's family in one.

Shape suffixes: b = batch, n = heads, s = query, t = key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.eligible import kernel_takes


def masked_softmax(
    scores_bnst: Tensor,
    scale: float,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """softmax(scale * score + slope * (t - place)) over the keys from a query's start to its place, 0 elsewhere.

    A query that sees no key gets zeros. Any number of heads, queries and keys.

    Args:
        scores_bnst: products of queries and keys; computed in fp32 inside (fp64 for fp64), the result is of its dtype.
        scale: factor of the scores.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 place of every query among the keys, the last one it sees; None: 0..s-1.
        starts_bs: int64 first key that a query sees, for documents and for padding on the left; None: 0.
        fused: take the kernel for fp32 and bf16 on a CPU; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(scores_bnst, gpu=True):
        starts_bs = None if starts_bs is None else starts_bs.contiguous()
        out: Tensor = torch.ops.megads.softmax_forward(scores_bnst.contiguous(), scale, slopes_n, places_s, starts_bs)
        return out
    wide_bnst = scores_bnst.to(torch.promote_types(scores_bnst.dtype, torch.float32)) * scale
    queries, keys = wide_bnst.shape[-2:]
    device = scores_bnst.device
    places_s = torch.arange(queries, device=device) if places_s is None else places_s
    distance_st = torch.arange(keys, device=device) - places_s[:, None]
    if slopes_n is not None:
        wide_bnst = wide_bnst + slopes_n[:, None, None].to(wide_bnst.dtype) * distance_st
    hidden_bst = (distance_st > 0)[None]
    if starts_bs is not None:
        hidden_bst = hidden_bst | (torch.arange(keys, device=device) < starts_bs[:, :, None])
    hidden_bnst = hidden_bst[:, None]
    weights_bnst = wide_bnst.masked_fill(hidden_bnst, float("-inf")).softmax(-1)
    return weights_bnst.masked_fill(hidden_bnst, 0.0).to(scores_bnst.dtype)


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    @torch.library.register_fake("megads::softmax_forward")
    def _(scores: Tensor, scale: float, slopes: Tensor | None, places: Tensor | None, starts: Tensor | None) -> Tensor:
        return torch.empty_like(scores)

    @torch.library.register_fake("megads::softmax_dropout_forward")
    def _(
        scores: Tensor,
        scale: float,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        samples: Tensor,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(scores), torch.empty_like(scores)

    @torch.library.register_fake("megads::softmax_dropout_backward")
    def _(
        grad: Tensor,
        out: Tensor,
        scale: float,
        places: Tensor | None,
        starts: Tensor | None,
        samples: Tensor,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(out), torch.empty_like(out)

    @torch.library.register_fake("megads::softmax_backward")
    def _(grad: Tensor, out: Tensor, scale: float, places: Tensor | None, starts: Tensor | None) -> Tensor:
        return torch.empty_like(out)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.scale, _, places, starts = inputs
        ctx.save_for_backward(output, places, starts)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, places, starts = ctx.saved_tensors
        found = torch.ops.megads.softmax_backward(grad.contiguous(), out, ctx.scale, places, starts)
        return found, None, None, None, None

    torch.library.register_autograd("megads::softmax_forward", backward, setup_context=keep)
