"""Parameter groups by name, and the bucket layout of parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import Parameter

from megads.errors import ConfigError
from megads.model.config import ModelConfig, Position
from megads.model.model_size import parameter_shapes
from megads.optim.config import GroupConfig, OptimConfig
from megads.optim.groups import (
    ALIGNMENT,
    Member,
    ParameterRates,
    Role,
    bucket_layouts,
    parameter_groups,
    parameter_rates,
    parameter_role,
    require_matches,
)

SHAPES = parameter_shapes(ModelConfig(position=Position.learned, tie_embeddings=False))
FORWARD = [
    Member("embedding", 1000, Role.tied),
    Member("a.norm", 30, Role.no_decay, partial=True),
    Member("a.matrix", 500, Role.decay),
    Member("a.bias", 20, Role.no_decay),
    Member("b.matrix", 70, Role.decay),
    Member("b.bias", 20, Role.no_decay),
    Member("c.matrix", 60, Role.decay),
]


def test_matrices_decay_and_vectors_do_not() -> None:
    """Catches a norm in the decay group (BLOOM's loss spike), and a new parameter without a role."""
    for name, shape in SHAPES.items():
        assert parameter_role(name) is (Role.decay if len(shape) == 2 else Role.no_decay), name


@pytest.mark.parametrize("name", ["blocks.0.mlp.gate.weight", "xhead.weight", "embedding.norm.weight.scale", "weight"])
def test_parameters_without_a_role_raise(name: str) -> None:
    """Catches a role guessed from the shape or from part of the name."""
    with pytest.raises(AssertionError, match="no role for parameter"):
        parameter_role(name)


def test_a_tied_embedding_has_its_own_group() -> None:
    """Catches a tied embedding that shares a group: its partition then differs between the first and last stage."""
    parameters = {name: Parameter(torch.zeros(1)) for name in SHAPES if name != "head.weight"}
    groups = parameter_groups(parameters.items(), "embedding.word.weight", OptimConfig())
    assert [(group["role"], group["weight_decay"]) for group in groups] == [
        ("decay", 0.1), ("tied", 0.1), ("no_decay", 0.0)
    ]  # fmt: skip
    assert [id(p) for p in groups[1]["params"]] == [id(parameters["embedding.word.weight"])]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in parameters.values())


def test_empty_groups_are_left_out() -> None:
    """Catches an empty group, which a flat optimizer cannot hold."""
    groups = parameter_groups([("final_norm.weight", Parameter(torch.zeros(1)))], None, OptimConfig())
    assert [group["role"] for group in groups] == ["no_decay"]


def test_torchs_adamw_accepts_the_groups() -> None:
    """Catches group keys that torch's optimizers reject, and weight decay applied to a norm."""
    matrix, norm = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    named = [("head.weight", matrix), ("final_norm.weight", norm)]
    groups = parameter_groups(named, None, OptimConfig(weight_decay=0.5))
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    torch.optim.AdamW(groups, lr=0.1).step()
    assert torch.all(matrix == 0.95) and torch.all(norm == 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_elements", [1, 100, 10**9])
def test_every_element_has_one_place_and_one_owner(ranks: int, bucket_elements: int) -> None:
    """Catches lost, duplicated, overlapping or misaligned parameters, and slices that leave an element out."""
    buckets = bucket_layouts(FORWARD, ranks, bucket_elements)
    placed = [slot.member.name for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == sorted(member.name for member in FORWARD)
    for bucket in buckets:
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        assert all(left.stop <= right.start for left, right in pairwise(bucket.slots))
        assert bucket.slots[-1].stop <= bucket.numel
        slices = [bucket.slice_of(rank, ranks) for rank in range(ranks)]
        assert [element for part in slices for element in part] == list(range(bucket.numel))
        assert len({len(part) for part in slices}) == 1 and slices[0].stop % ALIGNMENT == 0


def test_buckets_are_in_backward_order_and_of_one_group() -> None:
    """Catches buckets not in the order in which the backward pass completes them, mixed weight decays, a tied embedding
    that shares a bucket, and partial gradients of sequence shards among complete ones."""
    found = [[slot.member.name for slot in bucket.slots] for bucket in bucket_layouts(FORWARD, 1, 100)]
    assert found == [["c.matrix", "b.matrix"], ["b.bias", "a.bias"], ["a.matrix"], ["a.norm"], ["embedding"]]
    kinds = [(bucket.role, bucket.partial, bucket.begins) for bucket in bucket_layouts(FORWARD, 1, 100)]
    assert kinds == [
        (Role.decay, False, 0),
        (Role.no_decay, False, 1),
        (Role.decay, False, 4),
        (Role.no_decay, True, 5),
        (Role.tied, False, 6),
    ]


def test_a_tied_embedding_lies_alike_on_both_stages() -> None:
    """Catches copies whose elements belong to different ranks on the two stages: no in-place all-reduce is possible."""
    first = bucket_layouts(FORWARD, 3, 10**9)
    last = bucket_layouts([Member("z.matrix", 999, Role.decay), Member("embedding", 1000, Role.tied)], 3, 10**9)
    places = [
        next((bucket.slots[0].start, bucket.numel) for bucket in stage if bucket.role is Role.tied)
        for stage in (first, last)
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.mlp.up.weight", ParameterRates(0.5, 0.2)),
        ("blocks.0.mlp.up.bias", ParameterRates(0.5, 0.0)),
        ("blocks.11.mlp.up.weight", ParameterRates(2.0, 0.2)),
        ("blocks.1.attention.qkv.weight", ParameterRates(1.0, 0.1)),
        ("final_norm.weight", ParameterRates(1.0, 0.7)),
        ("embedding.word.weight", ParameterRates(1.0, 0.1)),
    ],
)
def test_the_last_entry_that_sets_a_value_counts(name: str, expected: ParameterRates) -> None:
    """Catches a first match that wins, a value reset by a later entry that omits it, and a * that stops at a dot."""
    groups = [
        GroupConfig("*.mlp.*", lr_scale=0.5),
        GroupConfig("*.mlp.*.weight", weight_decay=0.2),
        GroupConfig("blocks.1[0-9].*", lr_scale=2.0),
        GroupConfig("final_norm.weight", weight_decay=0.7),
    ]
    assert parameter_rates(name, parameter_role(name), OptimConfig(groups=groups)) == expected


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    """Catches a misspelt pattern, or one in the wrong case, without an error, and an error that lists every block."""
    require_matches(OptimConfig(groups=[GroupConfig("blocks.1.mlp.down.*", lr_scale=2.0)]), SHAPES)
    for pattern in ("blocks.1.MLP.*", "blocks.2.*", "head"):
        with pytest.raises(ConfigError, match=r"optim.groups\[0\].pattern = .* matches no parameter") as caught:
            require_matches(OptimConfig(groups=[GroupConfig(pattern, lr_scale=2.0)]), SHAPES)
        assert str(caught.value).count("mlp.down.weight") == 1 and "embedding.word.weight" in str(caught.value)


def test_rates_do_not_mix_in_a_bucket() -> None:
    """Catches parameters with two learning rates in one bucket, where one would train with the other's."""
    members = [
        Member("a", 10, Role.decay),
        Member("b", 10, Role.decay, rates=ParameterRates(0.5)),
        Member("c", 10, Role.decay),
    ]
    found = [([s.member.name for s in b.slots], b.rates.lr_scale) for b in bucket_layouts(members, 2, 10**9)]
    assert found == [(["b"], 0.5), (["c", "a"], 1.0)]
