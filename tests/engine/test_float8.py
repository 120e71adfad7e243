"""Tests of FP8: the emulation trains the same curve in every layout as the reference on one process (N11)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megads.model.config import MLPKind, NormKind, Position
from megads.ops.config import Float8, Float8Recipe
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

BLOOM = replace(MODEL, num_layers=4, hidden_size=24)
LLAMA: dict[str, Any] = {
    "norm": NormKind.rmsnorm,
    "mlp": MLPKind.swiglu,
    "bias": False,
    "position": Position.rope,
    "num_kv_heads": 2,
}
MODELS = {
    "bloom": BLOOM,
    "llama": replace(BLOOM, **LLAMA),
    "one KV head": replace(BLOOM, **LLAMA | {"num_kv_heads": 1}),
    "parallel block": replace(BLOOM, parallel_block=True),
}
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "dp2, ZeRO-0": ParallelConfig(dp=2, zero_stage=0),
    "cp2": ParallelConfig(cp=2),
    "tp2cp2": ParallelConfig(tp=2, cp=2),
    "tp2sp cp2": ParallelConfig(tp=2, cp=2, sequence_parallel=True),
    "recompute": ParallelConfig(recompute=Recompute.full),
    "tp2 recompute": ParallelConfig(tp=2, recompute=Recompute.full),
    "pp2 zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    "tp2sp pp2 zb_h1": ParallelConfig(tp=2, pp=2, sequence_parallel=True, schedule=ScheduleName.zb_h1),
}
CHECKS = (*parity.EVERY_CHECK,)


def scenario(model: str, recipe: Float8Recipe, **changes: Any) -> Scenario:
    """In fp64: in fp32, a value whose last bits differ between layouts may be rounded to another FP8 number."""
    settings = {"steps": 3, "masked": True, "precision": "float64", "global_batch_size": 4, "seq_len": 16, "spread": 12}
    return scenario_with(**settings | {"model": MODELS[model], "float8": Float8(recipe)} | changes)


@functools.cache
def reference(model: str, recipe: Float8Recipe) -> Run:
    return train_reference(scenario(model, recipe))


def faults(run: Run, expected: Run) -> list[str]:
    return [fault for check in CHECKS for fault in check(run, expected)]


RECIPES = (Float8Recipe.tensorwise, Float8Recipe.rowwise)


@pytest.mark.quick("tp2sp-llama-tensorwise", "tp2cp2-bloom-tensorwise", "tp2-llama-rowwise", "pp2 zb_v-bloom-rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_trains_in_every_layout_as_on_one_process(layout: str, model: str, recipe: Float8Recipe) -> None:
    """Catches scales of a rank's part of a tensor, of a micro-batch or of an earlier one, weights that are not
    quantized again after a step, and gradients in the format of activations."""
    run = train_layout(scenario(model, recipe), LAYOUTS[layout])
    assert faults(run, reference(model, recipe)) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 4])
def test_the_size_of_a_micro_batch_changes_no_scale(size: int, recipe: Float8Recipe) -> None:
    """Catches a scale that samples of a micro-batch share."""
    run = train_layout(scenario("bloom", recipe, micro_batch_size=size), LAYOUTS["single"])
    assert faults(run, reference("bloom", recipe)) == []
