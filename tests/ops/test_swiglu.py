"""The SwiGLU kernel against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.activation import swiglu
from megads.ops.config import FUSED, TORCH, Kernels
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")


def both(x: Tensor, grad: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Returns the output, and the gradient of gate and up."""
    leaf = x.detach().requires_grad_()
    out = swiglu(leaf, kernels)
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 16), (40, 200)])
def test_error_is_within_twice_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches gate-up pairs split or joined wrongly at a row's end, and an intermediate result that is rounded."""
    generator = torch.Generator().manual_seed(len(shape))
    x = (3 * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64)).to(dtype)
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    exact = both(x.double(), grad.double(), TORCH)
    for found, eager, right in zip(both(x, grad, FUSED), both(x, grad, TORCH), exact, strict=True):
        check_error(found, eager, right)


def test_gates_are_the_even_columns() -> None:
    """Catches gate and up swapped, in the kernel and the reference alike."""
    x = torch.randn(4, 20)
    for kernels in (FUSED, TORCH):
        torch.testing.assert_close(swiglu(x, kernels), F.silu(x[:, 0::2]) * x[:, 1::2])


def test_large_values_do_not_overflow() -> None:
    """Catches an exponential that overflows to NaN: for large inputs SiLU is 0 or its input, and its slope 0 or 1."""
    gates = torch.tensor([-1e30, -1e4, -90.0, 90.0, 1e4, 1e30])
    x = torch.stack([gates, torch.full((6,), 2.0)], -1).flatten()
    out, slopes = both(x[None], torch.ones(1, 6), FUSED)
    torch.testing.assert_close(out[0, 2:], 2.0 * gates.clamp(min=0.0)[2:])
    torch.testing.assert_close(slopes[0, 4::2], torch.tensor([0.0, 2.0, 2.0, 2.0]))
    assert out.isfinite().all() and slopes.isfinite().all()
    assert both(torch.full((1, 34), float("nan")), torch.ones(1, 17), FUSED)[1].isnan().all()


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a strided view as if it were contiguous, and one that fails on an empty tensor."""
    x = torch.randn(10, 6)
    torch.testing.assert_close(swiglu(x.T[::2], FUSED), swiglu(x.T[::2].contiguous(), TORCH))
    assert both(torch.empty(0, 4), torch.empty(0, 2), FUSED)[1].shape == (0, 4)
    expanded = both(x, torch.ones(()).expand(10, 3), FUSED)[1]
    torch.testing.assert_close(expanded, both(x, torch.ones(10, 3), TORCH)[1])


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a wrong schema, fake kernel or autograd registration, which breaks torch.compile or autograd."""
    x = torch.randn(5, 18, requires_grad=True)
    torch.library.opcheck(torch.ops.megads.swiglu_forward.default, (x,))
    torch.library.opcheck(torch.ops.megads.swiglu_backward.default, (torch.randn(5, 9), x.detach()))
