"""Causal attention with ALiBi and document borders, block by block (Dao et al. 2022, FlashAttention).

Neither scores nor mask are ever in memory as a whole; blocks of keys that no query of a block sees are left out.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megads.ops.philox import DropoutMask

NOTHING_DROPPED = (None, 0, 0, 0)
"""In the place of a mask's arguments."""


def attention(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    mask: DropoutMask | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - place)) v over the keys from a query's start to its place, [b, n, s, d].

    Query head i reads keys and values of head i // (n / m) (Ainslie et al. 2023, grouped-query attention). In memory
    the result is [b, s, n, d]. A query that sees no key gets zeros. Needs
    `megads.ops.library.load_library`; `attention_reference` is the same in plain torch.

    Args:
        q_bnsd: queries, fp32 or bf16 on a CPU. Softmax and sums are fp32; bf16 is multiplied as bf16 where the
            processor can.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 place of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that a query sees; None: 0.
        mask: of the probabilities: its rows are the places of queries, its elements keys; backward draws it again.
            None: nothing is dropped.
    """
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_bnsd, k_bmtd, v_bmtd)]
    starts_bs = None if starts_bs is None else starts_bs.contiguous()
    out: Tensor
    drawn = NOTHING_DROPPED if mask is None else mask.arguments
    out, _ = torch.ops.megads.attention_forward(*rows, slopes_n, places_s, starts_bs, q_bnsd.shape[-1] ** -0.5, *drawn)
    return out


def attention_reference(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    mask: DropoutMask | None = None,
) -> Tensor:
    """The same by the formula, in the dtype of the queries; see `attention`."""
    queries, keys, group = q_bnsd.shape[2], k_bmtd.shape[2], q_bnsd.shape[1] // k_bmtd.shape[1]
    k_bntd, v_bntd = (x.repeat_interleave(group, 1) for x in (k_bmtd, v_bmtd))
    places_s = torch.arange(queries) if places_s is None else places_s
    distance_st = torch.arange(keys) - places_s[:, None]
    hidden_bst = (distance_st > 0)[None]
    if starts_bs is not None:
        hidden_bst = hidden_bst | (torch.arange(keys) < starts_bs[:, :, None])
    scores_bnst = q_bnsd @ k_bntd.transpose(-1, -2) * q_bnsd.shape[-1] ** -0.5
    if slopes_n is not None:
        scores_bnst = scores_bnst + (slopes_n[:, None, None] * distance_st).to(q_bnsd.dtype)
    scores_bnst = scores_bnst.masked_fill(hidden_bst[:, None], float("-inf"))
    weights_bnst = scores_bnst.softmax(-1).masked_fill(hidden_bst[:, None], 0.0)
    if mask is not None:
        weights_bnst = weights_bnst * mask.keep(q_bnsd.shape[1], places_s, keys) * mask.scale
    return weights_bnst @ v_bntd


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    def like(x_bnsd: Tensor) -> Tensor:
        return x_bnsd.new_empty(x_bnsd.transpose(1, 2).shape).transpose(1, 2)

    @torch.library.register_fake("megads::attention_forward")
    def _(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
        samples: Tensor | None,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor]:
        return like(q), q.new_empty((*q.shape[:3], 2), dtype=torch.float32)

    @torch.library.register_fake("megads::attention_backward")
    def _(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        statistics: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
        samples: Tensor | None,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return like(q), like(k), like(v)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, slopes, places, starts, ctx.scale, samples, *ctx.mask = inputs
        ctx.save_for_backward(samples, q, k, v, *output, slopes, places, starts)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, _grad_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        samples, *saved = ctx.saved_tensors
        grads = torch.ops.megads.attention_backward(grad, *saved, ctx.scale, samples, *ctx.mask)
        return (*grads, *(None,) * 8)

    torch.library.register_autograd("megads::attention_forward", backward, setup_context=keep)
