"""Weight gradients (wgrads) of linear layers: deferred (Qi et al. 2023, zero bubble), or accumulated into main_grad.

The previous pipeline stage waits for the input gradient; the weight gradient is needed only at the end of the step.
Only GEMMs are worth deferring: gradients of biases, norms and embeddings are computed by autograd as usual. A GEMM that
accumulates in fp32 can add to an fp32 main_grad without rounding to the weight's dtype first.

Shape suffixes: b = batch, s = sequence, i = local input features, o = local output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megads.ops import linear as gemm
from megads.ops.config import FUSED, TORCH, KernelOp, Kernels


class WeightGradient:
    """A weight gradient to be computed later, exactly once; holds the layer's input and its output gradient."""

    def __init__(self, grad_bso: Tensor, x_bsi: Tensor | Callable[[], Tensor], kernels: Kernels) -> None:
        """Stores the operands.

        Args:
            grad_bso: gradient of the output, [b, s, o].
            x_bsi: input [b, s, i], or a function that all-gathers it.
            kernels: implementation of the GEMM.
        """
        self._grad_bso, self._x_bsi, self._kernels = grad_bso, x_bsi, kernels

    @property
    def straight(self) -> bool:
        """Whether `add_to` fuses accumulation into the GEMM; otherwise it is the same as adding up `compute`."""
        return self._kernels.fused(KernelOp.linear) and gemm.fuses_accumulation(self._grad_bso, self._input())

    def compute(self) -> Tensor:
        """Returns the gradient, [o, i] in the weight's dtype."""
        return gemm.weight_gradient(self._grad_bso, self._input(), self._kernels)

    def add_to(self, main_grad_oi: Tensor, first: bool) -> None:
        """Accumulates the gradient into main_grad.

        Args:
            main_grad_oi: fp32 [o, i], contiguous.
            first: whether to overwrite main_grad instead.
        """
        gemm.add_weight_gradient(main_grad_oi, self._grad_bso, self._input(), first, self._kernels)

    def _input(self) -> Tensor:
        if not isinstance(self._x_bsi, Tensor):
            self._x_bsi = self._x_bsi()
        return self._x_bsi


class Addend(Protocol):
    """A weight gradient, or a part of it, that can be accumulated into a main_grad."""

    def add_to(self, main_grad: Tensor, first: bool, /) -> None:
        """See `WeightGradient.add_to`."""


class MainGrads(Protocol):
    """The fp32 gradients of a step, accumulated over micro-batches; `main_grad` in Megatron-LM."""

    def add(self, weight: nn.Parameter, gradient: Addend) -> None:
        """Computes a weight gradient, or a part of it, and accumulates it."""

    def done(self, weight: nn.Parameter) -> None:
        """Marks a weight's gradient of the current backward pass as complete."""


