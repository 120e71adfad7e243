"""RMSNorm (Zhang and Sennrich 2019) of vectors whose features are sharded over tensor-parallel ranks.

OLMo 2 (2025) normalizes the queries of all heads as one vector, and likewise the keys. The mean square is over the
features of all ranks: the forward and the backward pass each all-reduce one number per token and norm.

Shape suffixes: b = batch, s = sequence, w = this rank's features, k = norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.grid import Axis


def _sums_over_ranks(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Stacks tensors [b, s] and all-reduces them at once, to [k, b, s]."""
    sums_kbs = torch.stack(list(parts))
    dist.all_reduce(axis.recorded(sums_kbs), group=axis.group)
    return sums_kbs


class _CutRMSNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, eps: float, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, weights = tensors[:count], tensors[count:]
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        squares_kbs = _sums_over_ranks([x.square().sum(-1) for x in wide], axis)
        scales = [
            torch.rsqrt(squares_bs / (x.shape[-1] * axis.size) + eps)
            for x, squares_bs in zip(inputs, squares_kbs, strict=True)
        ]
        ctx.axis = axis
        ctx.save_for_backward(*inputs, *weights, *scales)
        return tuple(
            (x_bsw * scale_bs[..., None] * weight).to(given.dtype)
            for given, x_bsw, weight, scale_bs in zip(inputs, wide, weights, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        count, saved = len(grads), ctx.saved_tensors
        inputs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        # y = x r w with r = (sum of x^2 / n + eps)^(-1/2), so dx = r w g - x r^3 / n * (sum of w g x), sums over ranks.
        wide = [x.to(scale.dtype) for x, scale in zip(inputs, scales, strict=True)]
        scaled = [grad * weight.to(x.dtype) for grad, weight, x in zip(grads, weights, wide, strict=True)]
        dots_kbs = _sums_over_ranks([(s * x).sum(-1) for s, x in zip(scaled, wide, strict=True)], ctx.axis)
        grad_inputs, grad_weights = [], []
        for given, weight, x, s, grad, scale_bs, dots_bs in zip(
            inputs, weights, wide, scaled, grads, scales, dots_kbs, strict=True
        ):
            scale_bs1, width = scale_bs[..., None], x.shape[-1] * ctx.axis.size
            pull_bs1 = (scale_bs**3 * dots_bs / width)[..., None]
            grad_inputs.append((scale_bs1 * s - pull_bs1 * x).to(given.dtype))
            grad_weights.append((grad * x * scale_bs1).flatten(0, -2).sum(0).to(weight.dtype))
        return None, None, None, *grad_inputs, *grad_weights


def cut_rms_norms(inputs: Sequence[Tensor], weights: Sequence[Tensor], eps: float, axis: Axis) -> tuple[Tensor, ...]:
    """RMSNorm of several tensors of the same tokens, with one all-reduce in each of the forward and backward passes.

    Args:
        inputs: this rank's features of each tensor, [b, s, w]. w may differ between tensors, but not between ranks.
        weights: this rank's gains for each tensor, [w].
        eps: added to each mean square.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        x / sqrt(mean of all ranks' x^2 + eps) * weight for each tensor, [b, s, w] in its dtype; computed in at least
        fp32.
    """
    return _CutRMSNorms.apply(axis, eps, len(inputs), *inputs, *weights)  # type: ignore[no-any-return]
