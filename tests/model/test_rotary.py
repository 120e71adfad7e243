"""Rotary positions; the whole model with them is compared with the naive one in test_gpt.py and test_documents.py."""

from __future__ import annotations

import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.rotary import Rotary, rotary_tables
from megads.ops.kernels import TORCH
from megads.ops.rotary import rotate


def vectors(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[1, count, 1, 16]."""
    return torch.randn(1, count, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_products_depend_on_the_distance_alone() -> None:
    """Catches keys turned the other way than queries, and angles that are not linear in the position."""
    q, k = vectors(2).unbind(dim=1)

    def product(query: int, key: int) -> float:
        tables = (rotary_tables(torch.tensor([at]), 16, 10000.0, torch.float64) for at in (query, key))
        turned_q, turned_k = (rotate(x[:, None], *t, TORCH) for x, t in zip((q, k), tables, strict=True))
        return float((turned_q * turned_k).sum())

    assert abs(product(105, 100) - product(5, 0)) < 1e-12
    assert abs(product(5, 0) - product(0, 5)) > 0.1 and abs(product(5, 0) - product(6, 0)) > 0.1


def test_far_positions_have_exact_angles() -> None:
    """Catches angles multiplied in fp32: off by 0.03 at position 10^6 with the highest frequency."""
    positions = torch.tensor([999_999, 1_000_000])
    cos, sin = rotary_tables(positions, 16, 500_000.0, torch.float32)
    angles = positions.double()[:, None] * 500_000.0 ** (-torch.arange(8).double() / 8)
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin(), rtol=0, atol=1e-7)


def test_low_precision_rounds_once() -> None:
    """Catches products and sums in bf16: the result is that of fp32 arithmetic, rounded."""
    q = vectors(200, torch.bfloat16)
    info = BatchInfo(torch.tensor([0]))
    turned, _ = Rotary(16, 10000.0)(q, q, info)
    exact, _ = Rotary(16, 10000.0)(q.double(), q.double(), info)
    assert turned.dtype is torch.bfloat16
    assert (turned.double() - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()


def test_a_rank_of_the_sample_takes_its_places() -> None:
    """Catches a rank that counts its tokens from 0, and tables of one rank's places given to another."""
    q, rotary = vectors(8), Rotary(16, 10000.0)
    whole, _ = rotary(q, q, BatchInfo(torch.tensor([0])))
    for places in (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])):
        held = q[:, places]
        turned, _ = rotary(held, held, BatchInfo(torch.tensor([0]), sequence_index=places, seq_len=8))
        assert torch.equal(turned, whole[:, places])
