"""Parameter counts against published models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.plan.parameters import parameter_count, parameter_shapes

VOCAB = 250_880


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "count"),
    [
        (14336, 70, 112, 176_247_271_424),
        (1024, 24, 16, 559_214_592),
        (1536, 24, 16, 1_065_314_304),
        (2048, 24, 16, 1_722_408_960),
        (2560, 30, 32, 3_002_557_440),
        (4096, 30, 32, 7_069_016_064),
    ],
)
def test_bloom_family(hidden: int, layers: int, heads: int, count: int) -> None:
    """Catches a missing bias, norm or embedding norm, or a tied head counted twice."""
    config = ModelConfig(hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=VOCAB)
    assert parameter_count(config) == count


def test_optional_parameters() -> None:
    """Catches an option of the model that adds or drops the wrong tensors."""
    plain = ModelConfig(hidden_size=8, num_heads=2, vocab_size=32, max_seq_len=16, ffn_size=24)
    full = ModelConfig(**{**plain.__dict__, "position": Position.learned, "tie_embeddings": False})
    bare = ModelConfig(**{**plain.__dict__, "embedding_norm": False})
    assert parameter_count(full) - parameter_count(plain) == 16 * 8 + 32 * 8
    assert parameter_count(plain) - parameter_count(bare) == 16
    assert parameter_shapes(plain)["blocks.1.mlp.up.weight"] == (24, 8)
    assert parameter_shapes(plain)["blocks.1.mlp.down.weight"] == (8, 24)
    assert sum(prod(shape) for shape in parameter_shapes(full).values()) == parameter_count(full)


def test_tiny_llama() -> None:
    """Catches keys of every query head, a gate that is missing, a bias in a norm or a projection that is to have none:
    TinyLlama-1.1B has 1,100,048,384 parameters (Zhang et al. 2024)."""
    biased = ModelConfig(
        hidden_size=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn_size=5632, vocab_size=32000,
        position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, embedding_norm=False, tie_embeddings=False,
    )  # fmt: skip
    biases = sum(prod(shape) for name, shape in parameter_shapes(biased).items() if name.endswith(".bias"))
    assert biases == 22 * (2560 + 2048 + 2 * 5632 + 2048)
    assert parameter_count(biased) - biases == parameter_count(replace(biased, bias=False)) == 1_100_048_384
    layer_norms = replace(biased, bias=False, norm=NormKind.layernorm)
    assert not any(name.endswith(".bias") for name in parameter_shapes(layer_norms))
