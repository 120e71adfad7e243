"""Tests that compiled blocks train as eager ones, also in parallel layouts: N3 over five steps, unchanged names."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megads.model.config import Position
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_model_features import MODELS as OPTIONS
from tests.parity import MODEL, Run, Scenario, build_engine, scenario_with, step_batches, train_layout, train_reference

COMPILED = OpsConfig(Implementation.torch, Compile.blocks)
FUSED_COMPILED = OpsConfig(Implementation.fused, Compile.blocks)
# Slow, as each rank compiles its blocks.
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
CASES = {
    "single": ({}, ParallelConfig()),
    "rope, parallel block": ({"position": Position.rope, "parallel_block": True}, ParallelConfig()),
    "tp2, shared": ({"hidden_dropout": 0.2}, ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.full)),
    "zb_h1": ({}, ParallelConfig(pp=2, schedule=ScheduleName.zb_h1)),
    "cp2, selective": ({"parallel_block": True}, ParallelConfig(cp=2, recompute=Recompute.selective)),
    "zero2": ({}, ParallelConfig(dp=2, zero_stage=2)),
    "layers that differ": (OPTIONS["gemma3"], ParallelConfig(recompute=Recompute.full)),
    "adjacent features rotated": (OPTIONS["gpt-j"], ParallelConfig()),
}
CHECKS = (
    parity.check_initial_weights,
    parity.check_first_step,
    parity.check_curve,
    parity.check_replicas,
    parity.check_validation,
)


def scenario(changes: dict[str, Any], **others: Any) -> Scenario:
    return scenario_with(steps=5, masked=True, model=replace(MODEL, **changes), **others)


@functools.cache
def reference(name: str) -> Run:
    return train_reference(scenario(CASES[name][0]))


@pytest.mark.parametrize("name", CASES)
def test_compiled_blocks_equal_the_reference_in_every_layout(name: str) -> None:
    """Catches a compiled graph that captures the communication, mask or cache of one micro-batch and reuses it for the
    next, a deferred wgrad that is lost, and names with the compiler's prefix (gradients are gathered by name)."""
    changes, parallel = CASES[name]
    run = train_layout(scenario(changes, ops=COMPILED), parallel)
    assert [fault for check in CHECKS for fault in check(run, reference(name))] == []


@pytest.mark.usefixtures("kernels")
def test_megads_kernels_run_inside_compiled_blocks() -> None:
    """Catches a custom operator that is registered with wrong shapes or gradients."""
    run = train_layout(scenario({}, ops=FUSED_COMPILED), ParallelConfig())
    assert [fault for check in CHECKS for fault in check(run, reference("single"))] == []


def _graphs(scenario: Scenario) -> list[int]:
    """Number of compiled graphs after one step, three steps, and validation."""
    from torch._dynamo.utils import counters

    engine = build_engine(scenario, ParallelConfig())
    made = []
    for steps in (range(1), range(1, 3)):
        for step in steps:
            engine.step(step_batches(scenario, step), scenario.lr)
        made.append(counters["stats"]["unique_graphs"])
    parity.evaluate(engine, scenario)
    return [*made, counters["stats"]["unique_graphs"]]


def test_blocks_are_compiled_once_per_shape() -> None:
    """Catches blocks that are not compiled, or are compiled again for each block or micro-batch."""
    few, many = (run_ranks(_graphs, 1, scenario({"num_layers": layers}, ops=COMPILED))[0] for layers in (1, 3))
    first_step, third_step, validated = many
    assert few == many
    assert 0 < first_step == third_step
    assert validated <= 2 * first_step  # once more without gradients, at most
