"""Rows in the slots of experts, against plain loops."""

from __future__ import annotations

import pytest
import torch

from megads.ops.expert_slots import assign_slots, from_slots, into_slots
from megads.ops.token_dispatch import dispatch

TOKENS, CHOICES, EXPERTS, WIDTH = 5, 2, 4, 3


def chosen(groups: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(groups, TOKENS, EXPERTS, generator=generator)
    scores[..., 1] += 0.5
    return scores.topk(CHOICES).indices


@pytest.mark.parametrize("capacity", [1, 2, 3, 9])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_first_rows_of_each_group_get_the_slots(groups: int, capacity: int) -> None:
    """Catches slots sorted by group before expert, a row of another group, and padding that is not zero."""
    choices = chosen(groups)
    x_th = 1.0 + torch.arange(groups * TOKENS * WIDTH).view(-1, WIDTH).float()
    slots = assign_slots(choices, EXPERTS, capacity)
    found = into_slots(dispatch(x_th, slots.rows), slots).view(EXPERTS, groups, capacity, WIDTH)
    kept = 0
    for expert in range(EXPERTS):
        for group in range(groups):
            tokens = [t for t in range(TOKENS) if expert in choices[group, t]]
            assert slots.counts[group, expert] == len(tokens)
            expected = torch.zeros(capacity, WIDTH)
            for slot, token in enumerate(tokens[:capacity]):
                expected[slot] = x_th[group * TOKENS + token]
            assert torch.equal(found[expert, group], expected)
            kept += min(len(tokens), capacity)
    assert slots.kept.sum() == slots.filled.sum() == kept


@pytest.mark.parametrize("capacity", [2, 9])
def test_slots_return_to_their_rows_with_their_gradients(capacity: int) -> None:
    """Catches a row returned to another, one without a slot that is not zero, and gradients of padding."""
    slots = assign_slots(chosen(2), EXPERTS, capacity)
    rows = torch.randn(2 * TOKENS * CHOICES, WIDTH, dtype=torch.float64, requires_grad=True)
    back = from_slots(into_slots(rows, slots), slots)
    assert torch.equal(back, rows * slots.kept)
    assert torch.autograd.gradcheck(lambda x: from_slots(into_slots(x, slots).sin(), slots), rows)
    padded = torch.randn(len(slots.filled), WIDTH, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(from_slots(padded, slots).sum(), padded)
    assert torch.equal(grad, slots.filled.double().expand_as(grad))
