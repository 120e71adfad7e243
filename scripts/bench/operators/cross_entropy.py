"""Benchmark 5: cross entropy over a large vocabulary, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from scripts.bench.operators.case import OURS, Case, Sizes, Target, compiled, drawn

AXIS = single_rank_grid().tp
EAGER = "eager, as Hugging Face"


def cross_entropy_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Mean loss and gradient of the logits; megads overwrites the logits with it, and reads that in the next call."""
    logits = drawn(1, sizes.tokens, sizes.vocabulary, dtype=dtype)
    own_logits = logits.detach().clone().requires_grad_()
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    weights = torch.full((1, sizes.tokens), 1.0 / sizes.tokens)

    def ours() -> Tensor:
        return torch.autograd.grad(loss_in_place(own_logits, labels, weights, sizes.vocabulary, AXIS), own_logits)[0]

    def megatron() -> Tensor:
        losses = vocab_parallel_token_losses(logits, labels, sizes.vocabulary, AXIS)
        return torch.autograd.grad((losses * weights).sum(), logits)[0]

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    compiled_loss_of = compiled(loss_of)
    sides = {
        OURS: ours,
        EAGER: lambda: torch.autograd.grad(loss_of(logits), logits)[0],
        "eager, ops.impl=torch": megatron,
        "inductor": lambda: torch.autograd.grad(compiled_loss_of(logits), logits)[0],
    }
    # The logits once and the gradient once.
    moved = 2 * logits.numel() * logits.itemsize
    name = f"cross entropy f+b {sizes.tokens}x{sizes.vocabulary}"
    return Case(name, sides, moved, in_place=True, row=5, targets=(Target(EAGER, 4.0),))
