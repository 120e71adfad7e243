"""Dropout whose mask is a pure function of seed, site, stream and sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.dropout import Dropout, stream_seed


def mask(sample_ids: list[int], seed: int = 1, site: str = "blocks.0.mlp_dropout", stream: int = 0) -> Tensor:
    dropout = Dropout(0.5, seed, site)
    dropout.stream = stream
    return dropout(torch.ones(len(sample_ids), 16, 8), BatchInfo(sample_ids=torch.tensor(sample_ids)))


def test_the_mask_does_not_depend_on_the_micro_batch() -> None:
    """Catches a mask drawn for a whole micro-batch: it would change with its size, its order and its neighbours."""
    together = mask([5, 6, 7, 8])
    assert torch.equal(together, torch.cat([mask([5, 6]), mask([7, 8])]))
    assert torch.equal(mask([8, 5]), together[[3, 0]])
    assert torch.equal(together, mask([5, 6, 7, 8]))


def test_the_mask_does_not_depend_on_torchs_global_generator() -> None:
    """Catches a mask that a resumed run could not repeat, and one that disturbs others' random numbers."""
    torch.manual_seed(0)
    first, expected = mask([3]), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(mask([3]), first)


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"site": "blocks.1.mlp_dropout"}, {"stream": 1}, {"sample_ids": [4]}],
    ids=lambda o: next(iter(o)),
)
def test_every_coordinate_changes_the_mask(other: dict) -> None:
    """Catches equal masks in two layers, on two samples, on two tensor-parallel ranks or under two seeds."""
    changed = mask(**({"sample_ids": [3]} | other))
    agreement = (changed == mask([3])).float().mean()
    assert 0.2 < agreement < 0.8


def test_seeds_are_distinct_and_fit_a_generator() -> None:
    """Catches coordinates that are added up, so that neighbours collide."""
    seeds = {
        stream_seed(seed, site, stream, sample)
        for seed in range(3)
        for site in ("blocks.1.core", "blocks.11.core")
        for stream in range(3)
        for sample in (0, 1, 2, 2**40)
    }
    assert len(seeds) == 3 * 2 * 3 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_a_sequence_share_one_mask(size: int) -> None:
    """Catches shards with equal masks, and a mask that depends on how many ranks share the sequence."""
    parts = []
    for rank in range(size):
        dropout = Dropout(0.5, 1, "blocks.0.mlp_dropout")
        dropout.shard = (rank, size)
        parts.append(dropout(torch.ones(2, 16 // size, 8), BatchInfo(sample_ids=torch.tensor([5, 6]))))
    assert torch.equal(torch.cat(parts, dim=1), mask([5, 6]))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_expectation_and_scale(p: float) -> None:
    """Catches p taken for the share that is kept, and a missing 1 / (1 - p)."""
    dropout = Dropout(p, 0, "site")
    out = dropout(torch.ones(1, 200_000, dtype=torch.float64), BatchInfo(sample_ids=torch.tensor([0])))
    assert abs(float((out == 0).double().mean()) - p) < 0.005
    torch.testing.assert_close(
        out[out != 0].unique(), torch.tensor([1 / (1 - p)], dtype=torch.float64), rtol=1e-7, atol=0
    )


def test_the_gradient_has_the_same_mask() -> None:
    """Catches a mask that the backward pass draws again or leaves out."""
    dropout, x = Dropout(0.5, 0, "site"), torch.full((1, 64), 3.0, requires_grad=True)
    out = dropout(x, BatchInfo(sample_ids=torch.tensor([0])))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach() / 3.0)


def test_off_in_evaluation_and_at_zero() -> None:
    """Catches validation with dropout, and a mask drawn for nothing."""
    x, info = torch.randn(2, 5), BatchInfo(sample_ids=torch.tensor([0, 1]))
    assert Dropout(0.5, 0, "site").eval()(x, info) is x
    assert Dropout(0.0, 0, "site")(x, info) is x


def test_low_precision_keeps_its_dtype() -> None:
    """Catches a residual stream that becomes fp32 behind a dropout."""
    out = Dropout(0.5, 0, "site")(torch.ones(1, 8, dtype=torch.bfloat16), BatchInfo(sample_ids=torch.tensor([0])))
    assert out.dtype is torch.bfloat16


def test_a_batch_that_does_not_match_its_ids_is_refused() -> None:
    """Catches samples that share a mask because ids were fewer than rows."""
    with pytest.raises(ValueError, match="shorter"):
        Dropout(0.5, 0, "site")(torch.ones(2, 4), BatchInfo(sample_ids=torch.tensor([0])))


@pytest.mark.parametrize("shape", [(16, 8), (3, 16, 16)], ids=["hidden", "attention"])
def test_a_part_of_the_sample_has_its_rows_of_the_mask(shape: tuple[int, ...]) -> None:
    """Catches a rank that draws for the tokens it holds, under context or sequence parallelism or both."""
    dim, ids, dropout = len(shape) - 1, torch.tensor([3, 9]), Dropout(0.5, 1, "site")
    whole = dropout(torch.ones(2, *shape), BatchInfo(ids), sequence_dim=dim)
    places = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    held = whole.index_select(dim, places)
    info = BatchInfo(ids, sequence_index=places, seq_len=16)
    assert torch.equal(dropout(torch.ones_like(held), info, sequence_dim=dim), held)
    if dim == 1:
        for of_rank, among in ((held, info), (whole, BatchInfo(ids))):
            for rank, part in enumerate(of_rank.chunk(2, dim=1)):
                dropout.shard = (rank, 2)
                assert torch.equal(dropout(torch.ones_like(part), among), part)
