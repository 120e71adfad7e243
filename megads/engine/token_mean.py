"""The mean over the unmasked tokens of the global batch (N9): counted before the first backward, shared after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatch
from megads.ops.config import KernelOp
from megads.ops.kernels import TORCH, Kernels
from megads.parallel.cross_entropy import loss_in_place, vocab_parallel_token_losses
from megads.parallel.grid import ParallelGrid, padded_rows
from megads.parallel.head_loss import Targets, chunk_tokens


class TokenMeanLoss:
    """sum(mask * cross entropy) * scale of one micro-batch.

    Attributes:
        scale: fp64 scalar on the engine's device, so that setting it never waits for the device. 1 / (unmasked tokens
            of the global batch), times what the engine divides losses and gradients by on its own.

    Args:
        vocab_size: true size of the vocabulary.
        grid: the ranks.
        kernels: whose kernels compute, and how many tokens at a time.
    """

    def __init__(self, vocab_size: int, grid: ParallelGrid, kernels: Kernels = TORCH) -> None:
        self.vocab_size, self.grid, self.kernels = vocab_size, grid, kernels
        self.scale = torch.ones((), dtype=torch.float64)

    def __call__(self, logits_bsr: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """The logits are the loss's to overwrite."""
        labels_bs, mask_bs = targets
        if self.kernels.takes(KernelOp.cross_entropy, logits_bsr):
            return loss_in_place(logits_bsr, labels_bs, mask_bs * self.scale, self.vocab_size, self.grid.tp)
        losses_bs = vocab_parallel_token_losses(logits_bsr, labels_bs, self.vocab_size, self.grid.tp)
        return (losses_bs * mask_bs).sum() * self.scale

    def of_head(self, head: nn.Module, hidden_bth: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """The same from what the head reads, whose logits are never whole if they are many.

        Args:
            head: a `VocabParallelHead`.
            hidden_bth: its input.
            info: of the micro-batch.
            targets: labels and mask, [b, s].
        """
        labels_bs, mask_bs = targets
        tokens, rows = labels_bs.numel(), padded_rows(self.vocab_size, self.grid.tp.size)
        chunk = chunk_tokens(tokens, rows * hidden_bth.element_size(), hidden_bth.device.type, self.kernels.loss_chunk)
        if chunk >= tokens:
            return self(head(hidden_bth, info), targets)
        of_logits = Targets(labels_bs, mask_bs * self.scale, self.vocab_size, chunk, self.kernels)
        loss: Tensor = head(hidden_bth, info, of_logits)
        return loss


def global_tokens(
    micro_batches: Sequence[MicroBatch], grid: ParallelGrid, device: torch.device, loss_rank: int
) -> Tensor:
    """Unmasked tokens over the data axis, fp64 scalar; known before the first backward, where the loss is only.

    Args:
        micro_batches: of the step.
        grid: the ranks.
        device: of the result.
        loss_rank: pipeline rank that holds the last stage.
    """
    if grid.pp.rank != loss_rank:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Masks are counted where they are, on the host, and a number is no copy: a GPU is not waited for.
    masks = [batch.loss_mask_bs for batch in micro_batches if batch.loss_mask_bs is not None]
    assert len(masks) == len(micro_batches)
    counted = sum(mask.sum(dtype=torch.float64).item() for mask in masks)
    total = torch.full((), counted, dtype=torch.float64, device=device)
    if grid.data.size > 1:
        dist.all_reduce(total, group=grid.data.group)
    return total


def share_loss(
    loss_sum: Tensor | None, tokens: Tensor, grid: ParallelGrid, loss_rank: int, scale: float = 1.0
) -> Tensor:
    """Sums the last stages' losses over the data axis and tells the other ranks of the pipeline; waits for no device.

    Args:
        loss_sum: scalar where the last stage is, None elsewhere.
        tokens: `global_tokens`.
        grid: the ranks.
        loss_rank: pipeline rank that holds the last stage.
        scale: what the sum is multiplied by.

    Returns:
        fp64 [2] on the device, the loss and the tokens, on every rank.
    """
    values = torch.zeros(2, dtype=torch.float64, device=tokens.device)
    if grid.pp.rank == loss_rank:
        assert loss_sum is not None
        values[0] = loss_sum.double() * scale
        if grid.data.size > 1:
            dist.all_reduce(values, group=grid.data.group)
        values[1] = tokens
    if grid.pp.size > 1:
        dist.broadcast(values, src=grid.pp.ranks[loss_rank], group=grid.pp.group)
    return values
