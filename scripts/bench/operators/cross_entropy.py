"""Benchmark 5: cross entropy over a large vocabulary, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.parallel.cross_entropy import vocab_parallel_token_losses
from megads.parallel.grid import single_rank_grid
from scripts.bench.operators.case import OURS, Case, Sizes, Target, compiled, drawn, forward_backward

AXIS = single_rank_grid().tp
EAGER = "eager, as Hugging Face"


def cross_entropy_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """The loss of every token from its logits, which are in the working dtype."""
    logits = drawn(1, sizes.tokens, sizes.vocabulary, dtype=dtype)
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    grad = torch.full((1, sizes.tokens), 1.0 / sizes.tokens)

    def ours(logits: Tensor) -> Tensor:
        return vocab_parallel_token_losses(logits, labels, sizes.vocabulary, AXIS, fused=True)

    def megatron(logits: Tensor) -> Tensor:
        return vocab_parallel_token_losses(logits, labels, sizes.vocabulary, AXIS, fused=False)

    def hugging_face(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    sides = {
        OURS: forward_backward(ours, [logits], grad),
        EAGER: forward_backward(hugging_face, [logits], grad),
        "eager, ops.impl=torch": forward_backward(megatron, [logits], grad),
        "inductor": forward_backward(compiled(hugging_face), [logits], grad),
    }
    name = f"cross entropy f+b {sizes.tokens}x{sizes.vocabulary}"
    return Case(name, sides, 3 * logits.numel() * logits.itemsize, row=5, targets=(Target(EAGER, 4.0),))
