"""The gradients of linear layers' weights: deferred (Qi et al. 2023, zero bubble), or added straight to fp32 main_grad.

The gradient of an input is what the previous pipeline stage waits for; that of a weight is due at the end of the step.
Only matrix products are worth deferring: biases, norms and embeddings stay where autograd computes them. And a
product whose kernel keeps its sums in fp32 need not round them to the weight's dtype before they are added up.

Shape suffixes: b = batch, s = sequence, i = local input features, o = local output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megads.ops import linear as products
from megads.ops.config import TORCH, KernelOp, Kernels


class WeightGradient:
    """A weight's gradient that is yet to be computed, once; holds the layer's input and its output's gradient."""

    def __init__(self, grad_bso: Tensor, x_bsi: Tensor | Callable[[], Tensor], kernels: Kernels) -> None:
        """Computes nothing yet.

        Args:
            grad_bso: [b, s, o].
            x_bsi: [b, s, i], or what gathers it.
            kernels: whose kernel multiplies.
        """
        self._grad_bso, self._x_bsi, self._kernels = grad_bso, x_bsi, kernels

    @property
    def straight(self) -> bool:
        """Whether `add_to` accumulates inside the product; else it is no better than adding up `compute`'s."""
        return self._kernels.fused(KernelOp.linear) and products.fuses_accumulation(self._grad_bso, self._input())

    def compute(self) -> Tensor:
        """Returns it: [o, i] in the weight's dtype."""
        return products.weight_gradient(self._grad_bso, self._input(), self._kernels)

    def add_to(self, main_grad_oi: Tensor, first: bool) -> None:
        """Adds it to fp32 main_grad [o, i], or writes it over what that holds.

        Args:
            main_grad_oi: contiguous.
            first: what it holds does not count.
        """
        products.add_weight_gradient(main_grad_oi, self._grad_bso, self._input(), first, self._kernels)

    def _input(self) -> Tensor:
        if not isinstance(self._x_bsi, Tensor):
            self._x_bsi = self._x_bsi()
        return self._x_bsi


class Addend(Protocol):
    """A weight's gradient, or a part of it, that can be computed in its main_grad."""

    def add_to(self, main_grad: Tensor, first: bool, /) -> None:
        """See `WeightGradient.add_to`."""


class MainGrads(Protocol):
    """The fp32 gradients of a step, accumulated over micro-batches; `main_grad` in Megatron."""

    def add(self, weight: nn.Parameter, gradient: Addend) -> None:
        """Computes a weight's gradient, or a part of it, and adds it up."""

    def done(self, weight: nn.Parameter) -> None:
        """The backward pass that runs adds no more to this weight's."""


def add_whole(main_grads: MainGrads, weight: nn.Parameter, gradient: Addend) -> None:
    """Adds all that the backward pass that runs has for a weight."""
    main_grads.add(weight, gradient)
    main_grads.done(weight)


