"""The unsharded model, the reference of every parity test, against a second implementation in fp64."""

from __future__ import annotations

import math
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model import gpt
from megads.model.config import (
    TIED_COPY,
    LayerKind,
    MLPKind,
    ModelConfig,
    NormKind,
    NormPlacement,
    Position,
    QKNormWidth,
)
from megads.model.gpt import GPT, Embedding, initial_value, layer_specs, parameter_generator, token_losses
from megads.model.layers import Dropout
from megads.model.model_size import parameter_count, parameter_shapes, router_state_shapes
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from tests.model import naive
from tests.test_conf import MODELS, compose_train

CONFIG = ModelConfig(num_layers=8, hidden_size=96, num_heads=4, vocab_size=512, init_std=0.02)


def model_config(**changes: object) -> ModelConfig:
    shape = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "ffn_size": 40, "vocab_size": 50, "max_seq_len": 9}
    return ModelConfig(**(shape | changes))


def hot_value(name: str, shape: tuple[int, ...]) -> Tensor:
    noise = torch.empty(shape).normal_(0.0, 0.3, generator=parameter_generator(0, name))
    return noise + 1.0 if name.endswith("norm.weight") else noise


def batch() -> tuple[Tensor, BatchInfo]:
    tokens = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    return tokens, BatchInfo(sample_ids=torch.tensor([0, 1]))


@pytest.mark.parametrize(("position", "tied", "norm"), list(product(Position, (True, False), (True, False))))
def test_equals_the_naive_model(position: Position, tied: bool, norm: bool) -> None:
    """Catches errors in the reference model itself: post-norm blocks, a lost residual, exact GELU, a missing norm."""
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
    "wide heads": {"head_size": 10, "num_kv_heads": 2},
    "normed heads": {"qk_norm": True},
    "RMSNorm of heads, rope": {"qk_norm": True, "norm": NormKind.rmsnorm, "position": Position.rope},
    "RMSNorm": {"norm": NormKind.rmsnorm},
    "SwiGLU": {"mlp": MLPKind.swiglu},
    "parallel block": {"parallel_block": True},
    "norms of outputs": {"norm_placement": NormPlacement.output},
    "normed queries of all heads": {"qk_norm": True, "qk_norm_width": QKNormWidth.full, "norm": NormKind.rmsnorm},
    "OLMo 2": {
        "qk_norm": True, "qk_norm_width": QKNormWidth.full, "norm": NormKind.rmsnorm, "num_kv_heads": 2, "bias": False,
        "norm_placement": NormPlacement.output, "position": Position.rope, "mlp": MLPKind.swiglu,
    },
    "capped scores": {"attention_logit_softcap": 0.7},
    "capped logits": {"final_logit_softcap": 1.5},
    "sinks": {"attention_sinks": True},
    "scaled embedding": {"scale_embedding": True, "embedding_norm": False},
    "all of Gemma 2": {
        "attention_logit_softcap": 0.7, "final_logit_softcap": 1.5, "scale_embedding": True, "embedding_norm": False,
        "num_kv_heads": 2, "window": 3, "position": Position.rope, "attention_sinks": True,
    },
    "no biases": {"bias": False},
    "no biases, gated": {"bias": False, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu},
    "biases of qkv alone": {"bias": False, "qkv_bias": True},
    "no bias of qkv": {"qkv_bias": False},
    "no bias of the attention output": {"attention_output_bias": False},
    "no biases of the MLP": {"mlp_bias": False},
    "bias of the head": {"head_bias": True, "tie_embeddings": False},
    "part of the head rotated": {"position": Position.rope, "rotary_fraction": 0.5, "head_size": 8},
    "adjacent features rotated": {"position": Position.rope, "rotary_interleaved": True},
    "no positions": {"position": Position.none},
    "two norms of a parallel block": {"parallel_block": True, "parallel_norms": 2, "mlp": MLPKind.swiglu},
    "norms on both sides": {"norm_placement": NormPlacement.both},
    "norm weights around 0": {"norm_zero_centered": True, "norm": NormKind.rmsnorm, "qk_norm": True},
    "norms without weights": {"norm_affine": False},
    "multipliers": {
        "embedding_multiplier": 3.0, "embedding_norm": False, "residual_multiplier": 0.3, "logit_scale": 0.25,
        "attention_multiplier": 0.9,
    },
    "scaled residual of outputs": {"residual_multiplier": 0.3, "norm_placement": NormPlacement.output},
    "scaled parallel block": {"residual_multiplier": 0.3, "parallel_block": True},
    "clipped": {"qkv_clip": 0.8, "num_kv_heads": 2},
    **{f"MLP with {kind.value}": {"mlp": kind} for kind in MLPKind if kind not in (MLPKind.gelu, MLPKind.swiglu)},
    "GPT-J": {
        "position": Position.rope, "rotary_fraction": 0.5, "head_size": 8, "rotary_interleaved": True,
        "parallel_block": True, "qkv_bias": False, "attention_output_bias": False, "head_bias": True,
        "tie_embeddings": False,
    },
    "layers that differ": {
        "num_layers": 3, "position": Position.rope, "window": 3, "layer_pattern": [
            LayerKind(rope_theta=50.0, rope_scaling=RopeScalingConfig(RopeScaling.linear, 4.0)),
            LayerKind(window=0), LayerKind(window=2, position=Position.none),
        ],
    },
    "a repeated pattern": {
        "num_layers": 4, "layer_pattern": [LayerKind(layers=2, window=2), LayerKind(position=Position.rope)],
    },
}  # fmt: skip
ALL_FEATURES: dict[str, object] = {
    "num_kv_heads": 3, "window": 2, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "parallel_block": True,
    "position": Position.rope, "qk_norm": True, "head_size": 8,
}  # fmt: skip


