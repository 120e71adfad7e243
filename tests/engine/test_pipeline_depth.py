"""The same curve at every pipeline depth: BLOOM's team saw the loss depend on it and never found out why."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megads.parallel.config import ParallelConfig
from tests import parity
from tests.parity import Run, scenario_with, train_layout, train_reference

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCENARIO = scenario_with(steps=50, masked=True, micro_batch_size=1)
SCENARIO = replace(SCENARIO, model=replace(SCENARIO.model, num_layers=8))


@functools.cache
def reference() -> Run:
    return train_reference(SCENARIO)


def test_results_do_not_depend_on_pipeline_depth() -> None:
    """Catches dependence on the depth: all-reduce of tied gradients, norms per stage, mixed-up micro-batches (N3)."""
    run = train_layout(SCENARIO, ParallelConfig(pp=8))
    faults = parity.check_first_step(run, reference()) + parity.check_curve(run, reference())
    assert faults + parity.check_replicas(run, reference()) == []


@pytest.mark.parametrize("layout", [ParallelConfig(tp=2), ParallelConfig(pp=2, dp=3)], ids=["tp2", "pp2dp3"])
def test_replicas_stay_equal_over_200_bf16_steps(layout: ParallelConfig) -> None:
    """Catches replicas that diverge over time: norms over tp ranks, tied embeddings with dp = 3 (N8)."""
    scenario = scenario_with(precision="bfloat16", steps=200, global_batch_size=6)
    scenario = replace(scenario, model=replace(scenario.model, num_heads=12))
    run = train_layout(scenario, layout)
    assert parity.check_replicas(run, run) == []
