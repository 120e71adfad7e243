"""Tests that every model feature trains in all layouts as on one process: N1, N3, N8 and N10 on large weights."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megads.model.config import LayerKind, MLPKind, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.ops.config import Implementation, OpsConfig
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.engine.test_bf16_parity import FIRST, FIRST_LOSS_BOUND, reference_losses
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

GATED: dict[str, Any] = {"norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu}
# Six query heads share three or two KV heads: with ALiBi the slopes differ within a GQA group.
# Of samples of 24 tokens, both change the frequencies; of the 12 tokens of a context rank, neither would.
LONGROPE = RopeScalingConfig(
    RopeScaling.longrope, factor=4.0, original_max_seq_len=12, short_factor=[1.0, 1.1], long_factor=[1.9, 3.3]
)
DYNAMIC = RopeScalingConfig(RopeScaling.dynamic, factor=4.0, original_max_seq_len=12)
MODELS = {
    "llama": {
        **GATED,
        "num_kv_heads": 2,
        "position": Position.rope,
        "embedding_norm": False,
        "tie_embeddings": False,
        "bias": False,
    },
    "palm": {"parallel_block": True, "mlp": MLPKind.swiglu, "num_kv_heads": 2, "bias": False},
    "windowed": {"window": 5, "num_kv_heads": 3},
    "qwen": {**GATED, "num_kv_heads": 2, "position": Position.rope, "bias": False, "qk_norm": True, "head_size": 10},
    "olmo2": {
        **GATED,
        "num_kv_heads": 2,
        "position": Position.rope,
        "bias": False,
        "tie_embeddings": False,
        "qk_norm": True,
        "qk_norm_width": QKNormWidth.full,
        "norm_placement": NormPlacement.output,
    },
    "capped": {
        "num_kv_heads": 2,
        "attention_logit_softcap": 0.7,
        "attention_sinks": True,
        "final_logit_softcap": 2.0,
        "scale_embedding": True,
        "embedding_norm": False,
    },
    "capped by kernels": {"num_kv_heads": 2, "attention_logit_softcap": 0.7},
    "all": {
        **GATED,
        "parallel_block": True,
        "num_kv_heads": 2,
        "window": 5,
        "position": Position.rope,
        "qk_norm": True,
        "head_size": 6,
    },
    "multi-query": {"num_kv_heads": 1, "position": Position.rope, "head_size": 12},
    "two KV heads": {
        **GATED,
        "num_heads": 4,
        "num_kv_heads": 2,
        "parallel_block": True,
        "qk_norm": True,
        "attention_sinks": True,
    },
    "pythia": {
        "parallel_block": True,
        "parallel_norms": 2,
        "position": Position.rope,
        "rotary_fraction": 0.5,
        "mlp": MLPKind.gelu_exact,
        "tie_embeddings": False,
    },
    "gpt-j": {
        "parallel_block": True,
        "position": Position.rope,
        "rotary_fraction": 0.5,
        "rotary_interleaved": True,
        "qkv_bias": False,
        "attention_output_bias": False,
        "head_bias": True,
        "tie_embeddings": False,
    },
    "gemma3": {
        "norm": NormKind.rmsnorm,
        "norm_zero_centered": True,
        "norm_placement": NormPlacement.both,
        "mlp": MLPKind.geglu,
        "num_kv_heads": 2,
        "qk_norm": True,
        "bias": False,
        "scale_embedding": True,
        "embedding_norm": False,
        "attention_multiplier": 0.5,
        "position": Position.rope,
        "layer_pattern": [LayerKind(layers=2, window=5, rope_theta=100.0), LayerKind()],
    },
    "granite": {
        **GATED,
        "num_kv_heads": 2,
        "position": Position.rope,
        "bias": False,
        "embedding_norm": False,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logit_scale": 0.25,
    },
    "olmo1": {"norm_affine": False, "qkv_clip": 0.5, "mlp": MLPKind.geglu_exact, "bias": False},
    "opt": {"position": Position.learned, "mlp": MLPKind.relu, "mlp_bias": False},
    "phi3 128k": {
        **GATED,
        "bias": False,
        "position": Position.rope,
        "rotary_fraction": 0.5,
        "rope_theta": 50.0,
        "rope_scaling": LONGROPE,
        "layer_pattern": [LayerKind(layers=2), LayerKind(rope_scaling=DYNAMIC)],
    },
    "smollm3": {
        "norm": NormKind.rmsnorm,
        "mlp": MLPKind.relu2,
        "bias": False,
        "qkv_bias": True,
        "num_kv_heads": 2,
        "position": Position.rope,
        "layer_pattern": [LayerKind(layers=2), LayerKind(position=Position.none, window=5)],
    },
}
FUSED = OpsConfig(Implementation.fused)
FULL = Recompute.full
SELECTIVE = ParallelConfig(tp=3, recompute=Recompute.selective)
WIDE = ("tp2", "pp2", "cp2", "zero3tp2dp2", "tp2pp2sp", "tp2pp2dp2")
CASES = [
    ("llama", "pp2 zb_h1"),
    ("palm", "tp2sp"),
    ("windowed", "cp2"),
    ("windowed", "tp3"),
    ("all", "tp2cp2"),
    ("all", "tp2pp2sp"),
    ("all", "zero3dp2"),
    *((model, layout) for model in ("qwen", "olmo2", "capped") for layout in WIDE),
    *((model, layout) for model in list(MODELS)[-8:] for layout in ("tp2", "pp2", "cp2")),
    *((model, layout) for model in ("pythia", "gpt-j", "gemma3") for layout in ("tp2pp2sp", "zero3dp2")),
]
CHECKS = (
    parity.check_initial_weights,
    parity.check_first_step,
    parity.check_curve,
    parity.check_replicas,
    parity.check_validation,
)


STEPS = 3
"""Both moments, decay and an update of every weight count from the second step on; test_parity.py trains 50."""
Z_LOSS = {"qwen": 0.1}
"""Coefficient of the z-loss by model; 0 for the others."""


def scenario(name: str, **changes: Any) -> Scenario:
    model, z_loss = replace(MODEL, **MODELS[name]), Z_LOSS.get(name, 0.0)
    return scenario_with(**{"steps": STEPS, "masked": True, "model": model, "z_loss": z_loss} | changes)


@functools.cache
def reference(name: str, documents: bool = False) -> Run:
    return train_reference(scenario(name, documents=documents))


# Fewer KV heads than tensor-parallel ranks: two or three ranks share one, alone or beside others.
SHARED_KEYS = [
    *(("multi-query", parity.LAYOUTS[layout]) for layout in ("tp2", "tp3", "tp2pp2sp", "tp2cp2", "zero3tp2dp2")),
    ("multi-query", ParallelConfig(tp=2, pp=2, schedule=ScheduleName.zb_v, recompute=FULL)),
    ("two KV heads", ParallelConfig(tp=4)),
    ("two KV heads", ParallelConfig(tp=4, sequence_parallel=True, tp_chunks=2)),
    ("two KV heads", ParallelConfig(tp=4, dp=2, zero_stage=2)),
]


def faults(run: Run, expected: Run) -> list[str]:
    return [fault for check in CHECKS for fault in check(run, expected)]


@pytest.mark.quick("windowed-cp2", "all-tp2pp2sp", "gpt-j-tp2", "gemma3-cp2", "granite-tp2", "smollm3-pp2")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_model_feature_equals_the_reference_in_every_layout(model: str, layout: str) -> None:
    """Catches qkv rows split between a head's queries and its keys, a gate on another rank than what it gates, a norm
    gradient of only one shard or one rank's heads, a norm over all heads from one rank's squares, scores or logits
    capped with their bias or without the cap's derivative, sinks of another rank's heads, a window in rank-local
    positions, biases in a model that has none, a head's bias of another rank's rows, a multiplier that every rank
    applies before the all-reduce as well, and layers that take their settings by their place in the stage."""
    run = train_layout(scenario(model), parity.LAYOUTS[layout])
    assert faults(run, reference(model)) == []


@pytest.mark.quick("multi-query-parallel2", "two KV heads-parallel6")
@pytest.mark.parametrize(("model", "parallel"), SHARED_KEYS)
def test_ranks_that_share_kv_heads_train_the_reference_model(model: str, parallel: ParallelConfig) -> None:
    """Catches ranks that read another group's key, keys joined in another order, and gradients of keys, their biases or
    their norms from the queries of one rank only."""
    assert faults(train_layout(scenario(model), parallel), reference(model)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_fused_kernels_work_with_shared_kv_heads() -> None:
    """Catches a kernel that takes the number of queries of a KV head from the model instead of the tensors."""
    run = train_layout(scenario("multi-query", ops=FUSED), ParallelConfig(tp=2))
    assert faults(run, reference("multi-query")) == []


@pytest.mark.quick("all-pp2 zb_h1")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "tp2"),
        ("windowed", "cp2"),
        ("all", "pp2 zb_h1"),
        ("olmo2", "tp2"),
        ("capped by kernels", "cp2"),
        ("pythia", "tp2"),
        ("gpt-j", "cp2"),
        ("gemma3", "cp2"),
        ("olmo1", "tp2"),
    ],
)
def test_fused_kernels_work_with_gqa_and_windows(model: str, layout: str) -> None:
    """Catches kernels that read another GQA group's keys, or use another window length."""
    run = train_layout(scenario(model, ops=FUSED), parity.LAYOUTS[layout])
    assert faults(run, reference(model)) == []


