"""Every parameter of the model falls into the right optimizer group by its name."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from megads.model.config import ModelConfig, Position
from megads.optim.groups import Role, parameter_groups, parameter_role
from megads.plan.model_size import parameter_shapes

SHAPES = parameter_shapes(ModelConfig(position=Position.learned, tie_embeddings=False))


def test_matrices_decay_and_vectors_do_not() -> None:
    """Catches a norm in the decay group (BLOOM's loss spike) or a new parameter without a role."""
    for name, shape in SHAPES.items():
        assert parameter_role(name) is (Role.decay if len(shape) == 2 else Role.no_decay), name


@pytest.mark.parametrize("name", ["blocks.0.mlp.gate.weight", "xhead.weight", "embedding.norm.weight.scale", "weight"])
def test_unknown_names_raise(name: str) -> None:
    """Catches a guess by shape or by a part of the name."""
    with pytest.raises(AssertionError, match="no role for parameter"):
        parameter_role(name)


def test_groups() -> None:
    """Catches a tied embedding that shares a group (its partition then differs between first and last stage)."""
    parameters = {name: Parameter(torch.zeros(1)) for name in SHAPES if name != "head.weight"}
    groups = parameter_groups(parameters.items(), "embedding.word.weight", 0.1)
    assert [(group["role"], group["weight_decay"]) for group in groups] == [
        ("decay", 0.1), ("tied", 0.1), ("no_decay", 0.0)
    ]  # fmt: skip
    assert [id(p) for p in groups[1]["params"]] == [id(parameters["embedding.word.weight"])]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in parameters.values())


def test_empty_groups_are_left_out() -> None:
    """Catches an empty group, which a flat optimizer cannot hold."""
    groups = parameter_groups([("final_norm.weight", Parameter(torch.zeros(1)))], None, 0.1)
    assert [group["role"] for group in groups] == ["no_decay"]


def test_groups_feed_adamw() -> None:
    """Catches group keys that torch's optimizers refuse, and a decay that reaches a norm."""
    matrix, norm = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    groups = parameter_groups([("head.weight", matrix), ("final_norm.weight", norm)], None, 0.5)
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    torch.optim.AdamW(groups, lr=0.1).step()
    assert torch.all(matrix == 0.95) and torch.all(norm == 1.0)
