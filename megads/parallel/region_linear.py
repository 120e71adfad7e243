"""Linear layers that open or close a tensor-parallel region, their collectives beside their matrix products.

Backward, a layer that opens a region sums the gradient of its input over ranks while it computes that of its weight.
Where a product has to wait for a message, or a message for a product, `Region.chunks` cuts both along the tokens: the
message of one part travels while the product of another is computed (Jiang et al. 2024, MegaScale, section 3.2).

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, i = local input features, o = local output
features, r = ranks, c = tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.ops import linear as products
from megads.parallel import collectives
from megads.parallel.grid import Axis
from megads.parallel.weight_gradients import WeightGradient, WeightGradients, give, linear


@dataclass(frozen=True)
class Region:
    """How layers enter and leave tensor-parallel regions.

    Attributes:
        axis: the tensor-parallel axis.
        sequence_parallel: outside of regions every rank has its share of the tokens only.
        chunks: parts into which tokens are cut, so that messages and products overlap; 1: they take turns.
        fused: whole products by `megads.ops.linear`'s choice, not by torch's; those of parts are torch's.
    """

    axis: Axis
    sequence_parallel: bool = False
    chunks: int = 1
    fused: bool = False

    def parts(self, tokens: int) -> list[slice]:
        """Consecutive ranges of so many tokens, none of them empty; the same on all ranks."""
        count = max(1, min(self.chunks, tokens))
        return [slice(start, stop) for start, stop in pairwise(tokens * part // count for part in range(count + 1))]


def _product(x_rci: Tensor, matrix_io: Tensor, out_rco: Tensor, bias: Tensor | None = None) -> None:
    """Writes x M (+ bias) into a tensor whose ranks lie apart."""
    matrices = matrix_io.expand(x_rci.shape[0], *matrix_io.shape)
    if bias is None:
        torch.bmm(x_rci, matrices, out=out_rco)
    else:
        torch.baddbmm(bias, x_rci, matrices, out=out_rco)


class _OpenWhole(torch.autograd.Function):
    """Every rank has all tokens: nothing to do forward, an all-reduce backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_bsi: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        region: Region,
        gradients: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        # Under recomputation what was saved is another tensor of the same values.
        ctx.parameter = weight
        ctx.region, ctx.has_bias, ctx.gradients = region, bias is not None, gradients
        return products.linear(x_bsi, weight, bias, region.fused)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        grad_x_bsi = products.input_gradient(grad_bso, weight, ctx.region.fused)
        work = dist.all_reduce(grad_x_bsi, group=ctx.region.axis.group, async_op=True)
        grad_weight = _weight_gradient(ctx, x_bsi, grad_bso)
        grad_bias = grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None
        work.wait()
        return grad_x_bsi, grad_weight, grad_bias, None, None


def _weight_gradient(ctx: Any, x_bsi: Tensor | Callable[[], Tensor], grad_bso: Tensor) -> Tensor | None:
    """The gradient of the weight; None where it is put off, or in its sums already."""
    return give(ctx.gradients, ctx.parameter, WeightGradient(grad_bso, x_bsi, ctx.region.fused))


