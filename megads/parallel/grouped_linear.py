"""The projections of several experts as one layer: stacked weights, each applied to the rows of its expert.

The weight is a matrix [experts * rows, hidden size], for both projections of an MLP: the first one's rows are its
output features, the second one is stored transposed, so that its rows are its input features. Thus a shard of the
experts, and of the features of each, is a set of ranges of rows (`megads.parallel.experts`).

Shape suffixes: n = rows of all experts, e = experts, i = input features, o = output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megads.ops import grouped_linear as grouped
from megads.ops.config import TORCH, Kernels
from megads.ops.token_dispatch import RowCounts
from megads.parallel.weight_gradients import SplitLayer, WeightGradient, give


class GroupedWeightGradient(WeightGradient):
    """The weight gradients of all experts of a layer, to be computed later, exactly once."""

    def __init__(self, grad_no: Tensor, x_ni: Tensor, counts: RowCounts, kernels: Kernels) -> None:
        """Stores the operands.

        Args:
            grad_no: gradient of the output, or the input of a transposed layer.
            x_ni: input, or the gradient of the output of a transposed layer.
            counts: number of rows of each expert.
            kernels: implementation of the GEMMs.
        """
        super().__init__(grad_no, x_ni, kernels)
        self._counts = counts

    @property
    def straight(self) -> bool:
        """See WeightGradient."""
        return grouped.fuses_accumulation(self._grad_bso, self._input(), self._kernels)

    def compute(self) -> Tensor:
        """Returns the gradient of the stacked weight, [e * o, i]."""
        gradients_eoi = grouped.grouped_weight_gradient(self._grad_bso, self._input(), self._counts, self._kernels)
        return gradients_eoi.flatten(0, 1)

    def add_to(self, main_grad_oi: Tensor, first: bool) -> None:
        """See WeightGradient; `main_grad_oi` is that of the stacked weight."""
        main_grad_eoi = main_grad_oi.unflatten(0, (len(self._counts.on_device), -1))
        grouped.add_grouped_weight_gradient(
            main_grad_eoi, self._grad_bso, self._input(), self._counts, first, self._kernels
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: GroupedLinear, x_ni: Tensor, weight: Tensor, counts: RowCounts) -> Tensor:
        ctx.save_for_backward(x_ni, weight)
        # Under activation recomputation, the saved weight is another tensor with the same values.
        ctx.layer, ctx.parameter, ctx.counts = layer, weight, counts
        return grouped.grouped_linear(x_ni, layer.weights_of(weight), counts, layer.kernels)

    @staticmethod
    def backward(ctx: Any, grad_no: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_ni, weight = ctx.saved_tensors
        layer, counts = ctx.layer, ctx.counts
        grad_no = grad_no.contiguous()
        grad_x_ni = None
        if ctx.needs_input_grad[1]:
            grad_x_ni = grouped.grouped_linear(grad_no, layer.weights_of(weight).mT, counts, layer.kernels)
        left, right = (x_ni, grad_no) if layer.transposed else (grad_no, x_ni)
        gradient = GroupedWeightGradient(left, right, counts, layer.kernels)
        return None, grad_x_ni, give(layer.weight_gradients, ctx.parameter, gradient), None


class GroupedLinear(SplitLayer):
    """y = x W_e^T for the rows of every expert e, without biases.

    Args:
        experts: number of experts.
        rows: rows of each expert's part of the weight.
        columns: columns of the weight.
        transposed: whether rows are input features; false: output features.

    Attributes:
        experts: number of experts of this rank.
        kernels: implementation of the GEMMs.
    """

    def __init__(self, experts: int, rows: int, columns: int, *, transposed: bool) -> None:
        super().__init__()
        self.experts, self.transposed, self.kernels = experts, transposed, TORCH
        self.weight = nn.Parameter(torch.empty(experts * rows, columns))

    def narrow(self, experts: int, rows: int) -> None:
        """Keeps a number of experts, and of rows of each; on the meta device."""
        self.experts = experts
        self.weight = nn.Parameter(self.weight.new_empty(experts * rows, self.weight.shape[1]))

    def weights_of(self, weight: Tensor) -> Tensor:
        """A view of the stacked weight, [e, output features, input features]."""
        weights = weight.unflatten(0, (self.experts, -1))
        return weights.mT if self.transposed else weights

    def forward(self, x_ni: Tensor, counts: RowCounts) -> Tensor:
        """[n, i] -> [n, o].

        Args:
            x_ni: rows, sorted by expert.
            counts: number of rows of each of this rank's experts.
        """
        out_no: Tensor = _GroupedLinear.apply(self, x_ni, self.weight, counts)
        return out_no
