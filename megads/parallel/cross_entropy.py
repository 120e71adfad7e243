"""Cross entropy over logits whose vocabulary is cut over ranks; no rank ever holds a full [b, s, v] tensor.

Shape suffixes: b = batch, s = sequence, m = all tokens of the batch, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.ops import cross_entropy
from megads.ops.gelu import kernel_takes
from megads.parallel.grid import Axis
from megads.parallel.tensor import padded_rows


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)


def _own_rows(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """(start, valid): the vocabulary's row that this rank's first one is, and how many of its rows are no padding."""
    rows = padded_rows(vocab_size, axis.size)
    start = axis.rank * rows
    return start, max(0, min(rows, vocab_size - start))


class _VocabParallelTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        start, valid = _own_rows(vocab_size, axis)
        logits_bsr = logits_bsr.float() if logits_bsr.dtype.itemsize < 4 else logits_bsr.clone()
        logits_bsr[..., valid:] = float("-inf")

        peak_bs = logits_bsr.amax(dim=-1)
        _all_reduce(peak_bs, dist.ReduceOp.MAX, axis)
        logits_bsr -= peak_bs[..., None]

        local_bs = labels_bs - start
        foreign_bs = (local_bs < 0) | (local_bs >= valid)
        local_bs = local_bs.masked_fill(foreign_bs, 0)
        target_bs = logits_bsr.gather(-1, local_bs[..., None])[..., 0].masked_fill(foreign_bs, 0.0)
        exp_bsr = logits_bsr.exp_()
        total_bs = exp_bsr.sum(dim=-1)
        # One message for both sums.
        sums_2bs = torch.stack([target_bs, total_bs])
        _all_reduce(sums_2bs, dist.ReduceOp.SUM, axis)
        target_bs, total_bs = sums_2bs.unbind()

        ctx.save_for_backward(exp_bsr.div_(total_bs[..., None]), local_bs, foreign_bs)
        return total_bs.log() - target_bs

    @staticmethod
    def backward(ctx: Any, grad_bs: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        probabilities_bsr, local_bs, foreign_bs = ctx.saved_tensors
        one_hot_bs1 = (~foreign_bs).to(probabilities_bsr.dtype)[..., None]
        grad_bsr = probabilities_bsr.scatter_add(-1, local_bs[..., None], -one_hot_bs1)
        return grad_bsr.mul_(grad_bs[..., None]), None, None, None


class _FusedVocabParallelTokenLosses(torch.autograd.Function):
    """The same by megads' own kernels: keeps the logits, where the one above keeps fp32 probabilities beside them."""

    @staticmethod
    def forward(ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        ctx.start, ctx.valid = _own_rows(vocab_size, axis)
        logits_mr, labels_m = logits_bsr.flatten(0, 1).contiguous(), labels_bs.flatten()
        own_largest_m, total_m, target_m = cross_entropy.statistics(logits_mr, labels_m, ctx.valid, ctx.start)
        largest_m = own_largest_m.clone()
        _all_reduce(largest_m, dist.ReduceOp.MAX, axis)
        if axis.size > 1:
            # A rank whose own logits are all -inf has no total, and exp(-inf - -inf) would make it a NaN.
            total_m = torch.where(total_m == 0, 0.0, total_m * (own_largest_m - largest_m).exp())
            # One message for both sums.
            sums_2m = torch.stack([target_m, total_m])
            _all_reduce(sums_2m, dist.ReduceOp.SUM, axis)
            target_m, total_m = sums_2m.unbind()
        ctx.save_for_backward(logits_mr, labels_m, largest_m, total_m)
        return (total_m.log() - (target_m - largest_m)).view_as(labels_bs)

    @staticmethod
    def backward(ctx: Any, grad_bs: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        logits_mr, labels_m, largest_m, total_m = ctx.saved_tensors
        grad_m = grad_bs.flatten().float().contiguous()
        grad_mr = cross_entropy.gradient(logits_mr, labels_m, largest_m, total_m, grad_m, ctx.valid, ctx.start)
        return grad_mr.view(*grad_bs.shape, -1), None, None, None


def vocab_parallel_token_losses(
    logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis, fused: bool = False
) -> Tensor:
    """Cross entropy of every token in nats, the same on all ranks of the axis; fp32 (fp64 for fp64 logits) [b, s].

    Args:
        logits_bsr: this rank's rows, `padded_rows(vocab_size, axis.size)` of them. Rows beyond the vocabulary are
            masked: they get neither probability nor gradient.
        labels_bs: int64 [b, s], global token ids.
        vocab_size: true size of the vocabulary.
        axis: the tensor-parallel axis.
        fused: take megads' own kernels where they can compute this; the same on all ranks of the axis.
    """
    if fused and kernel_takes(logits_bsr):
        fused_bs: Tensor = _FusedVocabParallelTokenLosses.apply(logits_bsr, labels_bs, vocab_size, axis)
        return fused_bs
    losses_bs: Tensor = _VocabParallelTokenLosses.apply(logits_bsr, labels_bs, vocab_size, axis)
    return losses_bs
