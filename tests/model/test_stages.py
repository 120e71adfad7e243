"""The stages against the planner's parameter table, nothing allocated."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from megads.batch import BatchInfo
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.dropout import Dropout
from megads.model.stages import TIED_COPY, Embedding, stage_specs
from megads.plan.model_size import parameter_count, parameter_shapes
from tests.test_conf import MODELS, compose_train


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the stages, built on the meta device."""
    shapes = {}
    with torch.device("meta"):
        for spec in stage_specs(config, 0):
            stage = spec.build()
            assert all(parameter.is_meta for parameter in stage.parameters())
            shapes |= {f"{spec.name}.{name}": tuple(p.shape) for name, p in stage.named_parameters()}
    if config.tie_embeddings:
        del shapes[TIED_COPY]
    return shapes


@pytest.mark.parametrize(("position", "tied", "norm"), list(product(Position, (True, False), (True, False))))
def test_parameters_are_those_of_the_plan(position: Position, tied: bool, norm: bool) -> None:
    """Catches an option that the model and the planner understand differently, in names, shapes or order."""
    config = ModelConfig(
        num_layers=3, hidden_size=24, num_heads=6, ffn_size=40, vocab_size=50, max_seq_len=9,
        position=position, tie_embeddings=tied, embedding_norm=norm,
    )  # fmt: skip
    assert list(built_shapes(config).items()) == list(parameter_shapes(config).items())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"norm": NormKind.rmsnorm},
        {"mlp": MLPKind.swiglu},
        {"parallel_block": True},
        {"bias": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_features_have_the_planned_parameters(changes: dict) -> None:
    """Catches a projection, a gate, a bias or a second norm that the planner counts otherwise than the model has it."""
    config = ModelConfig(num_layers=2, hidden_size=24, num_heads=6, ffn_size=40, vocab_size=50, **changes)
    assert list(built_shapes(config).items()) == list(parameter_shapes(config).items())


@pytest.mark.parametrize("preset", MODELS)
def test_presets_have_the_planned_number_of_parameters(preset: str) -> None:
    """Catches a preset whose real model differs from what its published count was checked against."""
    config = compose_train(f"model={preset}").model
    # null is the tokenizer's, which no preset knows.
    config.vocab_size = config.vocab_size or 512
    assert sum(prod(shape) for shape in built_shapes(config).values()) == parameter_count(config)


def test_bloom_176b_has_its_published_number_of_parameters() -> None:
    """Catches a missing bias or norm anywhere in the real model."""
    config = compose_train("model=bloom_176b").model
    assert sum(prod(shape) for shape in built_shapes(config).values()) == 176_247_271_424


def test_weights_of_the_stages_for_the_partition() -> None:
    """Catches an embedding or head that counts nothing, and a final norm that may end up alone on a stage."""
    specs = stage_specs(ModelConfig(num_layers=2), 0)
    assert [(spec.name, spec.weight) for spec in specs] == [
        ("embedding", 1.0), ("blocks.0", 1.0), ("blocks.1", 1.0), ("final_norm", 0.0), ("head", 1.0),
    ]  # fmt: skip


def test_every_dropout_has_a_site_of_its_own() -> None:
    """Catches two places with equal masks, and a site that does not say where in the whole model it is."""
    config = ModelConfig(num_layers=3, hidden_dropout=0.1, attention_dropout=0.2)
    sites = {}
    for spec in stage_specs(config, 0):
        for path, module in spec.build().named_modules():
            if isinstance(module, Dropout):
                assert module.site == f"{spec.name}.{path}"
                sites[module.site] = module.p
    assert len(sites) == 1 + 3 * 3
    assert sites["embedding.dropout"] == sites["blocks.2.mlp_dropout"] == sites["blocks.2.attention_dropout"] == 0.1
    assert sites["blocks.2.attention.core.dropout"] == 0.2


def test_given_positions_select_learned_embeddings() -> None:
    """Catches an embedding that counts from 0 in a row that continues a document."""
    config = ModelConfig(hidden_size=8, num_heads=2, max_seq_len=10, position=Position.learned, embedding_norm=False)
    embedding, tokens = Embedding(config, 0), torch.tensor([[3, 3], [3, 3]])
    # Stages come with uninitialised memory, which may hold NaN.
    for parameter in embedding.parameters():
        torch.nn.init.normal_(parameter)
    info = BatchInfo(sample_ids=torch.tensor([0, 1]), position_ids_bs=torch.tensor([[0, 1], [7, 2]]))
    expected = embedding.word(tokens) + embedding.position(info.position_ids_bs)
    assert torch.equal(embedding(tokens, info), expected)
    assert torch.equal(embedding(tokens, BatchInfo(info.sample_ids))[1], expected[0])
