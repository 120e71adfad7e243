"""One rank's part of cross entropy over a part of the vocabulary; its sum over ranks is megads.parallel's.

The logits are read once forward and once backward, and only they are kept: there is no copy of them in fp32.

Shape suffixes: m = tokens, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exp(logit - largest), and the label's logit or 0 if it is another rank's; each fp32 [m].

    Args:
        logits_mr: fp32 or bf16 on a CPU, contiguous.
        labels_m: int64, contiguous; the label is column `label - start`.
        valid: columns that count; the others are padding.
        start: the vocabulary's row of column 0.
    """
    found: Tensor = torch.ops.megads.cross_entropy_forward(logits_mr, labels_m, valid, start)
    largest_m, total_m, target_m = found.T.contiguous().unbind()
    return largest_m, total_m, target_m


def gradient(
    logits_mr: Tensor, labels_m: Tensor, largest_m: Tensor, total_m: Tensor, grad_m: Tensor, valid: int, start: int
) -> Tensor:
    """(softmax - one at the label) * gradient of the token's loss, in the dtype of the logits; 0 in the padding.

    Args:
        logits_mr: as in `statistics`.
        labels_m: likewise.
        largest_m: fp32, over the whole vocabulary.
        total_m: fp32 sum of exp(logit - largest), likewise.
        grad_m: fp32.
        valid: as in `statistics`.
        start: likewise.
    """
    found: Tensor = torch.ops.megads.cross_entropy_backward(
        logits_mr, labels_m, largest_m, total_m, grad_m, valid, start
    )
    return found


def statistics_reference(logits_mr: Tensor, labels_m: Tensor, valid: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, in the dtype of the logits."""
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
    """The same in plain torch, in the dtype of the logits."""
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

    @torch.library.register_fake("megads::cross_entropy_backward")
    def _(
        logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, grad: Tensor, valid: int, start: int
    ) -> Tensor:
        return torch.empty_like(logits)