@pytest.mark.parametrize("changes", [*FEATURES.values(), ALL_FEATURES], ids=[*FEATURES, "all"])
def test_features_equal_the_naive_model(changes: dict[str, object]) -> None:
    """Catches a query head that attends to the wrong KV head, a window off by one, a mean or bias in RMSNorm, SwiGLU's
    halves swapped, a parallel block whose MLP reads attention's output, and QK norms after RoPE or over all heads."""
    config = model_config(**changes)
    model = GPT(config, 0, hot_value).double()
    tokens, info = batch()
    expected = torch.stack([naive.logits(config, model.parameters_by_name(), row) for row in tokens])
    torch.testing.assert_close(model(tokens, info), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_no_feature_is_ignored(changes: dict[str, object]) -> None:
    """Catches a config key that both implementations ignore."""
    tokens, info = batch()
    plain, changed = (GPT(model_config(**c), 0, hot_value)(tokens, info) for c in ({}, changes))
    # The tanh approximation of GELU is close to GELU.
    least = 1e-5 if changes.get("mlp") is MLPKind.gelu_exact else 1e-2
    assert (plain - changed).norm() > least * plain.norm()


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_by_name(tied: bool) -> None:
    """Catches a tied head listed twice, a missing parameter, and a tied weight that lacks the gradient of one use."""
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
    """Catches a parameter that keeps torch's default initialization."""
    config = model_config()
    torch.manual_seed(0)
    first = GPT(config, 5).parameters_by_name()
    torch.manual_seed(1)
    again, other = GPT(config, 5).parameters_by_name(), GPT(config, 6).parameters_by_name()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.word.weight"], other["embedding.word.weight"])


def test_dropout_does_not_depend_on_the_micro_batch() -> None:
    """Catches a dropout mask that is drawn for the batch as a whole, and dropout in evaluation."""
    model = GPT(model_config(hidden_dropout=0.3, attention_dropout=0.3), 0, hot_value)
    tokens, info = batch()
    together = model(tokens, info)
    alone = [model(tokens[i : i + 1], BatchInfo(sample_ids=info.sample_ids[i : i + 1])) for i in range(2)]
    torch.testing.assert_close(together, torch.cat(alone))
    plain = GPT(model_config(), 0, hot_value)(tokens, info)
    assert not torch.allclose(together, plain)
    torch.testing.assert_close(model.eval()(tokens, info), plain)


def test_a_model_that_cannot_be_built_is_refused() -> None:
    """Catches a num_heads that does not divide hidden_size and only fails in a reshape inside the model."""
    with pytest.raises(ConfigError, match="num_heads"):
        GPT(ModelConfig(hidden_size=10, num_heads=3), 0)


@pytest.mark.parametrize("tied", [True, False])
def test_empty_model_has_every_weight_once(tied: bool) -> None:
    """Catches lost weight tying, a weight left on the meta device, and a dtype other than the requested one."""
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


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the layers, built on the meta device."""
    shapes = {}
    with torch.device("meta"):
        for spec in layer_specs(config, 0):
            layer = spec.build()
            assert all(parameter.is_meta for parameter in layer.parameters())
            shapes |= {f"{spec.name}.{name}": tuple(p.shape) for name, p in layer.named_parameters()}
    if config.tie_embeddings:
        del shapes[TIED_COPY]
    return shapes


@pytest.mark.parametrize(("position", "tied", "norm"), list(product(Position, (True, False), (True, False))))
def test_parameters_are_those_of_the_plan(position: Position, tied: bool, norm: bool) -> None:
    """Catches an option for which model and planner differ in the names, shapes or order of parameters."""
    config = ModelConfig(
        num_layers=3, hidden_size=24, num_heads=6, ffn_size=40, vocab_size=50, max_seq_len=9,
        position=position, tie_embeddings=tied, embedding_norm=norm,
    )  # fmt: skip
    assert list(built_shapes(config).items()) == list(parameter_shapes(config).items())


@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_features_have_the_planned_parameters(changes: dict) -> None:
    """Catches a projection, gate, bias or second norm that the planner counts differently than the model."""
    config = model_config(**changes)
    assert list(built_shapes(config).items()) == list(parameter_shapes(config).items())


@pytest.mark.quick("bloom_560m", "llama3_8b", "qwen3_8b", "olmo2_7b", "gpt3_1b3", "tiny")
@pytest.mark.parametrize("preset", MODELS)
def test_presets_have_the_planned_number_of_parameters(preset: str) -> None:
    """Catches a preset whose model differs from the plan that its published parameter count was checked against."""
    config = compose_train(f"model={preset}").model
    # None means the tokenizer's size, which no preset knows.
    config.vocab_size = config.vocab_size or 512
    state = sum(prod(shape) for shape in router_state_shapes(config).values())
    assert sum(prod(shape) for shape in built_shapes(config).values()) == parameter_count(config) + state


def test_bloom_176b_has_its_published_number_of_parameters() -> None:
    """Catches a missing bias or norm anywhere in the real model."""
    config = compose_train("model=bloom_176b").model
    assert sum(prod(shape) for shape in built_shapes(config).values()) == 176_247_271_424


def test_weights_of_the_layers_for_the_partition() -> None:
    """Catches an embedding or head with weight 0 in the partition, and a final norm that can be a layer of its own."""
    specs = layer_specs(ModelConfig(num_layers=2), 0)
    assert [(spec.name, spec.cost) for spec in specs] == [
        ("embedding", 1.0), ("blocks.0", 1.0), ("blocks.1", 1.0), ("final_norm", 0.0), ("head", 1.0),
    ]  # fmt: skip


def test_every_dropout_has_a_site_of_its_own() -> None:
    """Catches two dropouts with equal masks, and a site that does not identify the module in the whole model."""
    config = ModelConfig(num_layers=3, hidden_dropout=0.1, attention_dropout=0.2)
    sites = {}
    for spec in layer_specs(config, 0):
        for path, module in spec.build().named_modules():
            if isinstance(module, Dropout):
                assert module.site == f"{spec.name}.{path}"
                sites[module.site] = module.p
    assert len(sites) == 1 + 3 * 3
    assert sites["embedding.dropout"] == sites["blocks.2.mlp_dropout"] == sites["blocks.2.attention_dropout"] == 0.1
    assert sites["blocks.2.attention.core.dropout"] == 0.2


def test_given_positions_select_learned_embeddings() -> None:
    """Catches learned positions that start at 0 in a row that continues a document."""
    config = ModelConfig(hidden_size=8, num_heads=2, max_seq_len=10, position=Position.learned, embedding_norm=False)
    embedding, tokens = Embedding(config, 0), torch.tensor([[3, 3], [3, 3]])
    # Modules are built with uninitialized memory, which may hold NaN.
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    info = BatchInfo(sample_ids=torch.tensor([0, 1]), position_ids_bs=torch.tensor([[0, 1], [7, 2]]))
    expected = embedding.word(tokens) + embedding.position(info.position_ids_bs)
    assert torch.equal(embedding(tokens, info), expected)
    assert torch.equal(embedding(tokens, BatchInfo(info.sample_ids))[1], expected[0])


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
    """Catches a missing 1 / sqrt(2 L) on output projections of attention and MLP (8 layers: 1/4), or an extra one."""
    drawn = initial_value(CONFIG, 1)(name, parameter_shapes(CONFIG)[name]).double()
    error = std / math.sqrt(2 * drawn.numel())
    assert abs(float(drawn.std()) - std) < 5 * error
    assert abs(float(drawn.mean())) < 5 * std / math.sqrt(drawn.numel())


def test_gains_are_one_and_biases_zero() -> None:
    """Catches norm weights that are initialized randomly, and a bias initialized like a matrix."""
    value = initial_value(CONFIG, 1)
    for name, shape in parameter_shapes(CONFIG).items():
        if len(shape) == 1:
            expected = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            assert torch.equal(value(name, shape), expected), name


def test_values_depend_on_seed_and_name_alone() -> None:
    """Catches a shared random stream: weights would depend on what else a rank builds, and in which order."""
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


def test_large_values_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blocks that repeat each other, are left out, or are drawn from one stream shared by threads."""
    monkeypatch.setattr(gpt, "DRAWN_BY_ONE", 1000)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(gpt.draw_normal((70, 50), 0.3, 1, "blocks.0.mlp.up.weight").flatten())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    blocks = found[0].split(1000)
    assert len({tuple(block[:8].tolist()) for block in blocks}) == 4
    assert all(block.std().item() == pytest.approx(0.3, rel=0.1) for block in blocks)


def test_values_are_fp32_on_the_cpu_under_any_default_device() -> None:
    """Catches initial weights that differ between CPU and GPU runs, or are drawn on the device of their layer."""
    value = initial_value(CONFIG, 1)
    for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "final_norm.weight"):
        drawn = value(name, parameter_shapes(CONFIG)[name])
        assert (drawn.dtype, drawn.device.type) == (torch.float32, "cpu")


