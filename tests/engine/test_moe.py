"""Tests that mixtures of experts train in every layout as on one process: N1, N3, N8, N10 and N12 on large weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.model.config import MLPKind, NormKind, Position
from megads.model.moe import Router
from megads.model.moe_config import MoEConfig, Overflow, RouterScore
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from tests import parity
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

LLAMA: dict[str, Any] = {
    "norm": NormKind.rmsnorm,
    "mlp": MLPKind.swiglu,
    "bias": False,
    "position": Position.rope,
    "num_kv_heads": 2,
}
EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_ffn_size=24)
MODELS: dict[str, MoEConfig] = {
    "mixtral": replace(EXPERTS, global_loss=0.02),
    "olmoe": replace(EXPERTS, top_k=3, normalize_weights=False, sequence_loss=0.1, z_loss=0.01),
    "deepseek": replace(
        EXPERTS,
        top_k=3,
        score=RouterScore.sigmoid,
        num_groups=4,
        top_groups=2,
        routed_scale=2.5,
        shared_ffn_size=24,
        bias_rate=0.05,
        sequence_loss=0.05,
        first_dense=1,
    ),
    "qwen2": replace(EXPERTS, shared_ffn_size=36, shared_gate=True, interval=2, router_bias=True, global_loss=0.05),
}
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2),
    "cp2": ParallelConfig(cp=2),
    "ep2": ParallelConfig(dp=2, ep=2),
    "ep4": ParallelConfig(dp=4, ep=4),
    "ep2dp2": ParallelConfig(dp=4, ep=2),
    "ep2dp2, ZeRO-0": ParallelConfig(dp=4, ep=2, zero_stage=0),
    "tp2ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "tp2sp whole": ParallelConfig(tp=2, sequence_parallel=True, expert_tp=False),
    "tp2ep2sp": ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True),
    "tp2ep2sp whole": ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True, expert_tp=False),
    "tp2ep4sp whole": ParallelConfig(tp=2, dp=2, ep=4, sequence_parallel=True, expert_tp=False),
    "ep2pp2": ParallelConfig(pp=2, dp=2, ep=2),
    "cp2ep2": ParallelConfig(cp=2, ep=2),
    "ep2 interleaved": ParallelConfig(pp=2, dp=2, ep=2, schedule=ScheduleName.interleaved),
    "ep2 zb_v": ParallelConfig(pp=2, dp=2, ep=2, schedule=ScheduleName.zb_v),
    "ep2 recompute": ParallelConfig(dp=2, ep=2, recompute=Recompute.full),
}
CHECKS = (
    parity.check_initial_weights,
    parity.check_first_step,
    parity.check_curve,
    parity.check_replicas,
    parity.check_validation,
)


def scenario(name: str, **changes: Any) -> Scenario:
    model = replace(MODEL, **LLAMA, moe=MODELS[name])
    return scenario_with(**{"steps": 3, "masked": True, "model": model} | changes)


@functools.cache
def reference(name: str, **changes: Any) -> Run:
    return train_reference(scenario(name, **changes))


def faults(run: Run, expected: Run) -> list[str]:
    return [fault for check in CHECKS for fault in check(run, expected)]


@pytest.mark.quick("ep2-mixtral", "tp2ep4sp whole-deepseek", "cp2ep2-olmoe", "ep2 zb_v-qwen2")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_train_in_every_layout_as_on_one_process(model: str, layout: str) -> None:
    """Catches gradients of experts reduced over all data-parallel ranks or none, rows returned in another order, a
    balance loss or a bias from the counts of one rank or micro-batch, and a router counted once per tensor-parallel
    rank."""
    run = train_layout(scenario(model), LAYOUTS[layout])
    assert faults(run, reference(model)) == []


PACKED_LAYOUTS = ("ep2", "tp2ep2sp", "tp2ep4sp whole", "cp2ep2", "ep2 zb_v", "ep2 recompute")


def packed(name: str) -> Scenario:
    """Samples of several documents with their own positions and attention, and dropout; with a seed of which no two
    scores at a choice are nearly equal."""
    plain = scenario(name, documents=True, seed=9)
    return replace(plain, model=replace(plain.model, hidden_dropout=0.2, attention_dropout=0.2))


@functools.cache
def packed_reference(name: str) -> Run:
    return train_reference(packed(name))


@pytest.mark.quick("tp2ep2sp-deepseek", "cp2ep2-mixtral")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_experts_train_on_packed_documents_with_dropout_as_on_one_process(model: str, layout: str) -> None:
    """Catches positions or documents of another sample beside experts, and dropout masks of a layer with experts that
    depend on the layout or on recomputation."""
    run = train_layout(packed(model), LAYOUTS[layout])
    assert faults(run, packed_reference(model)) == []


EVERY_ROW = {"mixtral": 4.0, "olmoe": 8 / 3, "deepseek": 8 / 3, "qwen2": 4.0}
"""Capacity factors with which one expert has room for all tokens."""
CAPACITIES: dict[str, tuple[str, ...]] = {
    "fits": ("ep2", "tp2ep2sp", "tp2ep4sp whole", "cp2ep2", "ep2 zb_v"),
    "recompute": ("ep2", "tp2ep2sp", "tp2ep4sp whole", "cp2ep2", "ep2pp2", "ep2 recompute"),
    "drop": ("single", "ep2dp2", "tp2ep2", "tp2ep2sp", "ep2 interleaved", "ep2 recompute"),
}


def with_capacity(name: str, capacity: str) -> Scenario:
    """Experts with room for every row, too little room in most steps, and rows beyond their room that are dropped.

    With overflow=recompute the first step, whose gradients are compared, is computed without a capacity.
    """
    plain = scenario(name)
    changes: dict[str, dict[str, Any]] = {
        "fits": {"capacity_factor": EVERY_ROW[name], "overflow": Overflow.drop},
        "recompute": {"capacity_factor": 1.0},
        "drop": {"capacity_factor": 0.75, "overflow": Overflow.drop},
    }
    return replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, **changes[capacity])))


@functools.cache
def dropping_reference(name: str) -> Run:
    return train_reference(with_capacity(name, "drop"))


@pytest.mark.quick("fits-ep2-mixtral", "recompute-tp2ep4sp whole-deepseek", "drop-tp2ep2sp-olmoe")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("capacity", "layout"), [(name, one) for name, of_name in CAPACITIES.items() for one in of_name]
)
def test_experts_with_a_capacity_train_in_every_layout_as_on_one_process(
    model: str, capacity: str, layout: str
) -> None:
    """Catches padding that is counted or trained on, rows that are lost because an overflow goes unnoticed, and dropped
    rows that depend on the layout or on the micro-batch size."""
    run = train_layout(with_capacity(model, capacity), LAYOUTS[layout])
    assert faults(run, dropping_reference(model) if capacity == "drop" else reference(model)) == []


def test_dropped_rows_change_the_curve() -> None:
    """Catches a comparison of runs in which no row is dropped."""
    kept, dropped = reference("mixtral"), dropping_reference("mixtral")
    assert abs(kept.losses[0] - dropped.losses[0]) > 1e-3


@contextmanager
def recorded_margins() -> Iterator[list[float]]:
    """Records the smallest difference of every choice between the last chosen score and the best of the others."""
    margins: list[float] = []
    inner = Router.choose

    def choose(self: Router, scores_bse: Tensor) -> Tensor:
        chosen_bsk = inner(self, scores_bse)
        ranked = scores_bse if self.expert_bias is None else scores_bse + self.expert_bias
        worst = ranked.gather(-1, chosen_bsk).amin(-1)
        others = ranked.scatter(-1, chosen_bsk, -torch.inf).amax(-1)
        margins.append(float((worst - others).min()))
        return chosen_bsk

    Router.choose = choose  # type: ignore[method-assign]
    try:
        yield margins
    finally:
        Router.choose = inner  # type: ignore[method-assign]


LONG = {"steps": 50, "global_batch_size": 4, "micro_batch_size": 1, "seq_len": 16, "seed": 1}
MARGIN = 3e-6
"""Smallest difference of scores at the last choice in the runs of 50 steps: more than layouts differ by."""
LONG_CASES = [
    *(("mixtral", layout) for layout in ("ep2", "ep4", "tp2ep2", "cp2ep2", "tp2ep2sp", "ep2 zb_v", "ep2 recompute")),
    *(
        ("olmoe", layout)
        for layout in ("ep2", "tp2", "ep2pp2", "cp2ep2", "ep2dp2", "tp2ep2sp whole", "ep2 interleaved")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LONG_CASES)
def test_experts_train_fifty_steps_as_on_one_process(name: str, layout: str) -> None:
    """Catches a difference that only accumulates. A token's experts change where two scores are equal: that no score
    comes close in the reference shows that a difference is a defect and not chance."""
    expected = long_reference(name)
    run = train_layout(scenario(name, **LONG), LAYOUTS[layout])
    assert faults(run, expected) == []


@functools.cache
def long_reference(name: str) -> Run:
    with recorded_margins() as margins:
        run = train_reference(scenario(name, **LONG))
    assert min(margins) > MARGIN, "choose another seed"
    return run
