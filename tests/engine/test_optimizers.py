"""Every optimizer in every layout and ZeRO stage against its fp64 reference, with hot weights (see `hot_weights`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.config.root import RootConfig
from megads.engine.interface import TrainEngine
from megads.model.config import MLPKind, Position
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.distributed import open_control_plane
from megads.tools.plan.disk_need import checkpoint_bytes
from megads.tools.verify.layout import rank_batches
from tests.distributed import run_ranks
from tests.parity import (
    LAYOUTS,
    MODEL,
    Scenario,
    assemble,
    build_engine,
    faults_of,
    pieces,
    scenario_with,
    train_layout,
)
from tests.tools.plan.memory_meter import planned

pytestmark = pytest.mark.distributed

# GQA, SwiGLU and learned positions: parameters that are several matrices, and one that TP does not shard.
SHAPE = replace(MODEL, num_kv_heads=2, mlp=MLPKind.swiglu, position=Position.learned)
OPTIMIZERS = {
    "lamb": OptimConfig(name="lamb", eps=1e-6),
    "lamb bounded": OptimConfig(name="lamb", options={"max_ratio": 0.15}),
    "lion": OptimConfig(name="lion"),
    "muon": OptimConfig(name="muon"),
    "muon by head": OptimConfig(name="muon", options={"qkv": "head", "nesterov": False, "momentum": 0.9}),
}
CASES = [
    *("lamb-single", "lamb-tp2dp2", "lamb-pp2dp3", "lamb-tp2dp2sp", "lamb-cp2", "lamb-pp2dp2, ZeRO-0"),
    *("lamb-zero2tp2dp2", "lamb-zero3dp3", "lamb-zero3tp2dp2", "lamb-hierarchical", "lamb bounded-tp2dp2"),
    *("lion-tp2pp2dp2", "lion-zero2dp2", "lion-zero3tp2dp2"),
    *("muon-single", "muon-tp2dp2", "muon-pp2dp3", "muon-tp2dp2sp", "muon-cp2", "muon-pp2dp2, ZeRO-0", "muon-dp2"),
    *("muon-zero2tp2dp2", "muon-zero3dp3", "muon-zero3tp2dp2", "muon-hierarchical", "muon by head-tp2dp2"),
]


def scenario_of(optimizer: str) -> Scenario:
    # LAMB's updates are relative to the weight norm: with a small lr a wrong trust ratio would not show.
    lr = 2e-2 if optimizer.startswith("lamb") else 1e-3
    return scenario_with(steps=4, masked=True, lr=lr, model=SHAPE, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.quick("muon-zero2tp2dp2")
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_takes_the_reference_steps_in_every_layout(case: str) -> None:
    """Catches an update that depends on how master weights are sharded: a norm or a matrix of one shard only, replicas
    that drift."""
    optimizer, layout = case.split("-", 1)
    run = train_layout(scenario_of(optimizer), LAYOUTS[layout])
    assert faults_of(run, scenario_of(optimizer)) == []


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_ranks_without_a_matrix_take_part_in_muon(zero_stage: int) -> None:
    """Catches ranks that own no matrix and skip the collective, or send an empty tensor without the right dtype."""
    scenario = replace(scenario_of("muon"), model=replace(SHAPE, num_layers=1), steps=3)
    run = train_layout(scenario, ParallelConfig(tp=2, dp=3, zero_stage=zero_stage))
    assert faults_of(run, scenario) == []


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "layout"), [("muon", "tp2dp2"), ("muon by head", "zero3tp2dp2")])
def test_muon_is_right_where_ranks_share_kv_heads(optimizer: str, layout: str) -> None:
    """Catches matrices joined in the order of the ranks, whose rows are in another order if ranks share a KV head."""
    scenario = scenario_of(optimizer)
    scenario = replace(scenario, model=replace(scenario.model, num_kv_heads=1), steps=3)
    run = train_layout(scenario, LAYOUTS[layout])
    assert faults_of(run, scenario) == []


@pytest.mark.quick("muon")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_fused_kernels_take_the_same_optimizer_steps(optimizer: str) -> None:
    """Catches kernels whose sums of squares miss a piece of a parameter, and GEMMs with a wrong operand."""
    scenario = replace(scenario_of(optimizer), ops=OpsConfig(Implementation.fused))
    run = train_layout(scenario, LAYOUTS["dp2"])
    assert faults_of(run, scenario_of(optimizer)) == []


def _load(engine: TrainEngine, run_dir: Path) -> None:
    handle = find_checkpoint(run_dir, "auto", control=open_control_plane())
    assert handle is not None
    engine.load_shards(lambda shards: read_into(handle, shards), handle.optimizer_steps)


def _steps_and_save(scenario: Scenario, parallel: ParallelConfig, run_dir: Path) -> list[Any]:
    """Takes two steps, saves, takes two more; then takes these two again from the checkpoint on a new engine."""
    engine = build_engine(scenario, parallel)
    for step in range(2):
        engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
    record = RunRecord({"step": 2, "samples": 24, "tokens": 0}, engine.optimizer_steps, "digest", {}, {})
    save_checkpoint(run_dir, engine.named_shards(), record, control=open_control_plane())
    ends = []
    for again in (False, True):
        if again:
            engine = build_engine(replace(scenario, seed=scenario.seed + 1), parallel)
            _load(engine, run_dir)
        results = [engine.step(rank_batches(scenario, step, engine.grid), scenario.lr) for step in (2, 3)]
        ends.append(([(r.loss, r.grad_norm) for r in results], pieces(engine.named_shards())))
    return ends


def _go_on(scenario: Scenario, parallel: ParallelConfig, run_dir: Path) -> Any:
    engine = build_engine(replace(scenario, seed=scenario.seed + 1), parallel)
    _load(engine, run_dir)
    for step in (2, 3):
        engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
    return pieces(engine.named_shards())


@pytest.mark.quick("muon-zero2dp2-tp2dp2")
@pytest.mark.parametrize(
    "case",
    [
        "muon-tp2pp2-zero3dp2",
        "muon-zero2dp2-tp2dp2",
        "lamb-tp2pp2-zero3dp2",
        "lion-zero3dp2-tp2pp2",
        "lamb-zero2dp2-dp2",
    ],
)
def test_optimizer_state_resumes_exactly_and_in_other_layouts(case: str, tmp_path: Path) -> None:
    """Catches state that is not saved, a lost step count, and state that another layout loads differently."""
    optimizer, home, away = case.split("-")
    scenario = scenario_of(optimizer)
    saved = run_ranks(_steps_and_save, LAYOUTS[home].world_size, scenario, LAYOUTS[home], tmp_path)
    kinds = set[str]()
    for first, again in saved:
        assert first[0] == again[0]
        for (key, *_, ours), (_, *_, theirs) in zip(first[1], again[1], strict=True):
            assert np.array_equal(ours, theirs), key
            kinds.add(key.split("/")[0])
    moved = run_ranks(_go_on, LAYOUTS[away].world_size, scenario, LAYOUTS[away], tmp_path)
    for kind in kinds:
        stayed = assemble([piece for rank in saved for piece in rank[0][1]], kind)
        there = assemble([piece for rank in moved for piece in rank], kind)
        assert stayed.keys() == there.keys()
        for name, values in stayed.items():
            wanted = np.linalg.norm(values) * 1e-5 + 1e-9
            if not name.endswith("qkv.bias"):
                assert np.linalg.norm(there[name] - values) <= wanted, f"{kind}/{name}"


def _state_bytes(scenario: Scenario, parallel: ParallelConfig) -> int:
    engine = build_engine(scenario, parallel)
    if parallel.zero_stage < 2:
        held = engine.optimizer.base.state
    else:
        held = engine.masters._optimizer.state
    return sum(4 * tensor.numel() for state in held.values() for kind, tensor in state.items() if kind != "step")


@pytest.mark.quick("muon-3")
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["lamb", "lion", "muon"])
def test_the_memory_plan_counts_each_optimizers_state(optimizer: str, zero_stage: int) -> None:
    """Catches a memory plan that counts two moments where there is one, or moments of the wrong parameters."""
    scenario, parallel = scenario_of(optimizer), ParallelConfig(tp=2, dp=2, zero_stage=zero_stage)
    (stage,) = planned(scenario, parallel).stages
    assert set(run_ranks(_state_bytes, 4, scenario, parallel)) == {stage.optimizer_state}
    assert stage.optimizer_state < 2 * stage.masters or optimizer == "lamb"


def test_the_checkpoint_plan_counts_each_optimizers_state() -> None:
    """Catches a planned checkpoint size with two moments for Lion, or the same number for all of Muon's parameters."""
    sizes = {}
    for name in ("adamw", "lamb", "lion", "muon"):
        sizes[name] = checkpoint_bytes(RootConfig(model=SHAPE, optim=OptimConfig(name=name)))
    assert sizes["lamb"] == sizes["adamw"] == pytest.approx(1.5 * sizes["lion"], rel=1e-3)
    assert sizes["lion"] < sizes["muon"] < sizes["adamw"]
