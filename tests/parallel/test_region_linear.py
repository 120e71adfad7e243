"""The conjugate collectives against a single process: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Axis, build_grid, single_rank_grid
from megads.parallel.region_linear import reduce_from_tp_region, reduce_scatter_to_sp_region
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
    """Output and weight gradient of the sum over ranks of w_r x^2."""
    axis = tensor_axis()
    (x, cotangent), w = x_and_cotangent(), weight(axis.rank).requires_grad_()
    y = reduce_from_tp_region(w * x.square(), axis)
    (y * cotangent).sum().backward()
    return {"y": y.detach().numpy(), "w": w.grad.numpy()}


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_leaving_a_region_sums_forward_only(size: int) -> None:
    """Catches a missing all-reduce in the forward pass, and an extra one: outputs or gradients times the size."""
    x, cotangent = x_and_cotangent()
    weights = [weight(rank).requires_grad_() for rank in range(size)]
    y = sum(w * x.square() for w in weights)
    (y * cotangent).sum().backward()
    for rank, found in enumerate(run_ranks(_region, size)):
        torch.testing.assert_close(torch.from_numpy(found["y"]), y.detach())
        torch.testing.assert_close(torch.from_numpy(found["w"]), weights[rank].grad)


def test_one_rank_calls_no_collective() -> None:
    """Catches a collective on an axis of size 1, which has no process group."""
    axis, x = single_rank_grid().tp, torch.ones(2, requires_grad=True)
    assert reduce_from_tp_region(x, axis) is x and reduce_scatter_to_sp_region(x, axis) is x
