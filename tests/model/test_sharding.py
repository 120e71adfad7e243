"""Tests that the sharding table covers every matrix, dropout and attention core of the model, and nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from megads.model.attention import AttentionCore
from megads.model.config import MLPKind, ModelConfig, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.gpt import layer_specs
from megads.model.layers import Dropout
from megads.model.moe_config import MoEConfig
from megads.model.sharding import FULL_QK_NORM, SHARDING, sharding_of
from megads.parallel.partition import ParallelStyle

# Every option that adds a module; a block's MLP is one of two kinds.
EVERYTHING = ModelConfig(num_layers=2, position=Position.learned, tie_embeddings=False, num_kv_heads=2, qk_norm=True,
    attention_sinks=True,
)  # fmt: skip
EXPERTS = ModelConfig(bias=False, moe=MoEConfig(num_experts=4, shared_ffn_size=8, shared_gate=True))
CONFIGS = [
    *(replace(EVERYTHING, mlp=mlp, parallel_block=parallel) for mlp in MLPKind for parallel in (True, False)),
    *(replace(EVERYTHING, norm_placement=placement) for placement in (NormPlacement.output, NormPlacement.both)),
    replace(EVERYTHING, parallel_block=True, parallel_norms=2, head_bias=True),
    *(replace(EXPERTS, mlp=kind) for kind in (MLPKind.gelu, MLPKind.swiglu)),
]
REPLICATED = {"embedding.norm", "final_norm"}


@functools.cache
def modules() -> dict[str, torch.nn.Module]:
    """Every module of the model with all options on, by full path."""
    found = {}
    with torch.device("meta"):
        for spec in (spec for config in CONFIGS for spec in layer_specs(config, 0)):
            found |= {f"{spec.name}.{path}".rstrip("."): module for path, module in spec.build().named_modules()}
    return found


def first_match(patterns: dict, path: str) -> object:
    return next((value for pattern, value in patterns.items() if fnmatchcase(path, pattern)), None)


def test_every_parameter_is_cut_or_known_to_be_replicated() -> None:
    """Catches a new matrix that every rank silently holds unsharded."""
    for path, module in modules().items():
        if not list(module.parameters(recurse=False)):
            continue
        replicated = path in REPLICATED or path.endswith(
            (".input_norm", ".post_attention_norm", "_output_norm", ".router", ".shared_gate")
        )
        assert (first_match(SHARDING.parameters, path) is None) == replicated, path


def test_cuts_pair_up_in_every_branch() -> None:
    """Catches a column-parallel layer without its row-parallel layer."""
    styles = {path: first_match(SHARDING.parameters, path) for path in modules()}
    for block in ("blocks.0", "blocks.1"):
        assert (styles[f"{block}.attention.qkv"], styles[f"{block}.attention.dense"]) == (
            ParallelStyle.column,
            ParallelStyle.row,
        )
        assert styles[f"{block}.mlp.up"] is styles[f"{block}.mlp.gate_up"] is ParallelStyle.column
        assert styles[f"{block}.mlp.down"] is ParallelStyle.row
        assert (styles[f"{block}.shared_input"], styles[f"{block}.summed_output"]) == (
            ParallelStyle.columns,
            ParallelStyle.rows,
        )
    assert (styles["embedding.word"], styles["head"]) == (ParallelStyle.vocab, ParallelStyle.vocab_head)
    assert styles["embedding.position"] is ParallelStyle.sequence


def test_every_dropout_follows_its_tokens() -> None:
    """Catches a dropout outside of the tensor-parallel regions that treats a shard's tokens as the first ones, and one
    inside that shards a full tensor."""
    for path, module in modules().items():
        if isinstance(module, Dropout):
            sharded = any(fnmatchcase(path, pattern) for pattern in SHARDING.dropouts)
            assert sharded is not path.endswith("attention.core.dropout"), path


def test_every_attention_core_is_narrowed() -> None:
    """Catches an attention core that uses the ALiBi slopes of the first heads on every rank."""
    for path, module in modules().items():
        assert isinstance(module, AttentionCore) == any(fnmatchcase(path, p) for p in SHARDING.attention_cores), path


@pytest.mark.parametrize(
    "pattern",
    [*SHARDING.parameters, *SHARDING.dropouts, *SHARDING.attention_cores, *SHARDING.experts, *SHARDING.routers],
)
def test_no_pattern_is_unused(pattern: str) -> None:
    """Catches a stale pattern of a renamed module."""
    assert any(fnmatchcase(path, pattern) for path in modules())


def test_norms_of_all_heads_are_cut_with_them() -> None:
    """Catches norm weights of all heads that every rank holds unsharded, and a pattern for them that is unused."""
    config = replace(EVERYTHING, norm=NormKind.rmsnorm, qk_norm_width=QKNormWidth.full)
    table = sharding_of(config)
    with torch.device("meta"):
        paths = [f"{s.name}.{path}" for s in layer_specs(config, 0) for path, _ in s.build().named_modules()]
    styles = {path: first_match(table.parameters, path) for path in paths}
    for part, style in (
        ("query_norm", ParallelStyle.vector),
        ("key_norm", ParallelStyle.vector),
        ("query_key_norms", ParallelStyle.norms),
    ):
        assert styles[f"blocks.1.attention.{part}"] is style
    assert all(any(fnmatchcase(path, pattern) for path in paths) for pattern in FULL_QK_NORM)
