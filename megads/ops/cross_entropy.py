"""One rank's part of vocab-parallel cross entropy; megads.parallel reduces it over ranks.

The gradient overwrites the logits, which are no longer needed, so no fp32 or other copy of them is made.

Shape suffixes: m = tokens, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

Statistics = tuple[Tensor, Tensor, Tensor]
"""Largest logit, sum of exp(logit - largest), and the label's logit or 0 if it is another rank's; each fp32 [m]."""


def statistics(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> Statistics:
    """Computes this rank's statistics for the loss.

    Args:
        logits_mr: logits in a dtype of KERNEL_DTYPES, contiguous.
        labels_m: int64, contiguous; a label is column `label - start`.
        valid: number of columns before the padding.
        start: vocabulary index of column 0.
    """
    return _columns(torch.ops.megads.cross_entropy_forward(logits_mr, labels_m, valid, start))


def gradient_(
    logits_mr: Tensor, labels_m: Tensor, largest_m: Tensor, total_m: Tensor, grad_m: Tensor, valid: int, start: int
) -> None:
    """Overwrites the logits with their gradient, (softmax - one-hot label) * grad, and 0 in the padding.

    Args:
        logits_mr: as in `statistics`; holds the gradient afterwards, in the same dtype.
        labels_m: as in `statistics`.
        largest_m: largest logit over the whole vocabulary, fp32.
        total_m: sum of exp(logit - largest) over the whole vocabulary, fp32.
        grad_m: gradient of each token's loss, fp32.
        valid: as in `statistics`.
        start: as in `statistics`.
    """
    torch.ops.megads.cross_entropy_gradient_(logits_mr, labels_m, largest_m, total_m, grad_m, valid, start)


def loss_(logits_mr: Tensor, labels_m: Tensor, grad_m: Tensor, valid: int, start: int) -> Statistics:
    """`statistics` and `gradient_` fused, for a rank that holds the whole vocabulary; reads the logits once.

    Args:
        logits_mr: as in `gradient_`.
        labels_m: as in `gradient_`.
        grad_m: as in `gradient_`.
        valid: as in `gradient_`.
        start: as in `gradient_`.
    """
    return _columns(torch.ops.megads.cross_entropy_loss_(logits_mr, labels_m, grad_m, valid, start))


def _columns(found_m3: Tensor) -> Statistics:
    largest_m, total_m, target_m = found_m3.T.contiguous().unbind()
    return largest_m, total_m, target_m


def statistics_reference(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> Statistics:
    """`statistics` in plain PyTorch, in the dtype of the logits."""
    counted_mr = logits_mr[:, :valid]
    largest_m = counted_mr.amax(-1) if valid else logits_mr.new_full(labels_m.shape, float("-inf"))
    base_m = largest_m.masked_fill(largest_m == float("-inf"), 0.0)
    total_m = (counted_mr - base_m[:, None]).exp().sum(-1)
    local_m = labels_m - start
    held_m = (local_m >= 0) & (local_m < valid)
    target_m = logits_mr.new_zeros(labels_m.shape)
    target_m[held_m] = counted_mr[held_m, local_m[held_m]]
    return largest_m, total_m, target_m


def gradient_reference(
    logits_mr: Tensor, labels_m: Tensor, largest_m: Tensor, total_m: Tensor, grad_m: Tensor, valid: int, start: int
) -> Tensor:
    """The gradient of `gradient_` in plain PyTorch, in the dtype of the logits, which are not modified."""
    found_mr = (logits_mr - largest_m[:, None]).exp() / total_m[:, None]
    found_mr[:, valid:] = 0.0
    local_m = labels_m - start
    held_m = (local_m >= 0) & (local_m < valid)
    found_mr[held_m, local_m[held_m]] -= 1.0
    return found_mr * grad_m[:, None]


def register() -> None:
    """Registers fake implementations; autograd is in megads.parallel. Requires that the library is loaded."""

    @torch.library.register_fake("megads::cross_entropy_forward")
    def _(logits: Tensor, labels: Tensor, valid: int, start: int) -> Tensor:
        return logits.new_empty((logits.shape[0], 3), dtype=torch.float32)

    @torch.library.register_fake("megads::cross_entropy_gradient_")
    def _(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, grad: Tensor, valid: int, start: int) -> None:
        return None

    @torch.library.register_fake("megads::cross_entropy_loss_")
    def _(logits: Tensor, labels: Tensor, grad: Tensor, valid: int, start: int) -> Tensor:
        return logits.new_empty((logits.shape[0], 3), dtype=torch.float32)