class _OpenShare(torch.autograd.Function):
    """Every rank has its share of the tokens: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_bti: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        region: Region,
        gradients: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x_bti, weight)
        ctx.parameter = weight
        ctx.region, ctx.has_bias, ctx.gradients = region, bias is not None, gradients
        parts = region.parts(x_bti.shape[1])
        if len(parts) == 1:
            return products.linear(collectives.start_gather(x_bti, region.axis)(), weight, bias, region.fused)
        arriving = [collectives.start_gather_parts(x_bti[:, part], region.axis) for part in parts]
        out_brto = x_bti.new_empty(x_bti.shape[0], region.axis.size, x_bti.shape[1], weight.shape[0])
        for part, finish in zip(parts, arriving, strict=True):
            for x_rci, out_rto in zip(finish().unbind(1), out_brto, strict=True):
                _product(x_rci, weight.t(), out_rto[:, part], bias)
        return out_brto.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        (x_bti, weight), axis, fused = ctx.saved_tensors, ctx.region.axis, ctx.region.fused
        grad_bias = grad_bso.sum((0, 1)) if ctx.has_bias else None
        if ctx.gradients is not None and ctx.gradients.puts_off:
            # The whole is gathered when it is needed, so that only the share is kept until then.
            def whole() -> Tensor:
                return collectives.start_gather(x_bti, axis)()

            grad_weight = _weight_gradient(ctx, whole, grad_bso)
            grad_x_bsi = products.input_gradient(grad_bso, weight, fused)
            return collectives.start_scatter(grad_x_bsi, axis)(), grad_weight, grad_bias, None, None
        # Each collective runs beside the product that does not need it.
        gathering = collectives.start_gather(x_bti, axis)
        grad_x_bsi = products.input_gradient(grad_bso, weight, fused)
        whole_bsi = gathering()
        del gathering
        scattering = collectives.start_scatter(grad_x_bsi, axis)
        del grad_x_bsi
        grad_weight = _weight_gradient(ctx, whole_bsi, grad_bso)
        return scattering(), grad_weight, grad_bias, None, None


class _CloseWhole(torch.autograd.Function):
    """Every rank gets all tokens: all-reduce forward, nothing to do backward."""

    @staticmethod
    def forward(
        ctx: Any, x_bsi: Tensor, weight: nn.Parameter, region: Region, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        ctx.parameter, ctx.region, ctx.gradients = weight, region, gradients
        x_mi = x_bsi.flatten(0, -2)
        out_mo = x_bsi.new_empty(x_mi.shape[0], weight.shape[0])
        leaving = []
        for part in region.parts(x_mi.shape[0]):
            products.linear_into(out_mo[part], x_mi[part], weight, region.fused)
            leaving.append(dist.all_reduce(out_mo[part], group=region.axis.group, async_op=True))
        for work in leaving:
            work.wait()
        return out_mo.view(*x_bsi.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        grad_x_bsi = products.input_gradient(grad_bso, weight, ctx.region.fused)
        return grad_x_bsi, _weight_gradient(ctx, x_bsi, grad_bso), None, None


class _CloseShare(torch.autograd.Function):
    """Every rank gets its share of the tokens: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(
        ctx: Any, x_bsi: Tensor, weight: nn.Parameter, region: Region, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        ctx.parameter, ctx.region, ctx.gradients = weight, region, gradients
        axis = region.axis
        assert x_bsi.shape[1] % axis.size == 0, f"{x_bsi.shape[1]} tokens cannot be cut over {axis.size} ranks"
        parts = region.parts(x_bsi.shape[1] // axis.size)
        if len(parts) == 1:
            return collectives.start_scatter(products.linear(x_bsi, weight, None, region.fused), axis)()
        x_brti = x_bsi.unflatten(1, (axis.size, -1))
        leaving = []
        for part in parts:
            out_rbco = x_bsi.new_empty(axis.size, x_bsi.shape[0], part.stop - part.start, weight.shape[0])
            for x_rti, out_rco in zip(x_brti, out_rbco.unbind(1), strict=True):
                _product(x_rti[:, part], weight.t(), out_rco)
            leaving.append(collectives.start_scatter_parts(out_rbco, axis))
        return torch.cat([finish() for finish in leaving], dim=1)

    @staticmethod
    def backward(ctx: Any, grad_bto: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        axis, parts = ctx.region.axis, ctx.region.parts(grad_bto.shape[1])
        if len(parts) == 1:
            grad_bso = collectives.start_gather(grad_bto, axis)()
            grad_x_bsi = products.input_gradient(grad_bso, weight, ctx.region.fused)
            return grad_x_bsi, _weight_gradient(ctx, x_bsi, grad_bso), None, None
        arriving = [collectives.start_gather_parts(grad_bto[:, part], axis) for part in parts]
        grad_x_bsi = torch.empty_like(x_bsi, memory_format=torch.contiguous_format)
        grad_x_brti = grad_x_bsi.unflatten(1, (axis.size, -1))
        whole_brto = grad_bto.new_empty(grad_bto.shape[0], axis.size, *grad_bto.shape[1:])
        for part, finish in zip(parts, arriving, strict=True):
            grad_rbco = finish()
            # The weight's gradient is one product, rounded once.
            whole_brto[:, :, part] = grad_rbco.transpose(0, 1)
            for grad_rco, out_rti in zip(grad_rbco.unbind(1), grad_x_brti, strict=True):
                _product(grad_rco, weight, out_rti[:, part])
        return grad_x_bsi, _weight_gradient(ctx, x_bsi, whole_brto.flatten(1, 2)), None, None


def opening_linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, region: Region, gradients: WeightGradients | None = None
) -> Tensor:
    """Enters a region with the layer that opens it: x W^T + b for all tokens.

    With sequence parallelism the share alone is kept for backward, [b, t, i]: the gradient of the weight gathers the
    whole once more, beside the product for the gradient of the input (Korthikanti et al. 2022, section 4.2.2).

    Args:
        x: [b, s, i]; with sequence parallelism this rank's share of the tokens, [b, t, i].
        weight: this rank's output features, [o, i].
        bias: [o], or None.
        region: how to enter.
        gradients: says in the backward pass what becomes of the weight's; None leaves it to autograd.

    Returns:
        [b, s, o], in x's dtype.
    """
    if region.axis.size == 1:
        return linear(x, weight, bias, gradients, region.fused)
    layer = _OpenShare if region.sequence_parallel else _OpenWhole
    out: Tensor = layer.apply(x, weight, bias, region, gradients)
    return out


def closing_linear(
    x_bsi: Tensor, weight: nn.Parameter, region: Region, gradients: WeightGradients | None = None
) -> Tensor:
    """Leaves a region of 2 or more ranks with the layer that closes it: the sum of x W^T over the axis.

    Args:
        x_bsi: this rank's input features, [b, s, i].
        weight: [o, i].
        region: how to leave.
        gradients: says in the backward pass what becomes of the weight's; None leaves it to autograd.

    Returns:
        [b, s, o] in x's dtype; with sequence parallelism this rank's share of the tokens, [b, t, o].
    """
    layer = _CloseShare if region.sequence_parallel else _CloseWhole
    out: Tensor = layer.apply(x_bsi, weight, region, gradients)
    return out