class SmallGradients:
    """Gradients of small parameters (biases, norms), accumulated into their main_grads together.

    A model has more of these than of matrices, and the launch of a kernel for each takes longer than the kernel.
    """

    MOST = 1 << 16
    """Elements of a gradient; larger ones are worth a kernel of their own, and should be freed at once."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor, bool]] = {}

    def holds(self, slot: int) -> bool:
        """Whether the gradient of a slot is held; `accumulate` must come before another one of it."""
        return slot in self._held

    def add(self, slot: int, main_grad: Tensor, gradient: Tensor, first: bool) -> None:
        """Holds a gradient.

        Args:
            slot: number of the parameter.
            main_grad: its fp32 main_grad.
            gradient: in main_grad's shape.
            first: whether to overwrite main_grad instead of adding to it.
        """
        self._held[slot] = main_grad, gradient, first

    def accumulate(self) -> None:
        """Accumulates the gradients held, and frees them."""
        held, self._held = self._held.values(), {}
        if firsts := [main_grad for main_grad, _, first in held if first]:
            torch._foreach_copy_(firsts, [gradient for _, gradient, first in held if first])
        if main_grads := [main_grad for main_grad, _, first in held if not first]:
            gradients = [gradient for _, gradient, first in held if not first]
            if gradients[0].is_cuda and gradients[0].dtype is not torch.float32:
                # torch has one kernel for many additions if all tensors have the same dtype.
                wide = torch.empty(sum(map(torch.numel, gradients)), dtype=torch.float32, device=gradients[0].device)
                places = wide.split([gradient.numel() for gradient in gradients])
                wide_gradients = [place.view_as(gradient) for place, gradient in zip(places, gradients, strict=True)]
                torch._foreach_copy_(wide_gradients, gradients)
                gradients = wide_gradients
            torch._foreach_add_(main_grads, gradients)


def add_whole(main_grads: MainGrads, weight: nn.Parameter, gradient: Addend) -> None:
    """Accumulates the complete gradient of a weight in the current backward pass."""
    main_grads.add(weight, gradient)
    main_grads.done(weight)


class DeferredWgrads:
    """Weight gradients deferred by one backward pass, in the order of that pass."""

    def __init__(self) -> None:
        self._deferred: list[tuple[nn.Parameter, WeightGradient]] = []

    def add(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        """Defers a gradient."""
        self._deferred.append((weight, gradient))

    def compute(self, main_grads: MainGrads) -> None:
        """Accumulates every gradient into main_grad, and frees its operands."""
        self._deferred.reverse()
        while self._deferred:
            add_whole(main_grads, *self._deferred.pop())


class WeightGradients:
    """Handles the weight gradients of a rank's linear layers in the current backward pass: defer, accumulate or return.

    Attributes:
        main_grads: main_grads of the step; if None, gradients that are not deferred are returned to autograd.
    """

    def __init__(self, main_grads: MainGrads | None = None) -> None:
        self._open: DeferredWgrads | None = None
        self._aliases: Mapping[nn.Parameter, nn.Parameter] | None = None
        self._added: dict[nn.Parameter, None] = {}
        self.main_grads = main_grads

    @contextmanager
    def defer(self) -> Iterator[DeferredWgrads]:
        """Context in which a backward pass defers its weight gradients to the yielded object."""
        assert self._open is None, "a backward pass inside of another one"
        self._open = DeferredWgrads()
        try:
            yield self._open
        finally:
            self._open = None

    @contextmanager
    def in_chunks(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Context in which weight gradients are computed in several parts: each is accumulated into main_grad at once,
        none is deferred, and they are complete at the end.

        Args:
            aliases: the layers' parameters, by those that they have meanwhile.
        """
        assert self._aliases is None, "chunks inside of a chunk"
        self._aliases, self._added = aliases, {}
        try:
            yield
        finally:
            self._aliases = None
        for weight in self._added:
            assert self.main_grads is not None
            self.main_grads.done(weight)

    @property
    def defers(self) -> bool:
        """Whether the current backward pass defers weight gradients."""
        return self._open is not None and self._aliases is None

    def give(self, weight: nn.Parameter, gradient: WeightGradient) -> Tensor | None:
        """Returns the gradient for autograd; None if it is deferred, or was accumulated into main_grad."""
        if self._aliases is not None:
            if self.main_grads is None:
                return gradient.compute()
            self.main_grads.add(self._aliases[weight], gradient)
            self._added[self._aliases[weight]] = None
        elif self._open is not None:
            self._open.add(weight, gradient)
        elif self.main_grads is not None and gradient.straight:
            add_whole(self.main_grads, weight, gradient)
        else:
            return gradient.compute()
        return None


class TiedGradient(WeightGradients):
    """Accumulates in fp32 the gradients of an embedding and of the output projection tied to it, for autograd.

    Autograd would round both to the weight's dtype before adding them. The projection's backward pass runs first and
    stores its gradient here; the embedding's backward pass adds to it and returns the sum, rounded once. For engines
    that leave gradients to autograd; others use `alias_of` and an fp32 main_grad.

    Args:
        shape: shape of the weight before ZeRO-3 shards it.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = shape
        self._sum: Tensor | None = None

    def give(self, weight: nn.Parameter, gradient: Addend) -> None:
        """Stores the projection's gradient, or a part of it, for the embedding."""
        first = self._sum is None
        if self._sum is None:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._sum = torch.empty(self._shape, dtype=dtype, device=weight.device)
        gradient.add_to(self._sum, first)

    def take(self, weight: nn.Parameter, gradient: Addend) -> Tensor:
        """Adds the embedding's gradient, returns the sum in the weight's dtype, and resets."""
        self.give(weight, gradient)
        assert self._sum is not None
        total, self._sum = self._sum, None
        return total.to(weight.dtype)


def give(gradients: WeightGradients | None, weight: nn.Parameter, gradient: WeightGradient) -> Tensor | None:
    """`gradients.give`, or the computed gradient if `gradients` is None."""
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
        # Under activation recomputation, the saved weight is another tensor with the same values.
        ctx.parameter = weight
        ctx.gradients, ctx.has_bias, ctx.kernels = gradients, bias is not None, kernels
        return gemm.linear(x_bsi, weight, bias, kernels)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        kernels = ctx.kernels
        grad_x_bsi = gemm.input_gradient(grad_bso, weight, kernels) if ctx.needs_input_grad[0] else None
        grad_bias = grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None
        grad_weight = give(ctx.gradients, ctx.parameter, WeightGradient(grad_bso, x_bsi, kernels))
        return grad_x_bsi, grad_weight, grad_bias, None, None


