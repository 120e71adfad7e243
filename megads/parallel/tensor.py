"""Tensor-parallel layers (Shoeybi et al. 2019), each holding one rank's share of the weights.

With sequence parallelism (Korthikanti et al. 2022) what is replicated outside of a parallel region is cut along the
sequence instead: layers that open a region gather it, layers that close one scatter it.

Shape suffixes: b = batch, s = sequence, t = this rank's share of the sequence (s / size with sequence parallelism, else
s), i = local input features, o = local output features, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.ops.config import KernelOp
from megads.parallel.collectives import reduce_from_tp_region, reduce_scatter_to_sp_region
from megads.parallel.grid import Axis, padded_rows
from megads.parallel.head_loss import Targets, head_loss
from megads.parallel.region_linear import Region, closing_linears, opening_linear, opening_linears
from megads.parallel.weight_gradients import SplitLayer, TiedGradient, WeightGradients, add_whole, linear


class RowGradient:
    """The gradient of a table from those of the rows that were read."""

    def __init__(self, grad_bsh: Tensor, rows_bs: Tensor) -> None:
        """Computes nothing yet.

        Args:
            grad_bsh: of what was read.
            rows_bs: int64, the rows that were.
        """
        self._grad_mh, self._rows_m = grad_bsh.flatten(0, -2), rows_bs.flatten()

    def add_to(self, main_grad_rh: Tensor, first: bool) -> None:
        """Adds it to main_grad; the bits are the same for any number of threads, and on every run.

        Args:
            main_grad_rh: fp32 or wider.
            first: what it holds does not count.
        """
        if first:
            main_grad_rh.zero_()
        grad_mh = self._grad_mh.to(main_grad_rh.dtype)
        if main_grad_rh.device.type == "cuda":
            add_sorted(main_grad_rh, self._rows_m, grad_mh)
        else:
            main_grad_rh.index_add_(0, self._rows_m, grad_mh)


def add_sorted(main_grad_rh: Tensor, rows_m: Tensor, grad_mh: Tensor) -> None:
    """Adds to rows of main_grad in one order on a GPU, too: it sorts them, where index_add_ has atomics."""
    main_grad_rh.index_put_((rows_m,), grad_mh, accumulate=True)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None) -> Tensor:
        ctx.save_for_backward(rows_bs)
        # Where weights are cut over ranks, this one may be empty by the time of the backward pass.
        ctx.weight, ctx.shape, ctx.gradients = weight, weight.shape, gradients
        return F.embedding(rows_bs, weight)

    @staticmethod
    def backward(ctx: Any, grad_bsh: Tensor) -> tuple[None, Tensor | None, None]:  # type: ignore[override]
        (rows_bs,), weight = ctx.saved_tensors, ctx.weight
        gradient = RowGradient(grad_bsh, rows_bs)
        main_grads = ctx.gradients.main_grads if ctx.gradients is not None else None
        if main_grads is not None:
            add_whole(main_grads, weight, gradient)
            return None, None, None
        if isinstance(ctx.gradients, TiedGradient):
            return None, ctx.gradients.take(weight, gradient), None
        whole_rh = torch.empty(
            ctx.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=grad_bsh.device
        )
        gradient.add_to(whole_rh, first=True)
        return None, whole_rh.to(weight.dtype), None


def lookup(rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None) -> Tensor:
    """The rows of a table, [b, s, h] in its dtype.

    Args:
        rows_bs: int64 [b, s].
        weight: [r, h].
        gradients: whose main_grad the table's gradient goes to, never deferred; None, or without one: autograd's.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(rows_bs, weight)
    out_bsh: Tensor = _Lookup.apply(rows_bs, weight, gradients)
    return out_bsh


class RegionBorder(nn.Module):
    """What enters or leaves a parallel region."""

    region: Region

    @property
    def untraced(self) -> tuple[str, ...]:
        """Excluded from torch.compile: overlapped communication, and our own matrix products on CPUs."""
        on_cpu = any(parameter.device.type == "cpu" for parameter in self.parameters(recurse=False))
        own = on_cpu and self.region.kernels.fused(KernelOp.linear)
        return ("forward",) if own or self.region.axis.size > 1 else ()


