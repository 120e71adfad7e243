"""Conjugate collectives of tensor parallelism: what one does forward, its partner does backward.

The f and g of Shoeybi et al. 2019 (Megatron-LM): entering a parallel region copies forward and sums gradients
backward; leaving one sums forward and copies backward. With sequence parallelism (Korthikanti et al. 2022) every rank
has only its share of the tokens outside of the regions: entering gathers them, leaving sums and scatters them. The
two are as many bytes as one all-reduce.

Shares of a sequence are contiguous pieces of dim 1, in the order of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.grid import Axis

Pending = Callable[[], Tensor]
"""Waits for a collective that has been started; returns its result. To be called once."""


def start_gather_parts(x: Tensor, axis: Axis) -> Pending:
    """Starts to collect every rank's share of a sequence; no autograd.

    Args:
        x: this rank's share, [b, t, ...].
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        What waits for the shares, [size, b, t, ...].
    """
    # Gloo wants pieces of the input's shape along dim 0.
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(parts, x.contiguous(), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return parts.unflatten(0, (axis.size, -1))

    return finish


def start_gather(x: Tensor, axis: Axis) -> Pending:
    """Starts to put the shares of a sequence together; no autograd.

    A micro-batch of one sample arrives in place, more of them are copied once into the order of the samples.

    Args:
        x: this rank's share, [b, s / size, ...].
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        What waits for the whole, [b, s, ...].
    """
    finish = start_gather_parts(x, axis)
    return lambda: finish().transpose(0, 1).flatten(1, 2)


def start_scatter_parts(parts: Tensor, axis: Axis) -> Pending:
    """Starts to sum every rank's share of a sequence over ranks, each of which gets its own; no autograd.

    Args:
        parts: this rank's summand of every share, contiguous [size, b, t, ...]. Not to be written until the end.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        What waits for the sum of this rank's share, [b, t, ...].
    """
    share = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return share

    return finish


def start_scatter(x: Tensor, axis: Axis) -> Pending:
    """Starts to sum a sequence over ranks and to leave each of them its share; no autograd.

    Args:
        x: this rank's summand, [b, s, ...], s a multiple of the axis' size. Not to be written until the end.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        What waits for this rank's share of the sum, [b, s / size, ...].
    """
    assert x.shape[1] % axis.size == 0, f"{x.shape[1]} tokens cannot be cut over {axis.size} ranks"
    return start_scatter_parts(x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous(), axis)


class _ReduceFromTPRegion(torch.autograd.Function):
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


class _ReduceScatterToSPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_scatter(x, axis)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return start_gather(grad, ctx.axis)(), None


def reduce_from_tp_region(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce forward; identity backward."""
    return x if axis.size == 1 else _ReduceFromTPRegion.apply(x, axis)


def reduce_scatter_to_sp_region(x: Tensor, axis: Axis) -> Tensor:
    """Leaves a region: reduce-scatter along dim 1 forward, [b, s, ...] -> [b, s / size, ...]; all-gather backward."""
    return x if axis.size == 1 else _ReduceScatterToSPRegion.apply(x, axis)
