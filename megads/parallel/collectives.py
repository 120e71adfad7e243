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
from torch import Tensor, nn

from megads.ops import linear as products
from megads.parallel.grid import Axis
from megads.parallel.weight_gradients import WeightGradients, linear

Pending = Callable[[], Tensor]
"""Waits for a collective that has been started; returns its result. To be called once."""


def start_gather(x: Tensor, axis: Axis) -> Pending:
    """Starts to put the shares of a sequence together; no autograd.

    A micro-batch of one sample arrives in place, more of them are copied once into the order of the samples.

    Args:
        x: this rank's share, [b, s / size, ...].
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        What waits for the whole, [b, s, ...].
    """
    # Gloo wants pieces of the input's shape along dim 0; in memory that is [size, b, s / size, ...].
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(parts, x.contiguous(), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return parts.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1, 2)

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
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    share = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(share, parts.flatten(0, 1), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return share

    return finish


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


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_scatter(x, axis)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return start_gather(grad, ctx.axis)(), None


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bsi: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        axis: Axis,
        gradients: WeightGradients | None,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        # Under recomputation what was saved is another tensor of the same values.
        ctx.parameter = weight
        ctx.axis, ctx.has_bias, ctx.gradients, ctx.fused = axis, bias is not None, gradients, fused
        return products.linear(start_gather(x_bsi, axis)(), weight, bias, fused)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        (x_bsi, weight), fused = ctx.saved_tensors, ctx.fused
        grad_bias = grad_bso.sum((0, 1)) if ctx.has_bias else None
        if ctx.gradients is not None and ctx.gradients.puts_off:
            # The whole is gathered when it is needed, so that only the share is kept until then.
            ctx.gradients.later(
                ctx.parameter, lambda: products.weight_gradient(grad_bso, start_gather(x_bsi, ctx.axis)(), fused)
            )
            grad_x_bsi = products.input_gradient(grad_bso, weight, fused)
            return start_scatter(grad_x_bsi, ctx.axis)(), None, grad_bias, None, None, None
        # Each collective runs beside the product that does not need it.
        gathering = start_gather(x_bsi, ctx.axis)
        grad_x_bsi = products.input_gradient(grad_bso, weight, fused)
        whole_bsi = gathering()
        del gathering
        scattering = start_scatter(grad_x_bsi, ctx.axis)
        del grad_x_bsi
        grad_weight = products.weight_gradient(grad_bso, whole_bsi, fused)
        return scattering(), grad_weight, grad_bias, None, None, None


def enter_region(x: Tensor, axis: Axis) -> Tensor:
    """Identity forward; all-reduce of the gradient backward."""
    return x if axis.size == 1 else _EnterRegion.apply(x, axis)


def leave_region(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce forward; identity backward."""
    return x if axis.size == 1 else _LeaveRegion.apply(x, axis)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Leaves a region: reduce-scatter along dim 1 forward, [b, s, ...] -> [b, s / size, ...]; all-gather backward."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def gathered_linear(
    x_bsi: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    axis: Axis,
    gradients: WeightGradients | None = None,
    fused: bool = False,
) -> Tensor:
    """Enters a region with the linear layer that opens it: all-gather along dim 1, then x W^T + b.

    Backward reduce-scatters the gradient of the input. Kept for backward is the share alone, [b, s / size, i]: the
    gradient of the weight gathers the whole once more, beside the product for the gradient of the input (Korthikanti
    et al. 2022, section 4.2.2).

    Args:
        x_bsi: this rank's share of the tokens, [b, s / size, i].
        weight: this rank's output features, [o, i].
        bias: [o], or None.
        axis: the tensor-parallel axis.
        gradients: says in the backward pass whether the weight's is put off; None where it never is.
        fused: products by `megads.ops.linear`'s choice, not by torch's.

    Returns:
        [b, s, o], in x's dtype.
    """
    if axis.size == 1:
        return linear(x_bsi, weight, bias, gradients, fused)
    out_bso: Tensor = _GatheredLinear.apply(x_bsi, weight, bias, axis, gradients, fused)
    return out_bso
