"""Rows of experts: order, dispatch, weighted sum, and the choice of the best experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops import token_dispatch
from megads.ops.token_dispatch import RowCounts, combine, dispatch, sort_rows, top_choices

TOKENS, CHOICES, EXPERTS, WIDTH = 29, 3, 7, 5


def choices(seed: int = 0) -> Tensor:
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    scores[:, 4] = -1.0  # an expert without tokens
    return scores.topk(CHOICES).indices


def test_rows_are_sorted_by_expert_and_keep_the_order_of_tokens() -> None:
    """Catches rows of another expert, an unstable order, and counts that leave out an expert without rows."""
    chosen = choices()
    rows = sort_rows(chosen, EXPERTS)
    expected = [pair for expert in range(EXPERTS) for pair in range(chosen.numel()) if chosen.flatten()[pair] == expert]
    assert rows.order.tolist() == expected
    assert rows.places[rows.order].tolist() == list(range(chosen.numel()))
    assert rows.counts.tolist() == [(chosen == expert).sum().item() for expert in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weighted_sum_of_rows_and_its_gradients_are_those_of_plain_loops(dtype: torch.dtype) -> None:
    """Catches a row that belongs to another token, and a gradient of rows or weights in another order."""
    chosen, generator = choices(), torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(TOKENS, CHOICES, generator=generator).to(wide).requires_grad_()
    scale = torch.randn(EXPERTS, WIDTH, generator=generator).to(dtype)
    rows = sort_rows(chosen, EXPERTS)
    of_rows = scale.repeat_interleave(rows.counts, 0)
    out = combine(dispatch(x, rows) * of_rows, weights, rows)
    grad = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    found = (out, *torch.autograd.grad(out, (x, weights), grad))
    naive = torch.stack(
        [
            sum(
                (weights[t, k] * (x[t] * scale[chosen[t, k]]).to(wide) for k in range(CHOICES)),
                torch.zeros(WIDTH, dtype=wide),
            )
            for t in range(TOKENS)
        ]
    ).to(dtype)
    expected = (naive, *torch.autograd.grad(naive, (x, weights), grad))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_equal_scores_choose_the_lowest_experts() -> None:
    """Catches torch.topk's undefined order, and an order of bits that differs from that of the numbers."""
    scores = torch.tensor(
        [
            [0.25, 0.25, 0.25, 0.25, 0.25],
            [0.1, 0.3, 0.3, 0.1, 0.3],
            [-1.0, -2.0, -1.0, -3.0, -0.5],
            [0.0, -0.0, -1e-30, 1e-30, 0.0],
            [-torch.inf, 1.0, -torch.inf, 1.0, -2.0],
        ]
    )
    expected = [[0, 1, 2], [1, 2, 4], [4, 0, 2], [3, 0, 1], [1, 3, 4]]
    assert top_choices(scores, 3).tolist() == expected
    assert top_choices(scores.double(), 3).tolist() == expected


def test_the_best_scores_are_those_of_topk() -> None:
    """Catches a choice that differs from torch.topk's where no scores are equal."""
    scores = torch.randn(1000, 128, generator=torch.Generator().manual_seed(2))
    assert torch.equal(top_choices(scores, 8), scores.topk(8).indices)


def test_the_host_reads_numbers_of_rows_once_and_only_if_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a read for the ends of rows, which are on the device, and one for each GEMM of a layer."""
    reads = []
    monkeypatch.setattr(token_dispatch, "read_counts", lambda counts: reads.append(counts) or counts.tolist())
    counts = RowCounts(torch.tensor([3, 0, 5, 1]))
    assert counts.ends.tolist() == [3, 3, 8, 9] and counts.ends.dtype is torch.int32
    assert not reads
    assert counts.on_host == counts.on_host == [3, 0, 5, 1]
    assert len(reads) == 1
    assert RowCounts(torch.tensor([2]), [2]).on_host == [2]
    assert len(reads) == 1