@functools.cache
def first_loss_in_bf16(model: str) -> float:
    return reference_losses(bf16(model))[0]


def bf16(model: str, **changes: Any) -> Scenario:
    return replace(FIRST, model=replace(MODEL, **MODELS[model]), **changes)


@pytest.mark.quick("llama-tp2-fused")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("ops", [OpsConfig(Implementation.torch), FUSED], ids=["torch", "fused"])
@pytest.mark.parametrize(("model", "layout"), [("llama", "tp2"), ("all", "cp2"), ("gemma3", "tp2"), ("gpt-j", "cp2")])
def test_first_loss_of_every_feature_in_bf16_is_within_n4(model: str, layout: str, ops: OpsConfig) -> None:
    """N4. Catches a mean square, a gate or a sum over shared heads computed in bf16."""
    found = train_layout(bf16(model, ops=ops), parity.LAYOUTS[layout]).losses[0]
    assert abs(found / first_loss_in_bf16(model) - 1) <= FIRST_LOSS_BOUND


@pytest.mark.quick("all")
@pytest.mark.parametrize("model", ["windowed", "all"])
def test_windows_do_not_cross_document_boundaries(model: str) -> None:
    """Catches a window that attends across a document boundary when context parallelism splits the positions."""
    run = train_layout(scenario(model, documents=True), parity.LAYOUTS["cp2"])
    assert faults(run, reference(model, documents=True)) == []


