"""Dropout of hidden states in the model: which part of the mask a rank's tokens use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.layers import Dropout


def mask(sample_ids: list[int], seed: int = 1, site: str = "blocks.0.mlp_dropout") -> Tensor:
    return Dropout(0.5, seed, site)(torch.ones(len(sample_ids), 16, 8), BatchInfo(torch.tensor(sample_ids)))


def test_the_mask_follows_from_the_sample_alone() -> None:
    """Catches a mask drawn for a whole micro-batch: it would change with the size, the order and the other samples; one
    that a resumed run cannot repeat; and one that advances torch's global generator."""
    torch.manual_seed(0)
    together, expected = mask([5, 6, 7, 8]), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(together, torch.cat([mask([5, 6]), mask([7, 8])]))
    assert torch.equal(mask([8, 5]), together[[3, 0]])


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"site": "blocks.1.mlp_dropout"}, {"sample_ids": [4]}], ids=lambda o: next(iter(o))
)
def test_every_coordinate_changes_the_mask(other: dict) -> None:
    """Catches equal masks in two layers, on two samples or under two seeds."""
    agreement = (mask(**({"sample_ids": [3]} | other)) == mask([3])).float().mean()
    assert 0.2 < agreement < 0.8


def test_a_part_of_the_sample_has_its_rows_of_the_mask() -> None:
    """Catches a rank that draws a mask for its local tokens only, under context or sequence parallelism or both."""
    ids, dropout = torch.tensor([3, 9]), Dropout(0.5, 1, "site")
    whole = dropout(torch.ones(2, 16, 8), BatchInfo(ids))
    places = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    held, info = whole[:, places], BatchInfo(ids, sequence_index=places, seq_len=16)
    assert torch.equal(dropout(torch.ones_like(held), info), held)
    for of_rank, among in ((held, info), (whole, BatchInfo(ids))):
        for size in (2, 4):
            for rank, part in enumerate(of_rank.chunk(size, dim=1)):
                dropout.shard = (rank, size)
                assert torch.equal(dropout(torch.ones_like(part), among), part)


def test_the_gradient_has_the_same_mask() -> None:
    """Catches a backward pass that draws a new mask or omits it, and a missing scale."""
    dropout, x = Dropout(0.5, 0, "site"), torch.full((1, 8, 8), 3.0, requires_grad=True)
    out = dropout(x, BatchInfo(torch.tensor([0])))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach() / 3.0) and set(x.grad.unique().tolist()) == {0.0, 2.0}


def test_off_in_evaluation_and_at_zero() -> None:
    """Catches validation with dropout, a mask drawn at p = 0, and a bf16 input whose output is not bf16."""
    x, info = torch.randn(2, 5, 3), BatchInfo(torch.tensor([0, 1]))
    assert Dropout(0.5, 0, "site").eval()(x, info) is x
    assert Dropout(0.0, 0, "site")(x, info) is x
    assert Dropout(0.5, 0, "site")(x.bfloat16(), info).dtype is torch.bfloat16


def test_a_batch_that_does_not_match_its_ids_is_refused() -> None:
    """Catches samples that share a mask because there are fewer ids than rows."""
    with pytest.raises(AssertionError, match="2 rows, but 1 numbers"):
        Dropout(0.5, 0, "site")(torch.ones(2, 4, 4), BatchInfo(torch.tensor([0])))
