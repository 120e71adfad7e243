"""Tests the CUDA kernels of the optimizer step, run lane by lane on the CPU, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.accuracy import check_error
from tests.ops.cuda.lanes import Lanes

BLOCKS = 64  # MEGADS_SQUARE_SUM_BLOCKS
LR, DECAY, BETAS, EPS = 3e-3, 0.1, (0.9, 0.95), 1e-8


def adamw_reference(state: list[Tensor], grad: Tensor, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Master weights and moments after one step by the formula, in `dtype`."""
    master, mean, square, grad = (x.to(dtype) for x in (*state, grad))
    mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    square = BETAS[1] * square + (1 - BETAS[1]) * grad**2
    root = (square / (1 - BETAS[1] ** step)).sqrt() + EPS
    return [master * (1 - LR * DECAY) - LR * mean / (1 - BETAS[0] ** step) / root, mean, square]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "residue"), [(5, 0), (1024, 0), (2053, 1)])
def test_adamw_matches_the_reference(count: int, residue: int, dtype: torch.dtype) -> None:
    """Catches wrong tails, bias correction of another step, and weights that are not the rounded master weights."""
    generator = torch.Generator().manual_seed(count)
    state = [torch.randn(count, generator=generator) for _ in range(2)]
    state.append(torch.rand(count, generator=generator))
    grad, clip = torch.randn(count, generator=generator), torch.tensor([0.25])
    with Lanes("optimizer", order=count, residue=residue, at_end=count % 2) as lanes:
        placed = [lanes.place(x) for x in state]
        weights = lanes.empty((count,), dtype)
        lanes.call("adamw", dtype, count, grad, *placed, weights, clip, LR, DECAY, *BETAS, EPS, 7)
        references = (adamw_reference(state, grad * clip, 7, of) for of in (torch.float32, torch.float64))
        for mine, eager, exact in zip(placed, *references, strict=True):
            check_error(mine, eager, exact)
        assert torch.equal(weights, placed[0].to(dtype))


@pytest.mark.parametrize("clip", [float("nan"), float("inf")])
def test_a_skipped_step_changes_no_bit(clip: float) -> None:
    """Catches a thread that writes in a skipped step, which must leave everything unchanged, bit for bit."""
    with Lanes("optimizer", residue=1) as lanes:
        placed = [lanes.place(torch.linspace(-1, 1, 1027) + i) for i in range(4)]
        before = [x.clone() for x in placed]
        shape = (torch.float32, 1027, torch.full((1027,), float("nan")))
        lanes.call("adamw", *shape, *placed, torch.tensor([clip]), LR, DECAY, *BETAS, EPS, 7)
        assert all(torch.equal(x, y) for x, y in zip(placed, before, strict=True))


def test_square_sums_are_exact_and_thread_independent() -> None:
    """Catches segments that read their neighbours, squares that overflow, and sums that depend on thread order."""
    flat = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    flat[40] = 1e30
    bounds = torch.tensor([[0, 40], [41, 41], [40, 41], [41, 4200], [4203, 20000]])
    exact = torch.stack([flat[start:stop].double().square().sum() for start, stop in bounds.tolist()])
    results = []
    for order in (0, 3):
        with Lanes("optimizer", order=order) as lanes:
            partial, sums = lanes.empty((5, BLOCKS), torch.float64), lanes.empty((5,), torch.float64)
            lanes.call("square_sums", 5, flat, bounds, partial, sums)
            results.append(sums.clone())
    torch.testing.assert_close(results[0], exact, rtol=1e-12, atol=0)
    assert torch.equal(*results)