class DeferredWgrads:
    """Weight gradients that one backward pass has deferred, in the order in which it came to them."""

    def __init__(self) -> None:
        self._deferred: list[tuple[nn.Parameter, WeightGradient]] = []

    def add(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        """Takes note of a gradient."""
        self._deferred.append((weight, gradient))

    def compute(self, main_grads: MainGrads) -> None:
        """Adds every gradient to main_grad, and frees what it was computed from."""
        self._deferred.reverse()
        while self._deferred:
            add_whole(main_grads, *self._deferred.pop())


class WeightGradients:
    """Says to the linear layers of a rank what becomes of their weights' gradients in the backward pass that runs.

    Attributes:
        main_grads: of the step; None leaves gradients that are not deferred to autograd.
    """

    def __init__(self, main_grads: MainGrads | None = None) -> None:
        self._open: DeferredWgrads | None = None
        self.main_grads = main_grads

    @contextmanager
    def defer(self) -> Iterator[DeferredWgrads]:
        """The backward pass inside defers the gradients of weights to what is yielded."""
        assert self._open is None, "a backward pass inside of another one"
        self._open = DeferredWgrads()
        try:
            yield self._open
        finally:
            self._open = None

    @property
    def defers(self) -> bool:
        """Whether the backward pass that runs defers them."""
        return self._open is not None

    def give(self, weight: nn.Parameter, gradient: WeightGradient) -> Tensor | None:
        """Returns what autograd is to add up; None where the gradient is deferred, or in main_grad already."""
        if self._open is not None:
            self._open.add(weight, gradient)
        elif self.main_grads is not None and gradient.straight:
            add_whole(self.main_grads, weight, gradient)
        else:
            return gradient.compute()
        return None


class TiedGradient(WeightGradients):
    """Adds the gradients of an embedding and of the output projection that shares its weight in fp32, for autograd.

    Autograd would round both to the weight's dtype and add them in it. The projection's backward pass comes first and
    leaves its own here; the embedding's adds to it, and returns the sum, rounded once. For engines that leave gradients
    to autograd; others have `alias_of` and a main_grad that is fp32 anyway.

    Args:
        shape: of the weight before ZeRO-3 cuts it.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = shape
        self._sum: Tensor | None = None

    def give(self, weight: nn.Parameter, gradient: Addend) -> None:
        """Keeps the projection's, or a part of it, for the embedding."""
        first = self._sum is None
        if self._sum is None:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._sum = torch.empty(self._shape, dtype=dtype, device=weight.device)
        gradient.add_to(self._sum, first)

    def take(self, weight: nn.Parameter, gradient: Addend) -> Tensor:
        """The sum with the embedding's, in the weight's dtype; forgets it."""
        self.give(weight, gradient)
        assert self._sum is not None
        total, self._sum = self._sum, None
        return total.to(weight.dtype)


def give(gradients: WeightGradients | None, weight: nn.Parameter, gradient: WeightGradient) -> Tensor | None:
    """`WeightGradients.give`; the gradient itself where there are none."""
    return gradient.compute() if gradients is None else gradients.give(weight, gradient)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bsi: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        gradients: WeightGradients | None,
        kernels: Kernels,
    ) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        # Under recomputation what was saved is another tensor of the same values.
        ctx.parameter = weight
        ctx.gradients, ctx.has_bias, ctx.kernels = gradients, bias is not None, kernels
        return products.linear(x_bsi, weight, bias, kernels)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        kernels = ctx.kernels
        grad_x_bsi = products.input_gradient(grad_bso, weight, kernels) if ctx.needs_input_grad[0] else None
        grad_bias = grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None
        grad_weight = give(ctx.gradients, ctx.parameter, WeightGradient(grad_bso, x_bsi, kernels))
        return grad_x_bsi, grad_weight, grad_bias, None, None


def linear(
    x_bsi: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    gradients: WeightGradients | None,
    kernels: Kernels = TORCH,
) -> Tensor:
    """x W^T + b, whose weight's gradient can be deferred or go straight to its main_grad.

    Args:
        x_bsi: [b, s, i].
        weight: [o, i].
        bias: [o], or None.
        gradients: decides in the backward pass; None where autograd gets them all.
        kernels: whose kernel multiplies.

    Returns:
        [b, s, o], in x's dtype; gradients are those of F.linear.
    """
    if not torch.is_grad_enabled() or (gradients is None and not kernels.fused(KernelOp.linear)):
        return products.linear(x_bsi, weight, bias, kernels)
    out_bso: Tensor = _SplitLinear.apply(x_bsi, weight, bias, gradients, kernels)
    return out_bso


class SplitLayer(nn.Module):
    """A layer whose weight's gradient can be deferred, if it is a linear one, or go straight to its main_grad.

    Attributes:
        weight_gradients: of the rank; None leaves the gradient to autograd.
    """

    weight: nn.Parameter
    weight_gradients: WeightGradients | None = None


def split_backward(module: nn.Module, gradients: WeightGradients) -> None:
    """Lets the tensor-parallel layers of a module hand over the gradients of their weights.

    Args:
        module: cut already; changed in place.
        gradients: of the rank.
    """
    for layer in module.modules():
        if isinstance(layer, SplitLayer):
            layer.weight_gradients = gradients
