"""The conjugate collectives against what one process computes: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.collectives import enter_region, leave_region
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Axis, build_grid, single_rank_grid
from tests.distributed import run_ranks


def tensor_axis() -> Axis:
    return build_grid(ParallelConfig(tp=dist.get_world_size()), dist.get_rank(), dist.get_world_size()).tp


def weight(rank: int) -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def x_and_cotangent() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100)
    x, cotangent = (torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.requires_grad_(), cotangent


def _region() -> dict[str, Any]:
    """sum over ranks of w_r x^2"""
    axis = tensor_axis()
    (x, cotangent), w = x_and_cotangent(), weight(axis.rank).requires_grad_()
    inside = enter_region(x, axis)
    y = leave_region(w * inside.square(), axis)
    (y * cotangent).sum().backward()
    return {"y": y.detach().numpy(), "x": x.grad.numpy(), "w": w.grad.numpy(), "same": bool((inside == x).all())}


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_a_parallel_region_equals_one_process(size: int) -> None:
    """Catches a missing all-reduce in either direction, and one too many: outputs or gradients times the size."""
    x, cotangent = x_and_cotangent()
    weights = [weight(rank).requires_grad_() for rank in range(size)]
    y = sum(w * x.square() for w in weights)
    (y * cotangent).sum().backward()
    for rank, found in enumerate(run_ranks(_region, size)):
        assert found["same"], "entering a region must not change the values"
        torch.testing.assert_close(torch.from_numpy(found["y"]), y.detach())
        torch.testing.assert_close(torch.from_numpy(found["x"]), x.grad)
        torch.testing.assert_close(torch.from_numpy(found["w"]), weights[rank].grad)


def test_one_rank_calls_no_collective() -> None:
    """Catches a collective on the size-1 axis, which has no group."""
    axis, x = single_rank_grid().tp, torch.ones(2, requires_grad=True)
    assert enter_region(x, axis) is x and leave_region(x, axis) is x


def _shared_gradient() -> Any:
    axis = tensor_axis()
    x, beside = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    doubled = 2 * beside  # Computed before, so that autograd comes to it after the region's backward.
    ((enter_region(x, axis) + doubled) * (axis.rank + 1)).sum().backward()
    return x.grad.numpy(), beside.grad.numpy()


@pytest.mark.distributed
def test_the_backward_sum_leaves_other_gradients_alone() -> None:
    """Catches an all-reduce in place of a gradient that autograd shares with another branch."""
    for rank, (x, beside) in enumerate(run_ranks(_shared_gradient, 2)):
        assert x.tolist() == [3.0] * 3
        assert beside.tolist() == [2 * (rank + 1.0)] * 3
