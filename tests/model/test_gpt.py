"""The unsharded model, the oracle of every parity test, against a second implementation in fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import GPT
from megads.model.initialise import parameter_generator
from megads.plan.model_size import parameter_shapes
from tests.model import naive


def model_config(**changes: object) -> ModelConfig:
    return ModelConfig(num_layers=2, hidden_size=24, num_heads=6, ffn_size=40, vocab_size=50, max_seq_len=9, **changes)


def hot_value(name: str, shape: tuple[int, ...]) -> Tensor:
    noise = torch.empty(shape).normal_(0.0, 0.3, generator=parameter_generator(0, name))
    return noise + 1.0 if name.endswith("norm.weight") else noise


def batch() -> tuple[Tensor, BatchInfo]:
    tokens = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    return tokens, BatchInfo(sample_ids=torch.tensor([0, 1]))


@pytest.mark.parametrize(("position", "tied", "norm"), list(product(Position, (True, False), (True, False))))
def test_equals_the_naive_model(position: Position, tied: bool, norm: bool) -> None:
    """Catches an oracle that is wrong itself: post-norm blocks, a lost residual, exact GELU, a norm left out."""
    config = model_config(position=position, tie_embeddings=tied, embedding_norm=norm)
    model = GPT(config, 0, hot_value).double()
    tokens, info = batch()
    expected = torch.stack([naive.logits(config, model.parameters_by_name(), row) for row in tokens])
    torch.testing.assert_close(model(tokens, info), expected, rtol=1e-10, atol=1e-10)


# Each alone, and all together.
FEATURES: dict[str, dict[str, object]] = {
    "grouped queries": {"num_kv_heads": 2},
    "one head of keys": {"num_kv_heads": 1},
    "window": {"window": 3},
    "RMSNorm": {"norm": NormKind.rmsnorm},
    "SwiGLU": {"mlp": MLPKind.swiglu},
    "parallel block": {"parallel_block": True},
    "no biases": {"bias": False},
    "no biases, gated": {"bias": False, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu},
}
ALL_FEATURES: dict[str, object] = {
    "num_kv_heads": 3, "window": 2, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": True,
    "position": Position.rope,
}  # fmt: skip


@pytest.mark.parametrize("changes", [*FEATURES.values(), ALL_FEATURES], ids=[*FEATURES, "all"])
def test_features_equal_the_naive_model(changes: dict[str, object]) -> None:
    """Catches a query head that reads the wrong keys, a window off by one, a mean or bias in RMSNorm, gates taken for
    what they gate, and a parallel block whose MLP reads what attention added."""
    config = model_config(**changes)
    model = GPT(config, 0, hot_value).double()
    tokens, info = batch()
    expected = torch.stack([naive.logits(config, model.parameters_by_name(), row) for row in tokens])
    torch.testing.assert_close(model(tokens, info), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_no_feature_is_ignored(changes: dict[str, object]) -> None:
    """Catches a key that changes nothing, in both implementations alike."""
    tokens, info = batch()
    plain, changed = (GPT(model_config(**c), 0, hot_value)(tokens, info) for c in ({}, changes))
    assert (plain - changed).norm() > 1e-2 * plain.norm()


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_by_name(tied: bool) -> None:
    """Catches a tied head listed twice, a parameter left out, and gradients of one use lost."""
    config = model_config(tie_embeddings=tied)
    model = GPT(config, 0, hot_value)
    named = model.parameters_by_name()
    assert {name: tuple(p.shape) for name, p in named.items()} == parameter_shapes(config)
    assert {id(p) for p in named.values()} == {id(p) for p in model.parameters()}
    tokens, info = batch()
    model(tokens, info).sum().backward()
    unused = torch.ones(50, dtype=torch.bool)
    unused[tokens.unique()] = False
    # Only a tied embedding gets a gradient for tokens that were not in the input.
    assert bool((named["embedding.word.weight"].grad[unused] != 0).any()) is tied


def test_weights_come_from_the_seed() -> None:
    """Catches a model that keeps torch's default initialisation somewhere."""
    config = model_config()
    torch.manual_seed(0)
    first = GPT(config, 5).parameters_by_name()
    torch.manual_seed(1)
    again, other = GPT(config, 5).parameters_by_name(), GPT(config, 6).parameters_by_name()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.word.weight"], other["embedding.word.weight"])


def test_dropout_does_not_depend_on_the_micro_batch() -> None:
    """Catches a dropout in the model that draws for the batch as a whole; evaluation has none."""
    model = GPT(model_config(hidden_dropout=0.3, attention_dropout=0.3), 0, hot_value)
    tokens, info = batch()
    together = model(tokens, info)
    alone = [model(tokens[i : i + 1], BatchInfo(sample_ids=info.sample_ids[i : i + 1])) for i in range(2)]
    torch.testing.assert_close(together, torch.cat(alone))
    plain = GPT(model_config(), 0, hot_value)(tokens, info)
    assert not torch.allclose(together, plain)
    torch.testing.assert_close(model.eval()(tokens, info), plain)


def test_a_model_that_cannot_be_built_is_refused() -> None:
    """Catches heads that do not divide the width being found by a reshape deep inside."""
    with pytest.raises(ConfigError, match="num_heads"):
        GPT(ModelConfig(hidden_size=10, num_heads=3), 0)


@pytest.mark.parametrize("tied", [True, False])
def test_empty_model_has_every_weight_once(tied: bool) -> None:
    """Catches a tie that is lost, a weight left on the meta device, and a dtype that is not the one asked for."""
    config = model_config(tie_embeddings=tied, position=Position.learned)
    model = GPT.empty(config, torch.device("cpu"), torch.bfloat16)
    named = model.parameters_by_name()
    assert {name: tuple(p.shape) for name, p in named.items()} == parameter_shapes(config)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.bfloat16)}
    reference = GPT(config, 0, hot_value).bfloat16()
    with torch.no_grad():
        for name, parameter in reference.parameters_by_name().items():
            named[name].copy_(parameter)
    assert torch.equal(model(*batch()), reference(*batch()))
