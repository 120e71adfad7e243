"""The fused bias-GELU kernel against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.activation import bias_gelu
from megads.ops.config import FUSED, TORCH, Kernels
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")


def both(x: Tensor, bias: Tensor, grad: Tensor, kernels: Kernels) -> list[Tensor]:
    """The output and the gradients of input and bias."""
    leaves = [x.detach().requires_grad_(), bias.detach().requires_grad_()]
    out = bias_gelu(*leaves, kernels)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def inputs(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Input, bias and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows + width)
    shapes = ((rows, width), (width,), (rows, width))
    return [(2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 37), (1100, 64)])
def test_error_is_within_twice_torchs(rows: int, width: int, dtype: torch.dtype) -> None:
    """Catches a wrong vector tail, a bias of the wrong column, and a bias gradient that misses a block of rows."""
    tensors = inputs(rows, width, dtype)
    exact = both(*(x.double() for x in tensors), kernels=TORCH)
    for found, eager, right in zip(both(*tensors, kernels=FUSED), both(*tensors, kernels=TORCH), exact, strict=True):
        check_error(found, eager, right)


def test_the_same_bits_at_any_number_of_threads() -> None:
    """Catches one partial sum of the bias gradient per thread: ranks and resumes would diverge."""
    tensors = inputs(900, 130, torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(both(*tensors, kernels=FUSED))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that crashes on an empty tensor."""
    x, bias, grad = inputs(6, 10, torch.float32)
    strided = [y.view(2, 3, 10).transpose(0, 1) for y in (x, grad)]
    expected = both(strided[0].contiguous(), bias, strided[1].contiguous(), TORCH)
    for ours, right in zip(both(strided[0], bias, strided[1], FUSED), expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert (both(x[:0], bias, grad[:0], FUSED)[2] == 0).all()


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration with which torch.compile or autograd fails."""
    x, bias, grad = inputs(5, 20, torch.float32)
    leaves = (x.detach().requires_grad_(), bias.detach().requires_grad_())
    torch.library.opcheck(torch.ops.megads.bias_gelu_forward.default, leaves)
    torch.library.opcheck(torch.ops.megads.bias_gelu_backward.default, (grad, x, bias))
