"""Learning rates and weight decays per parameter: every optimizer matches its fp64 reference in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.model.config import MLPKind, Position
from megads.optim.config import GroupConfig, OptimConfig
from megads.parallel.config import ParallelConfig
from tests.distributed import run_ranks
from tests.engine.test_optimizers import _go_on, _state_bytes, _steps_and_save
from tests.parity import LAYOUTS, MODEL, Scenario, assemble, faults_of, reference_of, scenario_with, train_layout
from tests.tools.plan.memory_meter import planned

pytestmark = pytest.mark.distributed

# A tied embedding, a bias with weight decay, a block with its own rate, a frozen norm, and an entry that another one
# overrides in part.
GROUPS = [
    GroupConfig("blocks.*.weight", weight_decay=0.3),
    GroupConfig("*.mlp.*", lr_scale=0.25),
    GroupConfig("embedding.word.weight", lr_scale=3.0, weight_decay=0.0),
    GroupConfig("blocks.1.*", lr_scale=2.0),
    GroupConfig("*.attention.dense.bias", weight_decay=0.5),
    GroupConfig("final_norm.weight", lr_scale=0.0),
]
SHAPE = replace(MODEL, num_kv_heads=2, mlp=MLPKind.swiglu, position=Position.learned)
CASES = [
    *("adamw-single", "adamw-tp2", "adamw-pp2", "adamw-tp2pp2", "adamw-zero2dp2", "adamw-zero3dp2"),
    *("adamw-tp2pp2dp2", "adamw-hierarchical", "adamw-pp2dp2, ZeRO-0", "adamw-tp2dp2sp"),
    *("muon-tp2dp2", "muon-zero3tp2dp2", "muon-pp2dp2, ZeRO-0", "lamb-tp2dp2", "lamb-zero3dp3", "lion-tp2pp2dp2"),
    "lion-zero2dp2",
]


def scenario_of(optimizer: str) -> Scenario:
    lr = 2e-2 if optimizer == "lamb" else 1e-3
    return scenario_with(steps=6, masked=True, lr=lr, model=SHAPE, optimizer=OptimConfig(name=optimizer, groups=GROUPS))


@pytest.mark.quick("adamw-zero3dp2")
@pytest.mark.parametrize("case", CASES)
def test_groups_take_the_reference_steps_in_every_layout(case: str) -> None:
    """Catches master weights that mix learning rates, and rates that a stage, a shard or DeepSpeed loses."""
    optimizer, layout = case.split("-", 1)
    run = train_layout(scenario_of(optimizer), LAYOUTS[layout])
    assert faults_of(run, scenario_of(optimizer)) == []


def test_parameter_groups_change_the_curve() -> None:
    """Catches a reference that ignores the groups, which an implementation that ignores them would match, and a weight
    that changes at a learning rate of zero."""
    plain = reference_of(replace(scenario_of("adamw"), optimizer=OptimConfig()))
    ours = reference_of(scenario_of("adamw"))
    assert np.array_equal(ours.weights["final_norm.weight"], ours.initial["final_norm.weight"])
    for name in ("embedding.word.weight", "blocks.0.mlp.down.weight", "blocks.1.attention.qkv.weight"):
        assert np.linalg.norm(ours.weights[name] - plain.weights[name]) > 1e-3 * np.linalg.norm(plain.weights[name])


@pytest.mark.quick("adamw-tp2pp2-zero3dp2")
@pytest.mark.parametrize("case", ["adamw-tp2pp2-zero3dp2", "muon-zero3dp2-tp2dp2"])
def test_grouped_state_resumes_exactly_and_in_other_layouts(case: str, tmp_path: Path) -> None:
    """Catches state of master weights, which groups partition differently, saved or loaded under other names."""
    optimizer, home, away = case.split("-")
    scenario = scenario_of(optimizer)
    saved = run_ranks(_steps_and_save, LAYOUTS[home].world_size, scenario, LAYOUTS[home], tmp_path)
    for first, again in saved:
        assert first[0] == again[0]
        for (key, *_, ours), (_, *_, theirs) in zip(first[1], again[1], strict=True):
            assert np.array_equal(ours, theirs), key
    moved = run_ranks(_go_on, LAYOUTS[away].world_size, scenario, LAYOUTS[away], tmp_path)
    stayed = assemble([piece for rank in saved for piece in rank[0][1]], "weight")
    there = assemble([piece for rank in moved for piece in rank], "weight")
    for name, values in stayed.items():
        if not name.endswith("qkv.bias"):
            assert np.linalg.norm(there[name] - values) <= np.linalg.norm(values) * 1e-5 + 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_memory_plan_counts_master_weights_per_rate(zero_stage: int) -> None:
    """Catches a memory plan that pads one tensor of master weights per role, where there is one per rate."""
    scenario, parallel = scenario_of("adamw"), ParallelConfig(tp=2, dp=2, zero_stage=zero_stage)
    (stage,) = planned(scenario, parallel).stages
    assert set(run_ranks(_state_bytes, 4, scenario, parallel)) == {stage.optimizer_state}
