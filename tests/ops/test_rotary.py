"""Tests the rotary kernel against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.model.rotary import rotary_tables
from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.rotary import rotate
from tests.ops.accuracy import check_errors, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")


def both(x: Tensor, grad: Tensor, tables: tuple[Tensor, Tensor], kernels: Kernels) -> list[Tensor]:
    """Returns the rotated tensor, and the gradient rotated back."""
    return outputs_and_gradients(lambda leaf: rotate(leaf, *tables, kernels), [x], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "restarted"), [(2, False), (10, True), (64, False)])
def test_error_is_within_twice_torchs(dim: int, restarted: bool, dtype: torch.dtype) -> None:
    """Catches a wrong half, sign, position or table of a sample; queries are views of a fused projection."""
    generator = torch.Generator().manual_seed(dim)
    whole = torch.randn(2, 21, 3, 3, dim, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(2, 3, 21, dim, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)
    positions = torch.stack([torch.arange(21), torch.arange(21) % 5]) if restarted else torch.arange(21)
    exact_tables, tables = (rotary_tables(positions, dim, 100.0, kind) for kind in (torch.float64, torch.float32))
    x = whole[:, :, :, 1]
    exact = both(x.double(), grad.double(), exact_tables, TORCH)
    check_errors(both(x, grad, tables, FUSED), both(x, grad, tables, TORCH), exact)


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that fails on an empty tensor."""
    x = torch.randn(2, 8, 7, 3).transpose(1, 3)
    tables = rotary_tables(torch.arange(3), 8, 10.0, torch.float32)
    torch.testing.assert_close(rotate(x, *tables, FUSED), rotate(x.contiguous(), *tables, TORCH))
    assert rotate(x[:0], *tables, FUSED).shape == (0, 3, 7, 8)


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration that breaks torch.compile or autograd."""
    cos, sin = (table.transpose(0, 1) for table in rotary_tables(torch.arange(4), 8, 10.0, torch.float32))
    for backward in (False, True):
        x = torch.randn(2, 4, 3, 8, requires_grad=True)
        torch.library.opcheck(torch.ops.megads.rotary.default, (x, cos, sin, backward))
