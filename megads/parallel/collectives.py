"""Conjugate collectives of tensor parallelism: what one does forward, its partner does backward.

The f and g of Shoeybi et al. 2019 (Megatron-LM): entering a parallel region copies forward and sums gradients
backward; leaving one sums forward and copies backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.grid import Axis


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.group = axis.group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # A copy: autograd may hand the same tensor to another branch.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        assert x.is_contiguous()
        # The sum is written into the producer's output, which nothing else reads.
        dist.all_reduce(x, group=axis.group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def enter_region(x: Tensor, axis: Axis) -> Tensor:
    """Identity forward; all-reduce of the gradient backward."""
    return x if axis.size == 1 else _EnterRegion.apply(x, axis)


def leave_region(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce forward; identity backward."""
    return x if axis.size == 1 else _LeaveRegion.apply(x, axis)
