"""Rows of experts: order, dispatch, weighted sum, and the choice of the best experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.config import TORCH
from megads.ops.grouped_linear import add_grouped_weight_gradient, grouped_linear, grouped_weight_gradient
from megads.ops.token_dispatch import combine, dispatch, sort_rows, top_choices

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


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_are_those_of_each_expert(transposed: bool) -> None:
    """Catches rows multiplied by another expert's weight, and experts without rows whose gradient stays undefined."""
    counts, generator = [3, 0, 5, 1], torch.Generator().manual_seed(3)
    x = torch.randn(9, 6, generator=generator)
    stored = torch.randn(4, *((6, 8) if transposed else (8, 6)), generator=generator)
    weights = stored.mT if transposed else stored
    parts, groups = x.split(counts), range(4)
    out = grouped_linear(x, weights, counts, TORCH)
    torch.testing.assert_close(out, torch.cat([parts[e] @ weights[e].T for e in groups]))
    grad = torch.randn(9, 8, generator=generator)
    expected = torch.stack([grad.split(counts)[e].T @ parts[e] for e in groups])
    torch.testing.assert_close(grouped_weight_gradient(grad, x, counts, TORCH), expected)
    main_grad = torch.full((4, 8, 6), torch.nan)
    for repeat in (1, 2):
        add_grouped_weight_gradient(main_grad, grad, x, counts, repeat == 1, TORCH)
        torch.testing.assert_close(main_grad, repeat * expected)
