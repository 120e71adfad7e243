"""The kernel that applies a dropout's mask against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.dropout import apply_mask
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Input, residual and the gradient of the result; the mask is the last one."""
    generator = torch.Generator().manual_seed(len(shape))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    return [*found, torch.empty(shape, dtype=torch.uint8).bernoulli_(0.7, generator=generator)]


def both(x: Tensor, residual: Tensor | None, grad: Tensor, keep: Tensor, fused: bool) -> list[Tensor]:
    """The result and the gradients."""
    leaves = [None if y is None else y.detach().requires_grad_() for y in (x, residual)]
    assert leaves[0] is not None
    out = apply_mask(leaves[0], keep, 1 / 0.7, leaves[1], fused)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 7, 11), (40, 1000)])
@pytest.mark.parametrize("residual", [True, False])
def test_error_is_that_of_the_dtype(residual: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches a wrong tail, a scale in bf16, and a residual's gradient that is masked."""
    x, other, grad, keep = inputs(shape, dtype)
    added = other if residual else None
    exact = both(x.double(), None if added is None else added.double(), grad.double(), keep, False)
    found, eager = both(x, added, grad, keep, True), both(x, added, grad, keep, False)
    assert len(found) == len(exact) == 2 + residual
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        check_error(ours, theirs, right)
    assert (found[1][keep == 0] == 0).all()


def test_layouts_of_memory() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that falls over nothing."""
    x, residual, grad, keep = (y.T for y in inputs((6, 10), torch.float32))
    for ours, right in zip(both(x, residual, grad, keep, True), both(x, residual, grad, keep, False), strict=True):
        torch.testing.assert_close(ours, right)
    assert both(x[:0], residual[:0], grad[:0], keep[:0], True)[1].shape == (0, 6)


def test_what_torch_must_know() -> None:
    """Catches a schema, fake or gradient registration under which torch.compile or autograd goes wrong."""
    x, residual, _, keep = inputs((5, 20), torch.float32)
    leaves = x.detach().requires_grad_(), residual.detach().requires_grad_()
    torch.library.opcheck(torch.ops.megads.dropout.default, (leaves[0], keep, 1.5, leaves[1]))
