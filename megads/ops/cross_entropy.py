"""One rank's part of cross entropy over a part of the vocabulary; its sum over ranks is megads.parallel's.

The gradient takes the memory of the logits, which nothing needs any more: there is no copy of them, in fp32 or other.

Shape suffixes: m = tokens, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

Statistics = tuple[Tensor, Tensor, Tensor]
"""Largest logit, sum of exp(logit - largest), and the label's logit or 0 if it is another rank's; each fp32 [m]."""


def statistics(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> Statistics:
    """What the loss is made of.

    Args:
        logits_mr: fp32 or bf16 on a CPU, contiguous.
        labels_m: int64, contiguous; the label is column `label - start`.
        valid: columns that count; the others are padding.
        start: the vocabulary's row of column 0.
    """
    return _columns(torch.ops.megads.cross_entropy_forward(logits_mr, labels_m, valid, start))


def gradient_(
    logits_mr: Tensor, labels_m: Tensor, largest_m: Tensor, total_m: Tensor, grad_m: Tensor, valid: int, start: int
) -> None:
    """Writes (softmax - one at the label) * gradient of the token's loss over the logits; 0 in the padding.

    Args:
        logits_mr: as in `statistics`; the gradient afterwards, in the same dtype.
        labels_m: likewise.
        largest_m: fp32, over the whole vocabulary.
        total_m: fp32 sum of exp(logit - largest), likewise.
        grad_m: fp32.
        valid: as in `statistics`.
        start: likewise.
    """
    torch.ops.megads.cross_entropy_gradient_(logits_mr, labels_m, largest_m, total_m, grad_m, valid, start)


def loss_(logits_mr: Tensor, labels_m: Tensor, grad_m: Tensor, valid: int, start: int) -> Statistics:
    """Both at once, for a rank that holds the whole vocabulary: the logits are read from memory once.

    Args:
        logits_mr: as in `gradient_`.
        labels_m: likewise.
        grad_m: likewise.
        valid: likewise.
        start: likewise.
    """
    return _columns(torch.ops.megads.cross_entropy_loss_(logits_mr, labels_m, grad_m, valid, start))


def _columns(found_m3: Tensor) -> Statistics:
    largest_m, total_m, target_m = found_m3.T.contiguous().unbind()
    return largest_m, total_m, target_m


def statistics_reference(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> Statistics:
    """`statistics` in plain torch, in the dtype of the logits."""
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
    """What `gradient_` writes, in plain torch, in the dtype of the logits, which stay as they are."""
    found_mr = (logits_mr - largest_m[:, None]).exp() / total_m[:, None]
    found_mr[:, valid:] = 0.0
    local_m = labels_m - start
    held_m = (local_m >= 0) & (local_m < valid)
    found_mr[held_m, local_m[held_m]] -= 1.0
    return found_mr * grad_m[:, None]


def register() -> None:
    """Tells torch the shapes of the results; the gradients are megads.parallel's. The library is loaded."""

    @torch.library.register_fake("megads::cross_entropy_forward")
    def _(logits: Tensor, labels: Tensor, valid: int, start: int) -> Tensor:
        return logits.new_empty((logits.shape[0], 3), dtype=torch.float32)

    @torch.library.register_fake("megads::cross_entropy_gradient_")
    def _(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, grad: Tensor, valid: int, start: int) -> None:
        return None

    @torch.library.register_fake("megads::cross_entropy_loss_")
    def _(logits: Tensor, labels: Tensor, grad: Tensor, valid: int, start: int) -> Tensor:
        return logits.new_empty((logits.shape[0], 3), dtype=torch.float32)