# A parallel block is one tensor-parallel region, whose communication and deferred wgrads two branches share.
ONE_REGION = {
    "shared, in parts, put off": (
        {"hidden_dropout": 0.2},
        ParallelConfig(tp=2, pp=2, sequence_parallel=True, tp_chunks=3, schedule=ScheduleName.zb_h1),
    ),
    "shared, recomputed": ({"hidden_dropout": 0.2}, ParallelConfig(tp=2, sequence_parallel=True, recompute=FULL)),
    "whole, in parts, recomputed": ({}, ParallelConfig(tp=2, tp_chunks=2, recompute=Recompute.selective)),
    "weights gathered": ({}, ParallelConfig(tp=2, dp=2, zero_stage=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ONE_REGION)
def test_a_parallel_block_is_one_tensor_parallel_region(layout: str) -> None:
    """Catches an input that is all-gathered after its wgrads are deferred, chunks of two branches that are added at the
    wrong place, dropout of an unreduced sum, and weights that are not all-gathered because their layer is not
    called."""
    changes, parallel = ONE_REGION[layout]
    whole = scenario_with(steps=2, masked=True, model=replace(MODEL, **MODELS["all"], **changes))
    assert faults(train_layout(whole, parallel), train_reference(whole)) == []


IN_CHUNKS = OpsConfig(Implementation.torch, loss_chunk=9)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["windowed", "capped", "gemma3", "pythia"])
def test_a_recomputed_attention_core_keeps_window_and_cap(model: str) -> None:
    """Catches a window or a cap that a recomputed attention core omits."""
    parallel = SELECTIVE if model == "windowed" else replace(SELECTIVE, tp=2)
    assert faults(train_layout(scenario(model), parallel), reference(model)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("impl", [Implementation.torch, Implementation.fused])
@pytest.mark.parametrize("model", ["capped", "gpt-j"])
def test_chunked_loss_applies_the_logit_cap(model: str, impl: Implementation) -> None:
    """Catches a cap, its derivative or a bias omitted when logits and their gradient are computed in chunks."""
    run = train_layout(scenario(model, ops=replace(IN_CHUNKS, impl=impl)), parity.LAYOUTS["tp2"])
    assert faults(run, reference(model)) == []
