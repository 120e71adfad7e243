"""Fused dropout of hidden states, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from tests.ops.accuracy import check_errors, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")
PLACES = torch.tensor([5, 2, 9])


def mask(batch: int) -> DropoutMask:
    return DropoutMask(site_key(1, "mlp_dropout"), threshold_of(0.3), torch.arange(batch) + 7)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Input, residual and the gradient of the result."""
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def both(x: Tensor, residual: Tensor | None, grad: Tensor, kernels: Kernels) -> list[Tensor]:
    """The result and the gradients."""

    def dropped(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return dropout(x, mask(len(x)), PLACES[: x.shape[1]], residual, kernels)

    return outputs_and_gradients(dropped, [x] if residual is None else [x, residual], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 2, 11), (40, 3, 1000)])
@pytest.mark.parametrize("residual", [True, False])
def test_error_is_within_twice_torchs(residual: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches a wrong vector tail, a scale in bf16, a masked residual gradient, and another mask in backward."""
    x, other, grad = inputs(shape, dtype)
    added = other if residual else None
    exact = both(x.double(), None if added is None else added.double(), grad.double(), TORCH)
    found, eager = both(x, added, grad, FUSED), both(x, added, grad, TORCH)
    assert len(found) == len(exact) == 2 + residual
    check_errors(found, eager, exact)
    keep = mask(len(x)).keep(1, PLACES[: x.shape[1]], x.shape[2])[:, 0]
    assert torch.equal(found[1] != 0, keep & (grad != 0))


def test_strided_empty_and_nonfinite_inputs_are_right() -> None:
    """Catches a kernel that reads a view as if it were contiguous, fails on an empty tensor, or hides a NaN."""
    x, residual, grad = (y.transpose(1, 2) for y in inputs((6, 10, 3), torch.float32))
    for ours, right in zip(both(x, residual, grad, FUSED), both(x, residual, grad, TORCH), strict=True):
        torch.testing.assert_close(ours, right)
    assert both(x[:0], residual[:0], grad[:0], FUSED)[1].shape == (0, 3, 10)
    assert dropout(torch.full((1, 3, 50), float("nan")), mask(1), kernels=FUSED).isnan().all()


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration under which torch.compile or autograd goes wrong."""
    x, residual, _ = inputs((2, 3, 20), torch.float32)
    samples, key, threshold, _ = mask(2).arguments
    leaves = x.detach().requires_grad_(), residual.detach().requires_grad_()
    torch.library.opcheck(torch.ops.megads.dropout.default, (*leaves, PLACES, samples, key, threshold))
