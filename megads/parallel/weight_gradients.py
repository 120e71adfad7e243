"""Backward in two parts: the gradients of linear layers' weights may be put off (Qi et al. 2023, zero bubble).

The gradient of an input is what the previous pipeline stage waits for; that of a weight is due at the end of the step.
Only matrix products are worth putting off: biases, norms and embeddings stay where autograd computes them.

Shape suffixes: b = batch, s = sequence, i = local input features, o = local output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megads.ops import linear as products

WeightGradient = Callable[[], Tensor]
"""Computes a weight's gradient; to be called once. Holds the layer's input and the gradient of its output."""


class PutOff:
    """Weight gradients that one backward pass owes, in the order in which it came to them."""

    def __init__(self) -> None:
        self._owed: list[tuple[nn.Parameter, WeightGradient]] = []

    def add(self, weight: nn.Parameter, compute: WeightGradient) -> None:
        """Takes note of a gradient."""
        self._owed.append((weight, compute))

    def settle(self, take: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Computes every gradient, hands it over with its weight and frees what it was computed from."""
        self._owed.reverse()
        while self._owed:
            weight, compute = self._owed.pop()
            take(weight, compute())


class WeightGradients:
    """Says to the linear layers of a rank whether the backward pass that runs puts off the gradients of weights."""

    def __init__(self) -> None:
        self._open: PutOff | None = None

    @contextmanager
    def put_off(self) -> Iterator[PutOff]:
        """The backward pass inside leaves the gradients of weights in what is yielded."""
        assert self._open is None, "a backward pass inside of another one"
        self._open = PutOff()
        try:
            yield self._open
        finally:
            self._open = None

    @property
    def puts_off(self) -> bool:
        """Whether the backward pass that runs puts them off."""
        return self._open is not None

    def later(self, weight: nn.Parameter, compute: WeightGradient) -> None:
        """Puts off the gradient of a weight."""
        assert self._open is not None
        self._open.add(weight, compute)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bsi: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        gradients: WeightGradients | None,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        # Under recomputation what was saved is another tensor of the same values.
        ctx.parameter = weight
        ctx.gradients, ctx.has_bias, ctx.fused = gradients, bias is not None, fused
        return products.linear(x_bsi, weight, bias, fused)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        fused = ctx.fused
        grad_x_bsi = products.input_gradient(grad_bso, weight, fused) if ctx.needs_input_grad[0] else None
        grad_bias = grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None
        if ctx.gradients is not None and ctx.gradients.puts_off:
            ctx.gradients.later(ctx.parameter, lambda: products.weight_gradient(grad_bso, x_bsi, fused))
            return grad_x_bsi, None, grad_bias, None, None
        return grad_x_bsi, products.weight_gradient(grad_bso, x_bsi, fused), grad_bias, None, None


def linear(
    x_bsi: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    gradients: WeightGradients | None,
    fused: bool = False,
) -> Tensor:
    """x W^T + b, whose weight's gradient can be put off.

    Args:
        x_bsi: [b, s, i].
        weight: [o, i].
        bias: [o], or None.
        gradients: decides in the backward pass; None where none is ever put off.
        fused: products by `megads.ops.linear`'s choice, not by torch's.

    Returns:
        [b, s, o], in x's dtype; gradients are those of F.linear.
    """
    if not torch.is_grad_enabled() or (gradients is None and not fused):
        return products.linear(x_bsi, weight, bias, fused)
    out_bso: Tensor = _SplitLinear.apply(x_bsi, weight, bias, gradients, fused)
    return out_bso


class SplitLayer(nn.Module):
    """A linear layer whose weight's gradient can be put off.

    Attributes:
        weight_gradients: of the rank, where its schedule splits the backward pass.
    """

    weight: nn.Parameter
    weight_gradients: WeightGradients | None = None


def split_backward(module: nn.Module, gradients: WeightGradients) -> None:
    """Lets the tensor-parallel linear layers of a module put off the gradients of their weights.

    Args:
        module: cut already; changed in place.
        gradients: of the rank.
    """
    for layer in module.modules():
        if isinstance(layer, SplitLayer):
            layer.weight_gradients = gradients
