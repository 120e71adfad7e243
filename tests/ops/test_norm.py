"""Tests the kernels of LayerNorm and RMSNorm against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tests.ops.accuracy import check_errors, check_threads, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")

EPS = 1e-5
Results = list[Tensor]


def tensors(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns input, residual, weight, bias, and the gradients of norm and sum."""
    generator = torch.Generator().manual_seed(rows * width)
    shapes = ((rows, width), (rows, width), (width,), (width,), (rows, width), (rows, width))
    x, residual, *others = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [found.to(dtype) for found in (3 * x + 1, residual, *others)]


def plain(x: Tensor, _residual: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    return (layer_norm(x, weight, bias, EPS, kernels),)


def plain_rms(x: Tensor, _residual: Tensor, weight: Tensor, _bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    return (rms_norm(x, weight, EPS, kernels),)


def plain_unbiased(x: Tensor, _residual: Tensor, weight: Tensor, _bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    return (layer_norm(x, weight, None, EPS, kernels),)


def added(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    return add_layer_norm(x, residual, weight, bias, EPS, kernels)


def added_rms(x: Tensor, residual: Tensor, weight: Tensor, _bias: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    return add_rms_norm(x, residual, weight, EPS, kernels)


NORMS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "layer norm": plain,
    "layer norm, no bias": plain_unbiased,
    "rms norm": plain_rms,
    "sum, layer norm": added,
    "sum, rms norm": added_rms,
}


def both(name: str, inputs: list[Tensor], kernels: Kernels) -> Results:
    """Returns the outputs and the gradients of the inputs that are used."""
    grads = inputs[4:] if name.startswith("sum") else inputs[4:5]
    return outputs_and_gradients(lambda *leaves: NORMS[name](*leaves, kernels), inputs[:4], *grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(7, 16), (3, 37), (131, 64), (2051, 50)])
@pytest.mark.parametrize("name", NORMS)
def test_error_is_within_twice_torchs(name: str, rows: int, width: int, dtype: torch.dtype) -> None:
    """Catches wrong results in the tail of rows or columns, accumulation in bf16, and a residual's gradient that is
    lost or added twice."""
    inputs = tensors(rows, width, dtype)
    exact = both(name, [x.double() for x in inputs], TORCH)
    check_errors(both(name, inputs, FUSED), both(name, inputs, TORCH), exact)


@pytest.mark.parametrize("name", ["layer norm", "rms norm"])
def test_extreme_values_stay_accurate(name: str) -> None:
    """Catches the variance as E[x^2] - E[x]^2 (a large mean cancels it), a division by a zero standard deviation, and a
    NaN that is not propagated."""
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    x[0] += 3e4
    x[1] = 7.0
    x[2] *= 1e15
    inputs = [x, *tensors(4, 40, torch.float32)[1:]]
    exact = both(name, [y.double() for y in inputs], TORCH)
    for ours, right in zip(both(name, inputs, FUSED)[:2], exact[:2], strict=True):
        # The mean of the first row is rounded to 0.001 of its standard deviation.
        torch.testing.assert_close(ours[:1].double(), right[:1], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours[1:].double(), right[1:], rtol=1e-5, atol=1e-5 * float(right.abs().max()))
    for value in (float("nan"), float("inf")):
        x[3, 39] = value
        out = both(name, inputs, FUSED)[0]
        assert not out[3].isfinite().all() and out[:3].isfinite().all()


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that fails on an empty tensor."""
    x, residual, weight, bias, grad, _ = tensors(12, 24, torch.float32)
    strided = [y.view(2, 6, 24).transpose(0, 1) for y in (x, residual)]
    expected = added(*(y.contiguous() for y in strided), weight, bias, kernels=TORCH)
    for ours, right in zip(added(*strided, weight, bias, kernels=FUSED), expected, strict=True):
        assert ours.shape == (6, 2, 24)
        torch.testing.assert_close(ours, right)
    expanded = both("layer norm", [x, residual, weight, bias, grad[:1].expand(12, 24)], FUSED)
    torch.testing.assert_close(
        expanded[1], both("layer norm", [x, residual, weight, bias, grad[:1].repeat(12, 1)], FUSED)[1]
    )
    empty = both("sum, layer norm", [x[:0], residual[:0], weight, bias, grad[:0], grad[:0]], FUSED)
    assert empty[0].shape == (0, 24) and (empty[4] == 0).all() and (empty[5] == 0).all()


def test_a_result_without_a_gradient_is_allowed() -> None:
    """Catches a gradient that is missing where only the sum, or only the norm, reaches the loss."""
    inputs = tensors(9, 20, torch.float32)
    for used in (0, 1):
        grads = []
        for kernels in (FUSED, TORCH):
            leaves = [x.detach().requires_grad_() for x in inputs[:4]]
            added(*leaves, kernels=kernels)[used].backward(inputs[4])
            grads.append([leaf.grad for leaf in leaves])
        for ours, right in zip(*grads, strict=True):
            assert (ours is None) == (right is None)
            if ours is not None:
                torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_the_same_bits_at_any_number_of_threads(name: str) -> None:
    """Catches one partial sum of the weight's gradient per thread: ranks and resumes would diverge."""
    inputs = tensors(1500, 130, torch.float32)
    check_threads(lambda: both(name, inputs, FUSED), 1, 2, 3, 2)


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration that breaks torch.compile or autograd."""
    x, residual, weight, bias, grad, grad_sum = tensors(5, 20, torch.float32)
    leaves = [y.detach().requires_grad_() for y in (x, residual, weight, bias)]
    ops = torch.ops.megads
    torch.library.opcheck(ops.norm_forward.default, (leaves[0], leaves[2], None, EPS, False))
    torch.library.opcheck(ops.add_norm_forward.default, (*leaves, EPS, True))
    statistics = ops.norm_forward(x, weight, bias, EPS, True)[1]
    torch.library.opcheck(ops.norm_backward.default, (grad, grad_sum, x, weight, statistics, True, True))
    outputs = []
    for function in (torch.compile(added), added):
        leaves = [y.detach().requires_grad_() for y in (x, residual, weight, bias)]
        out = function(*leaves, kernels=FUSED)
        torch.autograd.backward(out, (grad, grad_sum))
        outputs.append([*out, *(leaf.grad for leaf in leaves)])
    for ours, right in zip(*outputs, strict=True):
        assert torch.equal(ours, right)


def test_fp64_is_left_to_torch() -> None:
    """Catches an fp64 reference that is computed in fp32."""
    x, _, weight, bias, *_ = tensors(3, 8, torch.float64)
    assert torch.equal(layer_norm(x, weight, bias, EPS, FUSED), layer_norm(x, weight, bias, EPS, TORCH))
