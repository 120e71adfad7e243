"""Softmax of scaled attention scores with ALiBi, causal, padding and document masks: all of Megatron's variants in one.

Also attention with scores in memory, from two GEMMs around this softmax, for GPUs without a fused attention kernel.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH, KernelOp, Kernels
from megads.ops.dropout import DropoutMask
from megads.ops.linear import matmul
from megads.ops.softcap import softcap


def masked_softmax(
    scores_bnst: Tensor,
    scale: float,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    kernels: Kernels = TORCH,
) -> Tensor:
    """softmax(scale * score + slope * (t - place)) over the keys from a query's start to its place, 0 elsewhere.

    A query that sees no key gets zeros. Any number of heads, queries and keys.

    Args:
        scores_bnst: attention scores; computed in fp32 internally (fp64 for fp64), the result has their dtype.
        scale: factor of the scores.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 position of every query among the keys, the last key that it sees; None: 0..s-1.
        starts_bs: int64 first key that each query sees, for documents and for padding on the left; None: 0.
        kernels: selects the implementation.
    """
    if kernels.takes(KernelOp.attention, scores_bnst):
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
    """Registers fake implementations and autograd of the operators; requires that the library is loaded."""

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


@dataclass(frozen=True, eq=False)
class MaskedSoftmax:
    """The softmax over attention scores, with its masks and biases.

    Attributes:
        scale: factor of the scores.
        bias: returns the additive mask for plain PyTorch, fp32 [b or 1, n or 1, s, t]; None: megads' kernel, with the
            following attributes.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 position of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that each query sees, contiguous; None: 0.
        softcap: bound of the scaled scores, before the bias; None: none. `explicit_attention` applies it.
        sinks_n: attention sink logit of each head, which takes a share of the probability; only with plain PyTorch and
            without dropout. None: none.
    """

    scale: float
    bias: Callable[[], Tensor] | None
    slopes_n: Tensor | None = None
    places_s: Tensor | None = None
    starts_bs: Tensor | None = None
    softcap: float | None = None
    sinks_n: Tensor | None = None

    def __call__(self, scores_bnst: Tensor) -> Tensor:
        """Probabilities in the scores' dtype."""
        if self.bias is None:
            return masked_softmax(scores_bnst, self.scale, self.slopes_n, self.places_s, self.starts_bs, FUSED)
        wide = torch.promote_types(scores_bnst.dtype, torch.float32)
        logits_bnst = scores_bnst.to(wide).mul(self.scale).add(self.bias())
        if self.sinks_n is None:
            return torch.softmax(logits_bnst, dim=-1).to(scores_bnst.dtype)
        sinks_bns1 = self.sinks_n.to(wide)[:, None, None].expand(*logits_bnst.shape[:-1], 1)
        return torch.softmax(torch.cat((logits_bnst, sinks_bns1), -1), dim=-1)[..., :-1].to(scores_bnst.dtype)


def explicit_attention(
    q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, softmax: MaskedSoftmax, mask: DropoutMask | None = None
) -> Tensor:
    """dropout(softmax(q k^T)) v, [b, n, s, d]; n / m consecutive query heads share keys and values.

    With dropout, only the probabilities, in the queries' dtype, are saved for the backward pass, and no other tensor of
    their size.

    Args:
        q_bnsd: queries.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        softmax: scores [b, n, s, t] to probabilities.
        mask: dropout mask of the probabilities; its rows are positions of queries, its elements keys. None: no dropout.
    """
    (batch, heads, queries, dim), (shared, keys) = q_bnsd.shape, k_bmtd.shape[1:3]
    # The queries of all heads that share keys are rows of one GEMM.
    rows = heads // shared * queries
    cap, scale = softmax.softcap, softmax.scale
    if cap is not None:  # softcap applies the scale
        softmax = replace(softmax, scale=1.0)

    def scores_bnst() -> Tensor:
        # The caller keeps no reference to the scores, so they are freed as soon as the softmax is done.
        scores = matmul(q_bnsd.reshape(batch, shared, rows, dim), k_bmtd.transpose(-1, -2))
        if cap is not None:
            scores = softcap(scores, cap, scale)
        return scores.view(batch, heads, queries, keys)

    assert mask is None or softmax.sinks_n is None, "their gradient is autograd's"
    if mask is None:
        return matmul(softmax(scores_bnst()).view(batch, shared, rows, keys), v_bmtd).view(q_bnsd.shape)
    # As matmul does: several heads are copied, since a view would keep the whole projection for the backward pass.
    v_bmtd = v_bmtd if shared == 1 else v_bmtd.contiguous()
    out: Tensor = _DroppedAttention.apply(scores_bnst(), v_bmtd, softmax, mask)  # type: ignore[no-untyped-call]
    return out.view(q_bnsd.shape)


