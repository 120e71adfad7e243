"""Models and scenarios on which the tests of each kind of context parallelism compare a layout with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megads.model.config import Position
from megads.ops.config import Float8Recipe, Implementation, OpsConfig
from megads.parallel.config import EngineKind, ParallelConfig
from tests import parity
from tests.engine import test_float8 as float8
from tests.engine.test_bf16_parity import FIRST_LOSS_BOUND
from tests.engine.test_model_features import FUSED, MODELS, STEPS, bf16, faults, first_loss_in_bf16, reference
from tests.engine.test_model_features import scenario as features
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout

EIGHT_HEADS = {"num_heads": 8, "num_kv_heads": 2, "position": Position.alibi, "attention_sinks": True}
"""Heads for four ranks, each of which shares its KV head with another."""
NARROW = {"window": 3, "num_kv_heads": 2}
"""A window of at most a chunk: most shifts of a ring are omitted, and parts of chunks are sent."""
MODELS_IN_CONTEXT = MODELS | {"eight heads": EIGHT_HEADS, "narrow": NARROW, "bloom": {}}
DROPOUT = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)


def scenario(name: str, **changes: Any) -> Scenario:
    """The training of a model by its name in MODELS_IN_CONTEXT."""
    if name in MODELS:
        return features(name, **changes)
    model = replace(MODEL, **MODELS_IN_CONTEXT[name])
    return scenario_with(**{"steps": STEPS, "masked": True, "model": model} | changes)


def expected(name: str) -> Run:
    """The same training in one process."""
    return reference(name) if name in MODELS else parity.reference_of(scenario(name))


def faults_of_model(name: str, layout: ParallelConfig) -> list[str]:
    """How a layout's training of a model differs from that in one process."""
    return faults(train_layout(scenario(name), layout), expected(name))


def faults_of_documents(name: str, layout: ParallelConfig) -> list[str]:
    """The same for packed documents."""
    whole = scenario(name, documents=True, steps=2)
    return faults(train_layout(whole, layout), parity.reference_of(whole))


def faults_of_dropout(impl: Implementation, layout: ParallelConfig) -> list[str]:
    """The same with dropout, of probabilities also, and packed documents."""
    whole = scenario_with(masked=True, documents=True, steps=2, model=DROPOUT)
    return faults(train_layout(replace(whole, ops=OpsConfig(impl)), layout), parity.reference_of(whole))


def faults_of_kernels(name: str, layout: ParallelConfig) -> list[str]:
    """The same with megads' kernels."""
    return faults(train_layout(features(name, ops=FUSED), layout), reference(name))


def faults_of_deepspeed(layout: ParallelConfig) -> list[str]:
    """The same with DeepSpeed's engine."""
    return faults(train_layout(scenario("two KV heads", engine=EngineKind.deepspeed), layout), expected("two KV heads"))


def faults_of_float8(recipe: Float8Recipe, layout: ParallelConfig) -> list[str]:
    """The same with emulated FP8, by the bounds of N11."""
    whole = float8.scenario("llama", recipe, seq_len=24)
    return float8.faults(train_layout(whole, layout), parity.reference_of(whole))


def first_loss_is_within_n4(layout: ParallelConfig) -> bool:
    """Whether the first loss in bf16 is as close to that of one process as N4 asks."""
    found = train_layout(bf16("all"), layout).losses[0]
    return bool(abs(found / first_loss_in_bf16("all") - 1) <= FIRST_LOSS_BOUND)
