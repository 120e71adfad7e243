"""Linear layers whose weight gradients may be deferred."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.ops import processor
from megads.ops.config import FUSED
from megads.parallel.weight_gradients import WeightGradient, WeightGradients, linear


def inputs(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 24, 48), (80, 48), (80,), (2, 24, 80))
    )
    return x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias), grad


class Taken:
    """Receiver of a step's weight gradients, which passes them to a function."""

    def __init__(self, take: Callable[[nn.Parameter, WeightGradient], None]) -> None:
        self.add = take

    def done(self, _weight: nn.Parameter) -> None:
        """Does nothing."""


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_weight_gradients_equal_the_plain_layers_bitwise(dtype: torch.dtype, later: bool) -> None:
    """Catches other GEMMs than autograd's, by which a split and a whole backward pass would differ."""
    x, weight, bias, grad = inputs(dtype)
    F.linear(x, weight, bias).backward(grad)
    expected = [p.grad for p in (x, weight, bias)]
    x, weight, bias, grad = inputs(dtype)
    gradients = WeightGradients()
    out = linear(x, weight, bias, gradients)
    if later:
        with gradients.defer() as deferred:
            out.backward(grad)
        assert weight.grad is None and x.grad is not None and bias.grad is not None
        deferred.compute(Taken(lambda parameter, gradient: setattr(parameter, "grad", gradient.compute())))
    else:
        out.backward(grad)
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip((x, weight, bias), expected, strict=True))


def test_activations_are_freed_with_their_weight_gradient() -> None:
    """Catches activations kept until all weight gradients of a pass are done, and gradients computed twice."""
    gradients = WeightGradients()
    weights, seen, alive = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)], [], []
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    watched = []
    for weight in weights:
        hidden = linear(hidden, weight, None, gradients)
        watched.append(weakref.ref(hidden))
    with gradients.defer() as deferred:
        hidden.sum().backward()
    del hidden

    def take(weight: nn.Parameter, _: WeightGradient) -> None:
        seen.append(next(i for i, known in enumerate(weights) if known is weight))
        gc.collect()
        alive.append(sum(reference() is not None for reference in watched))

    deferred.compute(Taken(take))
    assert seen == [2, 1, 0], "in the order of the backward pass"
    assert alive[-1] == 0 and sorted(alive, reverse=True) == alive
    deferred.compute(Taken(take))
    assert len(seen) == 3


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("later", [False, True])
def test_weight_gradients_may_go_straight_to_main_grad(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a weight gradient that autograd receives as well, one that is added twice, and a hook that sees it."""
    monkeypatch.setattr(processor, "is_mkl_slow", lambda: True)
    x, weight, bias, grad = inputs(torch.float32)
    sums, seen = torch.zeros_like(weight), []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))

    def take(parameter: nn.Parameter, gradient: WeightGradient) -> None:
        assert parameter is weight
        gradient.add_to(sums, first=False)

    gradients = WeightGradients(Taken(take))
    for _ in range(2):
        out = linear(x, weight, bias, gradients, kernels=FUSED)
        if later:
            with gradients.defer() as deferred:
                out.backward(grad)
            deferred.compute(Taken(take))
        else:
            out.backward(grad)
    assert weight.grad is None and all(gradient is None for gradient in seen)
    assert bias.grad is not None and x.grad is not None
    torch.testing.assert_close(sums, 2 * torch.einsum("bso,bsi->oi", grad, x.detach()))


def test_gradients_that_no_kernel_accumulates_go_to_autograd() -> None:
    """Catches gradients in fp64 or of torch's GEMMs that needlessly bypass autograd."""
    x, weight, bias, grad = inputs(torch.float32)
    taken = []
    gradients = WeightGradients(Taken(lambda parameter, gradient: taken.append(parameter)))
    linear(x, weight, bias, gradients).backward(grad)
    assert weight.grad is not None and not taken
