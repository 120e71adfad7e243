"""Rows of an embedding table: how exactly their gradients are added up, and where they go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megads.parallel.tensor import add_sorted, lookup
from megads.parallel.weight_gradients import TiedGradient, WeightGradients, linear
from tests.parallel.main_grads import FlatMainGrads

ROWS, HIDDEN = 11, 6


def drawn(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    """A token that comes a thousand times, others that come once or never; the table; a gradient."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.zeros(2, 600, dtype=torch.int64)
    rows[1, :8] = torch.arange(3, 11)
    table, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in ((ROWS, HIDDEN), (2, 600, HIDDEN)))
    return rows, nn.Parameter(table), grad


def exact(rows: Tensor, grad: Tensor) -> Tensor:
    return torch.zeros(ROWS, HIDDEN, dtype=torch.float64).index_add_(0, rows.flatten(), grad.double().flatten(0, 1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_a_rows_gradients_are_not_rounded_one_by_one(dtype: torch.dtype, bound: float) -> None:
    """Catches a sum over tokens in bf16: after a few hundred, others of the same size are lost in rounding."""
    rows, table, grad = drawn(dtype)
    lookup(rows, table, None).backward(grad)
    assert table.grad is not None and table.grad.dtype is dtype
    expected = exact(rows, grad)
    assert ((table.grad - expected).norm(dim=1) <= bound * expected.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_straight_to_the_sums(dtype: torch.dtype) -> None:
    """Catches a table of gradients made besides, sums that start from what was in memory, and a lost micro-batch, also
    where the backward pass puts other layers' gradients off."""
    rows, table, grad = drawn(dtype)
    sums = FlatMainGrads(table)
    gradients = WeightGradients(sums)
    lookup(rows, table, gradients).backward(grad)
    with gradients.defer() as deferred:
        lookup(rows, table, gradients).backward(grad)
    deferred.compute(sums)
    assert table.grad is None and sums.finished == 2
    expected = 2 * exact(rows, grad)
    assert ((sums.sums - expected).norm(dim=1) <= 5e-6 * expected.norm(dim=1)).all()


def test_what_gpus_add() -> None:
    """Catches another sum than that of CPUs: a row read twice that counts once, or sums that are written over."""
    rows, _, grad = drawn(torch.float32)
    sums = torch.ones(ROWS, HIDDEN)
    add_sorted(sums, rows.flatten(), grad.flatten(0, 1))
    assert torch.allclose(sums.double(), 1 + exact(rows, grad), rtol=1e-5, atol=1e-5)


def test_a_tied_weights_gradients_are_added_before_they_are_rounded() -> None:
    """Catches the embedding's and the projection's gradient rounded to bf16 one by one and added in bf16, and one of
    the last micro-batch that comes back in the next."""
    rows, table, grad = drawn(torch.bfloat16)
    x = torch.randn(2, 600, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    back = torch.full((2, 600, ROWS), 2.0**-9, dtype=torch.bfloat16)
    gradients = TiedGradient(tuple(table.shape))
    for _ in range(2):
        table.grad = None
        torch.autograd.backward([lookup(rows, table, gradients), linear(x, table, None, gradients)], [grad, back])
        projection = (back.flatten(0, 1).t() @ x.flatten(0, 1)).float()
        assert table.grad is not None
        assert torch.equal(table.grad, (exact(rows, grad).float() + projection).bfloat16())


def test_nothing_is_kept_without_a_gradient() -> None:
    """Catches a graph where nobody trains."""
    rows, table, _ = drawn(torch.float32)
    with torch.no_grad():
        assert not lookup(rows, table, None).requires_grad
    assert not lookup(rows, table.requires_grad_(False), None).requires_grad
