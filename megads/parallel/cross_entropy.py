"""Cross entropy over logits whose vocabulary is cut over ranks; no rank ever holds a full [b, s, v] tensor.

Shape suffixes: b = batch, s = sequence, m = all tokens of the batch, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.ops import cross_entropy
from megads.ops.config import KernelOp
from megads.ops.kernels import FUSED, Kernels
from megads.parallel.grid import Axis, own_rows


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)


class _VocabParallelTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis) -> Tensor:
        low = logits_bsr.dtype.itemsize < 4
        losses_bs, *saved = _probabilities_(
            logits_bsr.float() if low else logits_bsr.clone(), labels_bs, vocab_size, axis
        )
        ctx.save_for_backward(*saved)
        return losses_bs

    @staticmethod
    def backward(ctx: Any, grad_bs: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        probabilities_bsr, local_bs, foreign_bs = ctx.saved_tensors
        return _gradient_(probabilities_bsr.clone(), local_bs, foreign_bs, grad_bs), None, None, None


def _probabilities_(
    logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In plain torch: losses, softmax (in the memory of the logits), labels in this rank's rows, and which are not."""
    start, valid = own_rows(vocab_size, axis)
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
    return total_bs.log() - target_bs, exp_bsr.div_(total_bs[..., None]), local_bs, foreign_bs


def _gradient_(probabilities_bsr: Tensor, local_bs: Tensor, foreign_bs: Tensor, grad_bs: Tensor) -> Tensor:
    """(softmax - one at the label) * gradient of the token's loss, in the memory of the softmax."""
    one_hot_bs1 = (~foreign_bs).to(probabilities_bsr.dtype)[..., None]
    return probabilities_bsr.scatter_add_(-1, local_bs[..., None], -one_hot_bs1).mul_(grad_bs[..., None])


class _LossInPlace(torch.autograd.Function):
    """By megads' own kernels; the logits become their gradient in the forward pass, which knows the weights already."""

    @staticmethod
    def forward(
        ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, weights_bs: Tensor, vocab_size: int, axis: Axis
    ) -> Tensor:
        logits_mr, trains = logits_bsr.flatten(0, 1).contiguous(), ctx.needs_input_grad[0]
        loss = weighted_loss_(
            logits_mr, labels_bs.flatten(), weights_bs.flatten(), vocab_size, axis, trains=trains, kernels=FUSED
        )
        if trains:
            # Whoever kept the logits for a backward pass of his own hears of it.
            torch.autograd.graph.increment_version(logits_bsr)
            ctx.save_for_backward(logits_mr.detach().view_as(logits_bsr))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (grad_bsr,) = ctx.saved_tensors
        return grad_bsr if is_root(grad) else grad_bsr.mul_(grad), None, None, None, None


def is_root(grad: Tensor) -> bool:
    """Whether a loss is known to be the root of its backward pass: its gradient is 1. To ask a GPU would be to wait."""
    return grad.device.type == "cpu" and grad.item() == 1.0


def weighted_loss_(
    logits_mr: Tensor,
    labels_m: Tensor,
    weights_m: Tensor,
    vocab_size: int,
    axis: Axis,
    *,
    trains: bool,
    kernels: Kernels,
) -> Tensor:
    """sum(weight * cross entropy), fp64 scalar, the same on all ranks of the axis.

    Args:
        logits_mr: this rank's rows, contiguous; afterwards the gradient of the result, if it trains, else undefined.
        labels_m: int64, global token ids.
        weights_m: the gradient of the result with respect to each token's loss.
        vocab_size: true size of the vocabulary.
        axis: the tensor-parallel axis.
        trains: the gradient is wanted.
        kernels: whose kernel computes.
    """
    if kernels.takes(KernelOp.cross_entropy, logits_mr):
        weights_m = weights_m.float().contiguous()
        losses_m = _fused_losses_(logits_mr, labels_m, weights_m, vocab_size, axis, trains=trains)
    else:
        wide_mr = logits_mr.float() if logits_mr.dtype.itemsize < 4 else logits_mr
        losses_m, probabilities_mr, local_m, foreign_m = _probabilities_(wide_mr, labels_m, vocab_size, axis)
        if trains:
            logits_mr.copy_(_gradient_(probabilities_mr, local_m, foreign_m, weights_m))
    return (losses_m * weights_m).sum(dtype=torch.float64)


def _fused_losses_(
    logits_mr: Tensor, labels_m: Tensor, weights_m: Tensor, vocab_size: int, axis: Axis, *, trains: bool
) -> Tensor:
    start, valid = own_rows(vocab_size, axis)
    # In one pass where the row that is read fits the cache of the core that reads it.
    if trains and axis.size == 1 and logits_mr.device.type == "cpu":
        largest_m, total_m, target_m = cross_entropy.loss_(logits_mr, labels_m, weights_m, valid, start)
    else:
        found = cross_entropy.statistics(logits_mr, labels_m, valid, start)
        largest_m, total_m, target_m = _over_ranks(*found, axis)
        if trains:
            cross_entropy.gradient_(logits_mr, labels_m, largest_m, total_m, weights_m, valid, start)
    return total_m.log() - (target_m - largest_m)


def _over_ranks(own_largest_m: Tensor, total_m: Tensor, target_m: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics over the whole vocabulary, from those of this rank's rows."""
    if axis.size == 1:
        return own_largest_m, total_m, target_m
    largest_m = own_largest_m.clone()
    _all_reduce(largest_m, dist.ReduceOp.MAX, axis)
    # A rank whose own logits are all -inf has no total, and exp(-inf - -inf) would make it a NaN.
    total_m = torch.where(total_m == 0, 0.0, total_m * (own_largest_m - largest_m).exp())
    # One message for both sums.
    sums_2m = torch.stack([target_m, total_m])
    _all_reduce(sums_2m, dist.ReduceOp.SUM, axis)
    target_m, total_m = sums_2m.unbind()
    return largest_m, total_m, target_m


def loss_in_place(logits_bsr: Tensor, labels_bs: Tensor, weights_bs: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """sum(weight * cross entropy), fp64 scalar, the same on all ranks of the axis, by megads' own kernels.

    Where a gradient is wanted, it is written over the logits: nobody else may read them afterwards. So they are in
    memory once, where `vocab_parallel_token_losses` makes two fp32 tensors of their size beside them.

    Args:
        logits_bsr: this rank's rows, which the kernels can compute on; see `vocab_parallel_token_losses`.
        labels_bs: int64 [b, s], global token ids.
        weights_bs: fp32 [b, s], the gradient of the result with respect to each token's loss; has none itself.
        vocab_size: true size of the vocabulary.
        axis: the tensor-parallel axis.
    """
    loss: Tensor = _LossInPlace.apply(logits_bsr, labels_bs, weights_bs, vocab_size, axis)
    return loss


def vocab_parallel_token_losses(logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Cross entropy of every token in nats, the same on all ranks of the axis; fp32 (fp64 for fp64 logits) [b, s].

    Args:
        logits_bsr: this rank's rows, `padded_rows(vocab_size, axis.size)` of them. Rows beyond the vocabulary are
            masked: they get neither probability nor gradient.
        labels_bs: int64 [b, s], global token ids.
        vocab_size: true size of the vocabulary.
        axis: the tensor-parallel axis.
    """
    losses_bs: Tensor = _VocabParallelTokenLosses.apply(logits_bsr, labels_bs, vocab_size, axis)
    return losses_bs