class ColumnParallelLinear(RegionBorder, SplitLayer):
    """y = x W^T + b with the rows of W, the output features, cut over the axis, b or none. Opens a parallel region."""

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(out_features // region.axis.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // region.axis.size)) if bias else None

    def forward(self, x_bti: Tensor) -> Tensor:
        """[b, t, in] -> [b, s, out / size]."""
        return opening_linear(x_bti, self.weight, self.bias, self.region, self.weight_gradients)


class RowParallelLinear(RegionBorder, SplitLayer):
    """y = x W^T + b with the columns of W, the input features, cut over the axis. Closes a parallel region.

    A bias is added once, after the sum over ranks; with sequence parallelism by every rank to its own tokens.
    """

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(out_features, in_features // region.axis.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_bsi: Tensor) -> Tensor:
        """[b, s, in / size] -> [b, t, out]."""
        if self.region.axis.size == 1:
            # The product is then rounded once, as in nn.Linear.
            return linear(x_bsi, self.weight, self.bias, self.weight_gradients, self.region.kernels)
        out_bto = closing_linears([x_bsi], [self.weight], self.region, self.weight_gradients)
        return out_bto if self.bias is None else out_bto + self.bias


class ColumnParallelBranches(RegionBorder):
    """Several `ColumnParallelLinear` of one input, which enter their region once."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x_bti: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
        """[b, t, in] -> [b, s, out / size] of every layer."""
        if self.region.axis.size == 1:
            return tuple(layer(x_bti) for layer in layers)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return opening_linears(x_bti, weights, biases, self.region, layers[0].weight_gradients)


class RowParallelBranches(RegionBorder):
    """The sum of several `RowParallelLinear`, which leave their region once.

    What a rank has of the sum is added before the message, so it is sent, and rounded, once.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, inputs: Sequence[Tensor], layers: Sequence[RowParallelLinear]) -> Tensor:
        """[b, s, in / size] of every layer -> [b, t, out]."""
        if self.region.axis.size == 1:
            first_bto, *others = (layer(x_bsi) for layer, x_bsi in zip(layers, inputs, strict=True))
            return sum(others, start=first_bto)
        out_bto = closing_linears(inputs, [layer.weight for layer in layers], self.region, layers[0].weight_gradients)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return out_bto + sum(biases) if biases else out_bto


class VocabParallelEmbedding(SplitLayer):
    """An embedding table whose rows are cut over the axis; each rank looks up the tokens it holds, the sum is whole.

    Its gradient is added to main_grad where there is one; it is never deferred, as nobody waits for more.
    """

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.rows = padded_rows(vocab_size, axis.size)
        self.start = axis.rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """int64 [b, s] -> [b, t, h]."""
        local_bs = tokens_bs - self.start
        foreign_bs = (local_bs < 0) | (local_bs >= self.rows)
        hidden_bsh = lookup(local_bs.masked_fill(foreign_bs, 0), self.weight, self.weight_gradients)
        hidden_bsh = hidden_bsh.masked_fill(foreign_bs[..., None], 0.0)
        return (reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region)(hidden_bsh, self.axis)


class PositionShardEmbedding(nn.Module):
    """A whole table of positions, of which every rank looks up those of its share of the sequence.

    Only with sequence parallelism: what is added to a sharded hidden state is the shard's.
    """

    def __init__(self, num_positions: int, hidden_size: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        """int64 [..., s], of all the tokens that this rank's region holds -> [..., t, h]."""
        share = positions.shape[-1] // self.axis.size
        return F.embedding(positions.narrow(-1, self.axis.rank * share, share), self.weight)


class VocabParallelHead(RegionBorder, SplitLayer):
    """Output projection whose rows are cut over the axis. The region it opens is closed by the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, region: Region) -> None:
        super().__init__()
        self.region = region
        self.weight = nn.Parameter(torch.empty(padded_rows(vocab_size, region.axis.size), hidden_size))

    def forward(self, hidden_bth: Tensor, info: BatchInfo, targets: Targets | None = None) -> Tensor:
        """[b, t, h] -> logits [b, s, rows] of this rank's rows, padding rows included.

        Args:
            hidden_bth: what is projected.
            info: of the micro-batch.
            targets: where the logits are only wanted for the loss: what it compares them with. Returns the loss then,
                see `megads.parallel.head_loss.head_loss`, and the logits are never whole.
        """
        if targets is not None:
            return head_loss(hidden_bth, self.weight, targets, self.region, self.weight_gradients)
        return opening_linear(hidden_bth, self.weight, None, self.region, self.weight_gradients)
