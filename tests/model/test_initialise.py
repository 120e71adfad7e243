"""Initial weights as a pure function of seed and name."""

from __future__ import annotations

import math

import pytest
import torch

from megads.model.config import ModelConfig
from megads.model.initialise import initial_value
from megads.model.stages import stage_specs
from megads.plan.model_size import parameter_shapes

CONFIG = ModelConfig(num_layers=8, hidden_size=96, num_heads=4, vocab_size=512, init_std=0.02)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word.weight", 0.02),
        ("blocks.3.attention.qkv.weight", 0.02),
        ("blocks.3.mlp.up.weight", 0.02),
        ("blocks.3.attention.dense.weight", 0.02 / 4),
        ("blocks.3.mlp.down.weight", 0.02 / 4),
    ],
)
def test_standard_deviations(name: str, std: float) -> None:
    """Catches a missing 1 / sqrt(2 L) on the projections that end a branch (8 layers: a quarter), or one too many."""
    drawn = initial_value(CONFIG, 1)(name, parameter_shapes(CONFIG)[name]).double()
    error = std / math.sqrt(2 * drawn.numel())
    assert abs(float(drawn.std()) - std) < 5 * error
    assert abs(float(drawn.mean())) < 5 * std / math.sqrt(drawn.numel())


def test_gains_are_one_and_biases_zero() -> None:
    """Catches a norm that starts random, and a bias taken for a matrix."""
    value = initial_value(CONFIG, 1)
    for name, shape in parameter_shapes(CONFIG).items():
        if len(shape) == 1:
            expected = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            assert torch.equal(value(name, shape), expected), name


def test_values_depend_on_seed_and_name_alone() -> None:
    """Catches draws from a shared stream: weights would depend on what else a rank builds, and in which order."""
    shapes = {name: shape for name, shape in parameter_shapes(CONFIG).items() if len(shape) == 2}
    value = initial_value(CONFIG, 1)
    forward = {name: value(name, shape) for name, shape in shapes.items()}
    torch.manual_seed(99)
    again = initial_value(CONFIG, 1)
    backward = {name: again(name, shapes[name]) for name in reversed(shapes)}
    assert all(torch.equal(forward[name], backward[name]) for name in shapes)
    first_row = {tuple(tensor.flatten()[:8].tolist()) for tensor in forward.values()}
    assert len(first_row) == len(shapes), "two parameters share a stream"
    other = initial_value(CONFIG, 2)("embedding.word.weight", shapes["embedding.word.weight"])
    assert not torch.equal(other, forward["embedding.word.weight"])


def test_values_are_fp32_on_the_cpu_under_any_default_device() -> None:
    """Catches weights that differ between a CPU and a GPU run, or take the device a stage is built on."""
    value = initial_value(CONFIG, 1)
    for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "final_norm.weight"):
        drawn = value(name, parameter_shapes(CONFIG)[name])
        assert (drawn.dtype, drawn.device.type) == (torch.float32, "cpu")


def test_every_parameter_of_the_model_is_known() -> None:
    """Catches a parameter whose name misses the branch rule because a module was renamed."""
    branch_ends = [
        f"{spec.name}.{name}"
        for spec in stage_specs(CONFIG, 0)
        for name, _ in spec.build().named_parameters()
        if f"{spec.name}.{name}".endswith(("attention.dense.weight", "mlp.down.weight"))
    ]
    assert len(branch_ends) == 2 * CONFIG.num_layers