class _DroppedAttention(torch.autograd.Function):
    """dropout(softmax(scores)) v of scores [b, n, s, t] and values [b, m, t, d]; backward regenerates the mask."""

    @staticmethod
    def forward(ctx: Any, scores_bnst: Tensor, v_bmtd: Tensor, softmax: MaskedSoftmax, mask: DropoutMask) -> Tensor:
        if softmax.bias is None:
            weights_bnst, dropped_bnst = torch.ops.megads.softmax_dropout_forward(
                scores_bnst, softmax.scale, softmax.slopes_n, softmax.places_s, softmax.starts_bs, *mask.arguments
            )
        else:
            weights_bnst = softmax(scores_bnst)
            dropped_bnst = (weights_bnst * _keep(weights_bnst, softmax, mask)).mul_(mask.scale)
        ctx.softmax, ctx.mask = softmax, mask
        ctx.save_for_backward(weights_bnst, v_bmtd)
        return matmul(_grouped(dropped_bnst, v_bmtd), v_bmtd)

    @staticmethod
    def backward(ctx: Any, grad_bmrd: Tensor) -> tuple[Tensor | None, ...]:
        (weights_bnst, v_bmtd), softmax, mask = ctx.saved_tensors, ctx.softmax, ctx.mask
        grad_weights_bnst = matmul(grad_bmrd, v_bmtd.transpose(-1, -2)).view(weights_bnst.shape)
        if softmax.bias is None:
            grad_scores_bnst, dropped_bnst = torch.ops.megads.softmax_dropout_backward(
                grad_weights_bnst, weights_bnst, softmax.scale, softmax.places_s, softmax.starts_bs, *mask.arguments
            )
        else:
            keep_bnst = _keep(weights_bnst, softmax, mask)
            grad_scores_bnst = _softmax_gradient(grad_weights_bnst.mul_(keep_bnst).mul_(mask.scale), weights_bnst)
            grad_scores_bnst = grad_scores_bnst.mul_(softmax.scale).to(weights_bnst.dtype)
            dropped_bnst = (weights_bnst * keep_bnst).mul_(mask.scale)
        grad_v_bmtd = matmul(_grouped(dropped_bnst, v_bmtd).transpose(-1, -2), grad_bmrd)
        return grad_scores_bnst, grad_v_bmtd, None, None


def _grouped(weights_bnst: Tensor, v_bmtd: Tensor) -> Tensor:
    """Concatenates the rows of all heads that share keys, [b, m, n / m s, t]."""
    batch, shared, keys, _ = v_bmtd.shape
    return weights_bnst.view(batch, shared, -1, keys)


def _keep(weights_bnst: Tensor, softmax: MaskedSoftmax, mask: DropoutMask) -> Tensor:
    _, heads, queries, keys = weights_bnst.shape
    assert len(mask.samples_b) == len(weights_bnst), f"{len(mask.samples_b)} numbers of samples"
    places_s = softmax.places_s
    if places_s is None:
        places_s = torch.arange(queries, device=weights_bnst.device)
    return mask.keep(heads, places_s, keys)


def _softmax_gradient(grad_bnst: Tensor, weights_bnst: Tensor) -> Tensor:
    """Gradient of softmax: weights * (grad - sum of weights * grad over keys), in fp32 or wider."""
    wide = torch.promote_types(grad_bnst.dtype, torch.float32)
    return torch._softmax_backward_data(grad_bnst.to(wide), weights_bnst.to(wide), -1, wide)