def test_every_parameter_of_the_model_is_known() -> None:
    """Catches an output projection that loses its 1 / sqrt(2 L) because a module was renamed."""
    branch_ends = [
        f"{spec.name}.{name}"
        for spec in layer_specs(CONFIG, 0)
        for name, _ in spec.build().named_parameters()
        if f"{spec.name}.{name}".endswith(("attention.dense.weight", "mlp.down.weight"))
    ]
    assert len(branch_ends) == 2 * CONFIG.num_layers


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return logits, torch.randint(0, 11, (2, 5), generator=generator)


def test_equals_log_softmax_written_out() -> None:
    """Catches another token's loss, a logarithm to a base other than e, and a mean in place of per-token losses."""
    logits, labels = example(torch.float64)
    losses = token_losses(logits, labels)
    assert losses.dtype is torch.float64 and losses.shape == (2, 5)
    for b in range(2):
        for s in range(5):
            row = logits[b, s]
            expected = row.exp().sum().log() - row[labels[b, s]]
            torch.testing.assert_close(losses[b, s], expected, rtol=1e-14, atol=1e-14)


def test_gradient_is_probability_minus_one_hot() -> None:
    """Catches a gradient that is averaged or scaled."""
    logits, labels = example(torch.float64)
    token_losses(logits, labels).sum().backward()
    expected = logits.detach().softmax(-1) - torch.nn.functional.one_hot(labels, 11)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_inside(dtype: torch.dtype) -> None:
    """Catches a softmax in bf16: the loss of bf16 logits is fp32, with fp32 accuracy."""
    logits, labels = example(dtype)
    losses = token_losses(logits, labels)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), token_losses(logits.double(), labels), rtol=1e-6, atol=1e-6)


def test_uniform_logits_cost_the_log_of_the_vocabulary() -> None:
    """Catches a loss in bits instead of nats."""
    losses = token_losses(torch.zeros(1, 3, 250), torch.tensor([[0, 1, 249]]))
    torch.testing.assert_close(losses, torch.full((1, 3), 250.0).log())