_COMPILED: WeakValueDictionary[int, SplitLayer] = WeakValueDictionary()
"""Layers of compiled blocks that accumulate weight gradients in main_grad, by the address of their weight."""


def note_compiled(layer: SplitLayer) -> None:
    """Makes a layer known to the backward passes of compiled blocks; call when its weight has its final address."""
    _COMPILED[layer.weight.data_ptr()] = layer


@functools.cache
def register_compiled_backward() -> None:
    """Registers the operator `megads::linear_backward` for graphs of torch.compile: the gradient of a linear layer's
    input; the product that is the weight's gradient is accumulated into main_grad.

    To the compiler it is a function of its arguments: main_grad, which is allocated during a step and whose first
    gradient overwrites it, is found by the weight's address. A compiled graph is the same for all layers of a kind.
    """

    @torch.library.custom_op("megads::linear_backward", mutates_args=())
    def backward(grad_bso: Tensor, x_bsi: Tensor, weight: Tensor, fused: bool) -> Tensor:
        layer, kernels = _COMPILED[weight.data_ptr()], FUSED if fused else TORCH
        assert layer.weight_gradients is not None and layer.weight_gradients.main_grads is not None
        assert not layer.weight_gradients.defers, "a compiled graph reuses the memory of the operands"
        grad_x_bsi = gemm.input_gradient(grad_bso, weight, kernels)
        add_whole(layer.weight_gradients.main_grads, layer.weight, WeightGradient(grad_bso, x_bsi, kernels))
        return grad_x_bsi

    @backward.register_fake
    def _(grad_bso: Tensor, x_bsi: Tensor, *_: object) -> Tensor:
        return grad_bso.new_empty(x_bsi.shape)


class _CompiledLinear(torch.autograd.Function):
    """`_SplitLinear` in a graph of torch.compile, for gradients that are accumulated in main_grad."""

    @staticmethod
    def forward(ctx: Any, x_bsi: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
        ctx.save_for_backward(x_bsi, weight)
        ctx.has_bias, ctx.fused = bias is not None, fused
        return gemm.linear(x_bsi, weight, bias, FUSED if fused else TORCH)

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, None, Tensor | None, None]:  # type: ignore[override]
        x_bsi, weight = ctx.saved_tensors
        grad_x_bsi = torch.ops.megads.linear_backward(grad_bso, x_bsi, weight, ctx.fused)
        return grad_x_bsi, None, grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None, None


def linear(
    x_bsi: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    gradients: WeightGradients | None,
    kernels: Kernels = TORCH,
) -> Tensor:
    """x W^T + b, whose weight gradient can be deferred or accumulated into main_grad.

    Args:
        x_bsi: [b, s, i].
        weight: [o, i].
        bias: [o], or None.
        gradients: handles the weight gradient in the backward pass; None returns it to autograd.
        kernels: implementation of the GEMMs.

    Returns:
        [b, s, o], in x's dtype; gradients are those of F.linear.
    """
    if not torch.is_grad_enabled() or (gradients is None and not kernels.fused(KernelOp.linear)):
        return gemm.linear(x_bsi, weight, bias, kernels)
    out_bso: Tensor
    if torch.compiler.is_compiling():
        if gradients is None:
            return gemm.linear(x_bsi, weight, bias, kernels)
        out_bso = _CompiledLinear.apply(x_bsi, weight, bias, kernels.fused(KernelOp.linear))
        return out_bso
    out_bso = _SplitLinear.apply(x_bsi, weight, bias, gradients, kernels)
    return out_bso


class SplitLayer(nn.Module):
    """A layer whose weight gradient can be accumulated into main_grad or, if the layer is linear, deferred.

    Attributes:
        weight_gradients: handles the weight gradient; None leaves it to autograd.
    """

    weight: nn.Parameter
    weight_gradients: WeightGradients | None = None


def split_backward(module: nn.Module, gradients: WeightGradients) -> None:
    """Makes the tensor-parallel layers of a module use `gradients` for their weight gradients.

    Args:
        module: sharded module; changed in place.
        gradients: handler of the rank's weight gradients.
    """
    for layer in module.modules():
        if isinstance(layer, SplitLayer):
            layer.weight_gradients = gradients
