"""Compiled blocks train as eager ones do, in layouts too: N3 over five steps, with names and copies unchanged."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megads.model.config import Position
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

COMPILED = OpsConfig(Implementation.torch, Compile.blocks)
# Each rank compiles what it runs.
SLOW = [pytest.mark.distributed, pytest.mark.slow]
CASES = {
    "single": ({}, ParallelConfig()),
    "rope, parallel block": ({"position": Position.rope, "parallel_block": True}, ParallelConfig()),
    "tp2, shared": ({"hidden_dropout": 0.2}, ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.full)),
    "zb_h1": ({}, ParallelConfig(pp=2, schedule=ScheduleName.zb_h1)),
    "cp2, selective": ({"parallel_block": True}, ParallelConfig(cp=2, recompute=Recompute.selective)),
    "zero2": ({}, ParallelConfig(dp=2, zero_stage=2)),
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


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in CASES])
def test_layouts(name: str) -> None:
    """Catches a compiler that looks into a message, a mask or a cache of one micro-batch and replays it for the next, a
    gradient that is put off and lost, names with a prefix of the compiler's (the gradients are gathered by name)."""
    changes, parallel = CASES[name]
    run = train_layout(scenario(changes, ops=COMPILED), parallel)
    assert [fault for check in CHECKS for fault in check(run, reference(name))] == []
