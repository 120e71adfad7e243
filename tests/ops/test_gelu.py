"""The GELU kernel against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.activation import gelu
from megads.ops.config import FUSED, TORCH, Kernels
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")


def both(x: Tensor, grad: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = gelu(x, kernels)
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40,), (3, 5, 7), (64, 1031)])
def test_error_is_within_twice_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Catches a wrong constant, a wrong tail after the last full vector, and arithmetic in bf16."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (3 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    exact = both(x.double(), grad.double(), TORCH)
    for found, eager, right in zip(both(x, grad, FUSED), both(x, grad, TORCH), exact, strict=True):
        check_error(found, eager, right)


def test_large_values_do_not_overflow() -> None:
    """Catches exp overflowing to NaN or wrapping around: for large |x|, GELU is 0 or x and its derivative 0 or 1."""
    x = torch.tensor([-1e38, -1e4, -50.0, -0.0, 50.0, 1e4, 1e30, float("inf")])
    out, slope = both(x, torch.ones_like(x), FUSED)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0, 1e4, 1e30, float("inf")]))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]))
    out, slope = both(torch.full((17,), float("nan")), torch.ones(17), FUSED)
    assert out.isnan().all() and slope.isnan().all()


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that fails on an empty tensor."""
    x = torch.randn(6, 10)
    torch.testing.assert_close(gelu(x.T[::2], FUSED), F.gelu(x.T[::2].contiguous(), approximate="tanh"))
    assert both(torch.empty(0, 4), torch.empty(0, 4), FUSED)[1].shape == (0, 4)
    expanded = both(x, torch.ones(()).expand(6, 10), FUSED)[1]
    torch.testing.assert_close(expanded, both(x, torch.ones(6, 10), TORCH)[1])


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration under which torch.compile or autograd goes wrong."""
    x = torch.randn(5, 9, requires_grad=True)
    torch.library.opcheck(torch.ops.megads.gelu_forward.default, (x,))
    torch.library.opcheck(torch.ops.megads.gelu_backward.default, (torch.randn(5, 9), x.detach()))


def test_fp64_is_left_to_torch() -> None:
    """Catches an fp64 input that is computed in fp32."""
    x = torch.randn(9, dtype=torch.float64)
    assert torch.equal(gelu(x, FUSED), F.gelu(x, approximate="tanh"))
