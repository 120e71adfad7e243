"""Linear layers that enter or leave a tensor-parallel region, with collectives overlapped with GEMMs.

The collectives are conjugate, the f and g of Shoeybi et al. 2019 (Megatron-LM): entering a parallel region is the
identity forward and an all-reduce of gradients backward; leaving one is an all-reduce forward and the identity
backward. With sequence parallelism (Korthikanti et al. 2022), every rank holds only its share of the tokens outside
regions: entering is an all-gather and leaving a reduce-scatter. Together they transfer as many bytes as one all-reduce.
Shares of a sequence are contiguous pieces of dim 1, in the order of the axis.

In the backward pass, layers that enter a region all-reduce the gradient of their input while they compute their weight
gradients. Layers that read the same input share that all-reduce, and layers whose outputs are added share the one after
them. If a GEMM depends on a collective, or a collective on a GEMM, `Region.chunks` splits both along the tokens: the
collective of one part is overlapped with the GEMM of another (Jiang et al. 2024, MegaScale, section 3.2).

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, i = local input features, o = local output
features, r = ranks, c = tokens of a part, d = features that only this rank needs, k = its part of shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.ops import linear as gemm
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.parallel.grid import Axis
from megads.parallel.weight_gradients import WeightGradient, WeightGradients, give, linear

Pending = Callable[[], Tensor]
"""Waits for an asynchronous collective and returns its result; must be called exactly once."""


def _start_gather_parts(x: Tensor, axis: Axis) -> Pending:
    """Starts an all-gather of every rank's share of a sequence; no autograd.

    Args:
        x: this rank's share, [b, t, ...].
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        Handle of the shares, [size, b, t, ...].
    """
    # Gloo requires the output to be a concatenation of inputs along dim 0.
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = dist.all_gather_into_tensor(parts, axis.recorded(x.contiguous()), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return parts.unflatten(0, (axis.size, -1))

    return finish


def start_gather(x: Tensor, axis: Axis) -> Pending:
    """Starts an all-gather of a sequence along dim 1; no autograd.

    Several samples need one copy after the all-gather, a single sample none.

    Args:
        x: this rank's share, [b, s / size, ...].
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        Handle of the whole sequence, [b, s, ...].
    """
    finish = _start_gather_parts(x, axis)
    return lambda: finish().transpose(0, 1).flatten(1, 2)


def _start_scatter_parts(parts: Tensor, axis: Axis) -> Pending:
    """Starts a reduce-scatter of the shares of a sequence; no autograd.

    Args:
        parts: this rank's addend of every share, contiguous [size, b, t, ...]. Must not be written until the collective
            is complete.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        Handle of the sum of this rank's share, [b, t, ...].
    """
    share = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(share, axis.recorded(parts.flatten(0, 1)), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return share

    return finish


def start_scatter(x: Tensor, axis: Axis) -> Pending:
    """Starts a reduce-scatter of a sequence along dim 1; no autograd.

    Args:
        x: this rank's addend, [b, s, ...], s a multiple of the axis size. Must not be written until the collective is
            complete.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        Handle of this rank's share of the sum, [b, s / size, ...].
    """
    assert x.shape[1] % axis.size == 0, f"{x.shape[1]} tokens are not divisible by {axis.size} ranks"
    return _start_scatter_parts(x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous(), axis)


class _ReduceFromTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        assert x.is_contiguous()
        # In place, as nothing else reads the producer's output.
        dist.all_reduce(axis.recorded(x), group=axis.group)
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
    """Reduce-scatter along dim 1 forward, [b, s, ...] -> [b, s / size, ...]; all-gather backward."""
    return x if axis.size == 1 else _ReduceScatterToSPRegion.apply(x, axis)


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_bso: Tensor, divided: int, sharers: range, axis: Axis) -> Tensor:
        own_bsd, shared_bsk = out_bso.split((divided, out_bso.shape[-1] - divided), dim=-1)
        ctx.divided, ctx.sharers, ctx.axis = divided, sharers, axis
        parts_rbsk = _start_gather_parts(shared_bsk, axis)()[sharers.start : sharers.stop]
        return torch.cat((own_bsd, parts_rbsk.permute(1, 2, 0, 3).flatten(2)), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        sharers, size = ctx.sharers, ctx.axis.size
        own_bsd, shared = grad_bso.split((ctx.divided, grad_bso.shape[-1] - ctx.divided), dim=-1)
        shared_rbsk = shared.unflatten(-1, (len(sharers), -1)).permute(2, 0, 1, 3)
        # The queries of every sharing rank contribute. Attention on a single rank accumulates these in fp32 and rounds
        # once, so the reduce-scatter is in fp32, too.
        dtype = torch.promote_types(grad_bso.dtype, torch.float32)
        addends_rbsk = shared_rbsk.new_zeros(size, *shared_rbsk.shape[1:], dtype=dtype)
        addends_rbsk[sharers.start : sharers.stop] = shared_rbsk
        sum_bsk = _start_scatter_parts(addends_rbsk, ctx.axis)()
        return torch.cat((own_bsd, sum_bsk.to(grad_bso.dtype)), dim=-1), None, None, None


def gather_shared_features(out_bso: Tensor, divided: int, sharers: range, axis: Axis) -> Tensor:
    """All-gathers features that several ranks share, forward; reduce-scatters the sum of their gradients backward.

    The collectives are over the whole axis, as a communicator of the sharers would cost more memory than the features
    of the other groups: with multi-query attention there are no others.

    Args:
        out_bso: output of a column-parallel layer: this rank's own features, then its part of the shared ones.
        divided: number of own features.
        sharers: ranks of the axis that share features with this one, itself included, in order.
        axis: the tensor-parallel axis.

    Returns:
        [b, s, divided + shared]: the own features, then all shared ones.
    """
    out: Tensor = _GatherShared.apply(out_bso, divided, sharers, axis)
    return out


@dataclass(frozen=True)
class Region:
    """How layers enter and leave tensor-parallel regions.

    Attributes:
        axis: the tensor-parallel axis.
        sequence_parallel: whether every rank holds only its share of the tokens outside regions.
        chunks: number of parts into which tokens are split to overlap collectives with GEMMs; 1: no such overlap.
        kernels: implementation of the GEMMs.
    """

    axis: Axis
    sequence_parallel: bool = False
    chunks: int = 1
    kernels: Kernels = TORCH

    @property
    def shared_out(self) -> bool:
        """Whether a rank holds only a part of the tokens outside regions."""
        return self.sequence_parallel and self.axis.size > 1

    def parts(self, tokens: int) -> list[slice]:
        """Splits tokens into at most `chunks` consecutive non-empty ranges, the same on all ranks."""
        return even_parts(tokens, max(1, min(self.chunks, tokens)))


def even_parts(tokens: int, count: int) -> list[slice]:
    """Splits tokens into `count` consecutive ranges, whose lengths differ by at most one."""
    return [slice(start, stop) for start, stop in pairwise(tokens * part // count for part in range(count + 1))]


def _gemm_into(
    x_rci: Tensor, weight_oi: Tensor, out_rco: Tensor, kernels: Kernels, bias_o: Tensor | None = None, add: bool = False
) -> None:
    """Writes x W^T (+ bias) to a tensor that may be strided along the rank dim, or adds it to the tensor."""
    if kernels.fused(KernelOp.linear) or gemm.needs_widening(x_rci):
        for x_ci, out_co in zip(x_rci, out_rco, strict=True):
            gemm.linear_into(out_co, x_ci, weight_oi, kernels, bias_o, add)
        return
    matrices = weight_oi.t().expand(x_rci.shape[0], *weight_oi.t().shape)
    if add:
        out_rco.baddbmm_(x_rci, matrices)
    elif bias_o is None:
        torch.bmm(x_rci, matrices, out=out_rco)
    else:
        torch.baddbmm(bias_o, x_rci, matrices, out=out_rco)


def _input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], kernels: Kernels) -> Tensor:
    """Gradient of an input that several layers read, accumulated in one tensor."""
    total = gemm.input_gradient(grads[0], weights[0], kernels)
    for grad_bso, weight in zip(grads[1:], weights[1:], strict=True):
        gemm.linear_into(total.flatten(0, -2), grad_bso.flatten(0, -2), weight.t(), kernels, add=True)
    return total


def _bias_gradients(grads: Sequence[Tensor], biases: Sequence[bool]) -> list[Tensor | None]:
    return [grad.flatten(0, -2).sum(0) if has else None for grad, has in zip(grads, biases, strict=True)]


def _weight_gradients(
    ctx: Any, weights: Sequence[nn.Parameter], grads: Sequence[Tensor], input_of: Callable[[int], Tensor]
) -> list[Tensor | None]:
    """Weight gradients of layers; None if deferred, or already accumulated in main_grad.

    Args:
        ctx: autograd context of the layers.
        weights: the layers' parameters; under recomputation, the saved tensors are others with the same values.
        grads: gradients of the layers' outputs.
        input_of: returns the input of a layer by index; called once per layer, in order.
    """
    return [
        give(ctx.gradients, weight, WeightGradient(grad_bso, partial(input_of, number), ctx.region.kernels))
        for number, (weight, grad_bso) in enumerate(zip(weights, grads, strict=True))
    ]


class _ColumnParallel(torch.autograd.Function):
    """Enters a region without sequence parallelism: identity forward, all-reduce backward."""

    @staticmethod
    def forward(
        ctx: Any, x_bsi: Tensor, region: Region, gradients: WeightGradients | None, *layers: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        ctx.save_for_backward(x_bsi, *weights)
        ctx.parameters, ctx.has_bias = weights, [bias is not None for bias in biases]
        ctx.region, ctx.gradients = region, gradients
        return tuple(gemm.linear(x_bsi, weight, bias, region.kernels) for weight, bias in _pairs(layers))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_bsi, *weights = ctx.saved_tensors
        grad_x_bsi = _input_gradient(grads, weights, ctx.region.kernels)
        axis = ctx.region.axis
        work = dist.all_reduce(axis.recorded(grad_x_bsi), group=axis.group, async_op=True)
        of_weights = _weight_gradients(ctx, ctx.parameters, grads, lambda _: x_bsi)
        of_biases = _bias_gradients(grads, ctx.has_bias)
        work.wait()
        return grad_x_bsi, None, None, *_interleaved(of_weights, of_biases)


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _interleaved(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [value for pair in zip(first, second, strict=True) for value in pair]


class GatheredOnce:
    """All-gathers a sequence-sharded tensor on first use, or from `start` on, and frees it after the last use.

    Args:
        x_bti: this rank's share.
        axis: axis over which the tensor is sharded.
        uses: number of calls until it is freed.
    """

    def __init__(self, x_bti: Tensor, axis: Axis, uses: int) -> None:
        self._share_bti, self._axis, self._uses = x_bti, axis, uses
        self._arriving: Pending | None = None
        self._whole_bsi: Tensor | None = None

    def start(self) -> None:
        """Starts the all-gather."""
        self._arriving = start_gather(self._share_bti, self._axis)

    def __call__(self, _number: int) -> Tensor:
        whole_bsi = self._whole_bsi
        if whole_bsi is None:
            if self._arriving is None:
                self.start()
            assert self._arriving is not None
            whole_bsi, self._arriving = self._arriving(), None
        self._uses -= 1
        self._whole_bsi = whole_bsi if self._uses else None
        return whole_bsi


class _ColumnParallelFromShards(torch.autograd.Function):
    """Enters a region with sequence parallelism: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(
        ctx: Any, x_bti: Tensor, region: Region, gradients: WeightGradients | None, *layers: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        ctx.save_for_backward(x_bti, *weights)
        ctx.parameters, ctx.has_bias = weights, [bias is not None for bias in biases]
        ctx.region, ctx.gradients = region, gradients
        parts = region.parts(x_bti.shape[1])
        if len(parts) == 1:
            whole_bsi = start_gather(x_bti, region.axis)()
            return tuple(gemm.linear(whole_bsi, weight, bias, region.kernels) for weight, bias in _pairs(layers))
        arriving = [_start_gather_parts(x_bti[:, part], region.axis) for part in parts]
        outs = [x_bti.new_empty(len(x_bti), region.axis.size, x_bti.shape[1], weight.shape[0]) for weight in weights]
        for part, finish in zip(parts, arriving, strict=True):
            x_brci = finish().transpose(0, 1)
            for out_brto, (weight, bias) in zip(outs, _pairs(layers), strict=True):
                for x_rci, out_rto in zip(x_brci, out_brto, strict=True):
                    _gemm_into(x_rci, weight, out_rto[:, part], region.kernels, bias)
        return tuple(out_brto.flatten(1, 2) for out_brto in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x_bti, *weights), axis, kernels = ctx.saved_tensors, ctx.region.axis, ctx.region.kernels
        of_biases = _bias_gradients(grads, ctx.has_bias)
        if ctx.gradients is not None and ctx.gradients.defers:
            # Gathered when the deferred wgrads are computed, so that only the share is kept until then.
            of_weights = _weight_gradients(ctx, ctx.parameters, grads, GatheredOnce(x_bti, axis, len(grads)))
            grad_x_bti = start_scatter(_input_gradient(grads, weights, kernels), axis)()
            return grad_x_bti, None, None, *_interleaved(of_weights, of_biases)
        # Each collective is overlapped with the GEMM that does not depend on it.
        gathering = start_gather(x_bti, axis)
        grad_x_bsi = _input_gradient(grads, weights, kernels)
        whole_bsi = gathering()
        del gathering
        scattering = start_scatter(grad_x_bsi, axis)
        del grad_x_bsi
        of_weights = _weight_gradients(ctx, ctx.parameters, grads, lambda _: whole_bsi)
        return scattering(), None, None, *_interleaved(of_weights, of_biases)


class _RowParallel(torch.autograd.Function):
    """Leaves a region without sequence parallelism: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, region: Region, gradients: WeightGradients | None, *layers: Any) -> Tensor:
        inputs, weights = layers[::2], layers[1::2]
        ctx.save_for_backward(*layers)
        ctx.parameters, ctx.region, ctx.gradients = weights, region, gradients
        flat = [x_bsi.flatten(0, -2) for x_bsi in inputs]
        out_mo = flat[0].new_empty(len(flat[0]), len(weights[0]))
        leaving = []
        for part in region.parts(len(out_mo)):
            for number, (x_mi, weight) in enumerate(zip(flat, weights, strict=True)):
                gemm.linear_into(out_mo[part], x_mi[part], weight, region.kernels, add=number > 0)
            leaving.append(dist.all_reduce(region.axis.recorded(out_mo[part]), group=region.axis.group, async_op=True))
        for work in leaving:
            work.wait()
        return out_mo.view(*inputs[0].shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *_row_parallel_gradients(ctx, ctx.saved_tensors, grad_bso)


def _row_parallel_gradients(ctx: Any, layers: Sequence[Tensor], grad_bso: Tensor) -> list[Any]:
    """Interleaved gradients of the inputs and weights of layers that leave a region, from that of the whole output."""
    inputs, weights = layers[::2], layers[1::2]
    of_inputs = [gemm.input_gradient(grad_bso, weight, ctx.region.kernels) for weight in weights]
    return _interleaved(of_inputs, _weight_gradients(ctx, ctx.parameters, [grad_bso] * len(inputs), inputs.__getitem__))


class _RowParallelToShards(torch.autograd.Function):
    """Leaves a region with sequence parallelism: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, region: Region, gradients: WeightGradients | None, *layers: Any) -> Tensor:
        inputs, weights, axis = layers[::2], layers[1::2], region.axis
        ctx.save_for_backward(*layers)
        ctx.parameters, ctx.region, ctx.gradients = weights, region, gradients
        batch, seq_len = inputs[0].shape[:2]
        assert seq_len % axis.size == 0, f"{seq_len} tokens are not divisible by {axis.size} ranks"
        parts = region.parts(seq_len // axis.size)
        if len(parts) == 1:
            out_bso = gemm.linear(inputs[0], weights[0], None, region.kernels)
            for x_bsi, weight in _pairs(layers)[1:]:
                gemm.linear_into(out_bso.flatten(0, -2), x_bsi.flatten(0, -2), weight, region.kernels, add=True)
            return start_scatter(out_bso, axis)()
        by_rank = [x_bsi.unflatten(1, (axis.size, -1)) for x_bsi in inputs]
        leaving = []
        for part in parts:
            out_rbco = inputs[0].new_empty(axis.size, batch, part.stop - part.start, len(weights[0]))
            for number, (x_brti, weight) in enumerate(zip(by_rank, weights, strict=True)):
                for x_rti, out_rco in zip(x_brti, out_rbco.unbind(1), strict=True):
                    _gemm_into(x_rti[:, part], weight, out_rco, region.kernels, add=number > 0)
            leaving.append(_start_scatter_parts(out_rbco, axis))
        return torch.cat([finish() for finish in leaving], dim=1)

    @staticmethod
    def backward(ctx: Any, grad_bto: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        axis, parts = ctx.region.axis, ctx.region.parts(grad_bto.shape[1])
        layers = ctx.saved_tensors
        if len(parts) == 1:
            return None, None, *_row_parallel_gradients(ctx, layers, start_gather(grad_bto, axis)())
        inputs, weights = layers[::2], layers[1::2]
        arriving = [_start_gather_parts(grad_bto[:, part], axis) for part in parts]
        of_inputs = [torch.empty_like(x_bsi, memory_format=torch.contiguous_format) for x_bsi in inputs]
        whole_brto = grad_bto.new_empty(grad_bto.shape[0], axis.size, *grad_bto.shape[1:])
        for part, finish in zip(parts, arriving, strict=True):
            grad_brco = finish().transpose(0, 1)
            # Collects the parts, so that the weight gradient is one GEMM, rounded once.
            whole_brto[:, :, part] = grad_brco
            for of_input, weight in zip(of_inputs, weights, strict=True):
                for grad_rco, out_rti in zip(grad_brco, of_input.unflatten(1, (axis.size, -1)), strict=True):
                    _gemm_into(grad_rco, weight.t(), out_rti[:, part], ctx.region.kernels)
        grads = [whole_brto.flatten(1, 2)] * len(inputs)
        of_weights = _weight_gradients(ctx, ctx.parameters, grads, inputs.__getitem__)
        return None, None, *_interleaved(of_inputs, of_weights)


def column_parallel_linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, region: Region, gradients: WeightGradients | None = None
) -> Tensor:
    """Column-parallel linear layer that enters a region: x W^T + b for all tokens.

    With sequence parallelism only the share [b, t, i] is saved for backward: the weight gradient repeats the
    all-gather, overlapped with the GEMM of the input gradient (Korthikanti et al. 2022, section 4.2.2).

    Args:
        x: [b, s, i]; with sequence parallelism this rank's share of the tokens, [b, t, i].
        weight: this rank's output features, [o, i].
        bias: [o], or None.
        region: the region to enter.
        gradients: defers or accumulates the weight gradient in the backward pass; None leaves it to autograd.

    Returns:
        [b, s, o], in x's dtype.
    """
    if region.axis.size == 1:
        return linear(x, weight, bias, gradients, region.kernels)
    return column_parallel_linears(x, [weight], [bias], region, gradients)[0]


def column_parallel_linears(
    x: Tensor,
    weights: Sequence[nn.Parameter],
    biases: Sequence[Tensor | None],
    region: Region,
    gradients: WeightGradients | None = None,
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers of the same input, which enter a region of 2 or more ranks with one collective.

    Args:
        x: as in `column_parallel_linear`.
        weights: weights of the layers, each [o, i].
        biases: biases of the layers, each [o] or None.
        region: the region to enter.
        gradients: as in `column_parallel_linear`.

    Returns:
        Each layer's [b, s, o], in x's dtype.
    """
    layer = _ColumnParallelFromShards if region.sequence_parallel else _ColumnParallel
    outs: tuple[Tensor, ...] = layer.apply(x, region, gradients, *_interleaved(weights, biases))
    return outs


def row_parallel_linears(
    inputs: Sequence[Tensor], weights: Sequence[nn.Parameter], region: Region, gradients: WeightGradients | None = None
) -> Tensor:
    """Row-parallel linear layers that leave a region of 2 or more ranks: sum of x W^T over layers and over the axis.

    Args:
        inputs: this rank's input features of each layer, [b, s, i].
        weights: weights of the layers, each [o, i].
        region: the region to leave.
        gradients: defers or accumulates the weight gradients in the backward pass; None leaves them to autograd.

    Returns:
        [b, s, o] in the inputs' dtype; with sequence parallelism this rank's share of the tokens, [b, t, o].
    """
    layer = _RowParallelToShards if region.sequence_parallel else _RowParallel
    out: Tensor = layer.apply(region, gradients, *_interleaved(inputs, weights))
    return out
