"""Every optimizer on experts in every layout against its fp64 reference, with hot weights (see `hot_weights`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megads.engine import native_engine
from megads.engine.bucket import Bucket
from megads.engine.optimizer import BucketOptimizer
from megads.optim.config import OptimConfig
from megads.optim.masters import MasterGroup, MasterLayout
from tests.engine.test_moe import LAYOUTS, scenario
from tests.parity import Scenario, check_curve, faults_of, reference_of, train_layout

pytestmark = pytest.mark.distributed

OPTIMIZERS = {
    "lamb": OptimConfig(name="lamb", eps=1e-6),
    "lion": OptimConfig(name="lion"),
    "muon": OptimConfig(name="muon"),
    "adamw with averages": OptimConfig(ema_decay=0.6),
}
CASES = [
    *("single", "ep2", "ep2dp2", "ep2dp2, ZeRO-0", "tp2ep2", "tp2ep2sp whole", "tp2sp whole", "ep2pp2", "cp2ep2"),
]


def scenario_of(optimizer: str, model: str = "qwen2") -> Scenario:
    # LAMB's updates are relative to the weight norm: with a small lr a wrong trust ratio would not show.
    lr = 2e-2 if optimizer == "lamb" else 1e-3
    return scenario(model, steps=4, lr=lr, optimizer=OPTIMIZERS[optimizer])


@pytest.mark.quick("tp2ep2-muon", "ep2dp2-lamb")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", CASES)
def test_every_optimizer_treats_each_expert_by_itself_in_every_layout(layout: str, optimizer: str) -> None:
    """Catches a trust ratio or an orthogonalized matrix of several experts, of gates with ups, or of a shard, and
    matrices gathered from ranks that hold other experts."""
    run = train_layout(scenario_of(optimizer), LAYOUTS[layout])
    assert faults_of(run, scenario_of(optimizer)) == []


def experts_as_one_matrix() -> None:
    """The experts of a layer share a trust ratio, or their singular values."""
    inner = BucketOptimizer._master_layout

    def layout(self: BucketOptimizer, bucket: Bucket, *args: Any) -> MasterLayout:
        for parameter, *_ in bucket.copies:
            place = parameter.placement
            parameter.placement = replace(place, experts=place.experts[:1])
        return inner(self, bucket, *args)

    BucketOptimizer._master_layout = layout


def experts_of_all_ranks_as_the_same() -> None:
    """Ranks with different experts take them for shards of the same ones."""
    MasterGroup.of_experts = lambda grid, sharded, expert_tp: MasterGroup.of_zero1(grid, sharded=sharded)


def gates_with_ups() -> None:
    """Gates and ups of an expert share their singular values."""
    inner = native_engine.fused_rows
    native_engine.fused_rows = lambda model: {n: rows for n, rows in inner(model).items() if "experts" not in n}


@pytest.mark.quick("experts_as_one_matrix-muon")
@pytest.mark.parametrize(
    ("defect", "optimizer"),
    [
        (experts_as_one_matrix, "lamb"),
        (experts_as_one_matrix, "muon"),
        (experts_of_all_ranks_as_the_same, "lamb"),
        (gates_with_ups, "muon"),
    ],
)
def test_defects_of_optimizers_of_experts_are_caught(defect: Callable[[], None], optimizer: str) -> None:
    """Catches a parity test of optimizers that cannot fail."""
    run = train_layout(scenario_of(optimizer), LAYOUTS["ep2dp2"], defect)
    assert check_curve(run, reference_of(scenario_of(optimizer))) != []
