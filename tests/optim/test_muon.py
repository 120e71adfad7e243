"""Tests Muon's parts: the iteration, the matrices that one parameter holds, and which rank owns which."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megads.ops.config import FUSED, TORCH, Kernels
from megads.optim.config import QKVSplit
from megads.optim.muon import FusedMatrices, assign_owners, newton_schulz, newton_schulz_flops
from megads.tools.verify.reference_optimizers import orthogonalised

BY_PROJECTION = FusedMatrices({"qkv.weight": (6, 3, 3), "gate_up.weight": (1, 1)}, QKVSplit.projection)
BY_HEAD = FusedMatrices({"qkv.weight": (6, 3, 3), "gate_up.weight": (1, 1)}, QKVSplit.head)


@pytest.mark.quick("shape0-torch", "shape1-fused", "shape2-torch", "shape3-fused", "shape4-torch")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("taken", [TORCH, FUSED], ids=["torch", "fused"])
@pytest.mark.parametrize("shape", [(7, 7), (5, 20), (40, 20), (1, 9), (257, 300)])
def test_the_iteration_maps_singular_values_towards_one(shape: tuple[int, int], taken: Kernels) -> None:
    """Catches a wrong coefficient, a Gram matrix of the longer side that is transposed back wrongly, matrices of a
    batch that are normalised together, and one iteration too few."""
    generator = torch.Generator().manual_seed(0)
    matrices = [scale * torch.randn(shape, generator=generator) for scale in (1e-3, 1.0, 1e3)]
    for steps in (1, 5):
        found = newton_schulz(torch.stack(matrices), steps, taken)
        for matrix, made in zip(matrices, found, strict=True):
            wanted = orthogonalised(matrix.double().numpy(), steps)
            assert np.abs(made.numpy() - wanted).max() < 1e-5
    values = torch.linalg.svdvals(newton_schulz(torch.stack(matrices), 5, taken))
    assert values.min() > 0.3 and values.max() < 1.3


def test_a_zero_matrix_stays_zero() -> None:
    """Catches a division by a norm of zero, which would make every weight a NaN."""
    assert not newton_schulz(torch.zeros(2, 3, 4), 5).any()
    assert newton_schulz(torch.zeros(1, 3, 4, dtype=torch.bfloat16), 5).dtype is torch.bfloat16


@pytest.mark.parametrize("fused", [BY_PROJECTION, BY_HEAD], ids=["projection", "head"])
@pytest.mark.parametrize("name", ["blocks.0.attention.qkv.weight", "blocks.3.mlp.gate_up.weight", "mlp.down.weight"])
def test_split_matrices_are_joined_in_place(name: str, fused: FusedMatrices) -> None:
    """Catches rows that change their place in split and join."""
    whole = torch.arange(24.0 * 5).view(24, 5)
    assert torch.equal(fused.join(name, fused.split(name, whole)), whole)


def test_queries_keys_and_gates_are_matrices_of_their_own() -> None:
    """Catches queries in one matrix with keys, and gates with up projections."""
    rows = torch.arange(24.0)[:, None]
    queries, keys, values = (part[:, 0].tolist() for part in BY_PROJECTION.split("qkv.weight", rows))
    assert (
        queries == [*range(6), *range(12, 18)] and keys == [6, 7, 8, 18, 19, 20] and values == [9, 10, 11, 21, 22, 23]
    )
    assert [len(part) for part in BY_HEAD.split("qkv.weight", rows)] == [3] * 8
    for fused in (BY_PROJECTION, BY_HEAD):
        gates, ups = fused.split("gate_up.weight", rows)
        assert gates[:, 0].tolist() == list(range(0, 24, 2)) and ups[:, 0].tolist() == list(range(1, 24, 2))
    wanted = newton_schulz_flops(12, 5, 5) + 2 * newton_schulz_flops(6, 5, 5)
    assert BY_PROJECTION.flops("qkv.weight", (24, 5), 5) == wanted


def test_owners_of_matrices_are_balanced() -> None:
    """Catches one rank that owns all the work, and owners that differ from rank to rank."""
    costs = [9, 1, 8, 2, 7, 3, 6, 4]
    owners = assign_owners(costs, 4)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)]
    assert loads == [10, 10, 10, 10]
    assert assign_owners([5, 5], 4) == [0, 1]
