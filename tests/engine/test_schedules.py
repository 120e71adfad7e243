"""Every schedule trains the same model: bitwise for equal placement of stages, within N3 of the reference otherwise."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests import parity
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

EQUAL_PLACEMENTS = [("1f1b", "zb_h1"), ("dualpipe_v", "zb_v")]
OTHERS = [name for name in ScheduleName if name != "1f1b"]


def scenario_of(micro_batches: int, layers: int = 3, **changes: Any) -> Scenario:
    """Scenario of two-sample micro-batches: with a single-token one, even one process cannot reproduce a step."""
    settings = {"steps": 3, "masked": True, "micro_batch_size": 2, "global_batch_size": 2 * micro_batches}
    scenario = scenario_with(**(settings | changes))
    return replace(scenario, model=replace(scenario.model, num_layers=layers))


def layout(name: str, **changes: Any) -> ParallelConfig:
    found = ParallelConfig(**({"pp": 2, "schedule": ScheduleName(name)} | changes))
    found.check()
    return found


@functools.cache
def reference(micro_batches: int, layers: int = 3, dp: int = 1) -> Run:
    return train_reference(scenario_of(micro_batches * dp, layers))


def faults(run: Run, expected: Run) -> list[str]:
    return [fault for check in parity.EVERY_CHECK for fault in check(run, expected)]


def differing(one: Run, other: Run) -> list[str]:
    """Returns what is not bitwise equal in two runs."""
    found = [what for what in ("losses", "norms", "validation") if getattr(one, what) != getattr(other, what)]
    for what in ("gradients", "weights"):
        ours, theirs = getattr(one, what), getattr(other, what)
        assert ours.keys() == theirs.keys() and ours
        found += [f"{what} {name}" for name in ours if not np.array_equal(ours[name], theirs[name])]
    return found


UNTIED = replace(MODEL, tie_embeddings=False)
BITWISE: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "clipped": (scenario_of(5), {}),
    "not clipped": (scenario_of(5, clip_grad=0.0), {}),
    "bf16, dropout": (
        scenario_of(4, precision="bfloat16", model=replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)), {},
    ),
    "tp2, sequence parallel": (scenario_of(4), {"tp": 2, "sequence_parallel": True}),
    "full recomputation": (scenario_of(4), {"recompute": "full"}),
}  # fmt: skip


@pytest.mark.quick("clipped")
@pytest.mark.parametrize("name", BITWISE)
def test_a_split_backward_pass_changes_no_bit(name: str) -> None:
    """Catches deferred weight gradients that are lost, computed twice or accumulated in another order, and their inputs
    overwritten before they are used."""
    scenario, changes = BITWISE[name]
    whole, split = (train_layout(scenario, layout(schedule, **changes)) for schedule in ("1f1b", "zb_h1"))
    assert differing(whole, split) == []


@pytest.mark.slow
def test_v_shapes_agree_to_the_bit() -> None:
    """Catches gradient accumulation that depends on the schedule. Untied: where one rank holds embedding and head, the
    schedule determines the order of their two gradients."""
    scenario = replace(scenario_of(6), model=UNTIED)
    one, other = (train_layout(scenario, layout(schedule)) for schedule in ("dualpipe_v", "zb_v"))
    assert differing(one, other) == []


CORE = [(name, micro_batches) for name in OTHERS for micro_batches in (1, 5)]


@pytest.mark.quick("interleaved-5")
@pytest.mark.parametrize(("name", "micro_batches"), CORE)
def test_schedules_work_with_any_number_of_micro_batches(name: str, micro_batches: int) -> None:
    """Catches losses, activations or gradients of one micro-batch used for another (N1, N3, N7 to N10)."""
    run = train_layout(scenario_of(micro_batches), layout(name))
    assert faults(run, reference(micro_batches)) == []


COMBINED: dict[str, dict[str, Any]] = {
    "interleaved, tp2": {"schedule": "interleaved", "tp": 2},
    "interleaved, dp2": {"schedule": "interleaved", "dp": 2, "bucket_elements": 8192},
    "zb_h1, cp2": {"schedule": "zb_h1", "cp": 2},
    "zb_v, tp2, sequence parallel": {"schedule": "zb_v", "tp": 2, "sequence_parallel": True},
    "dualpipe_v, selective recomputation": {"schedule": "dualpipe_v", "recompute": "selective"},
    "zb_v, dp2": {"schedule": "zb_v", "dp": 2, "bucket_elements": 8192},
    "dualpipe_v, cp2, full recomputation": {"schedule": "dualpipe_v", "cp": 2, "recompute": "full"},
}


@pytest.mark.quick("zb_v, tp2, sequence parallel")
@pytest.mark.parametrize("name", COMBINED)
def test_schedules_work_with_other_features(name: str) -> None:
    """Catches reductions that start before a virtual stage's last gradient, tied embeddings on one rank or two that are
    counted twice, and collectives that ranks issue in different orders."""
    changes = dict(COMBINED[name])
    parallel = layout(changes.pop("schedule"), **changes)
    assert faults(train_layout(scenario_of(3 * parallel.dp), parallel), reference(3, dp=parallel.dp)) == []


def test_schedules_work_with_uneven_ends_and_three_virtual_stages() -> None:
    """Catches an embedding or head alone on its stage that is not found, and model chunks in the wrong order."""
    uneven = layout("interleaved", virtual_stages=3, first_stage_blocks=0, last_stage_blocks=0)
    assert faults(train_layout(scenario_of(4, layers=4), uneven), reference(4, layers=4)) == []


# Pipeline ranks and micro-batches: equal, fewer and more, a multiple of the ranks or not.
SIZES = [(2, 2), (2, 8), (3, 1), (3, 16), (4, 3), (4, 5)]


@functools.cache
def trained(name: str, pp: int, micro_batches: int, tied: bool = True, **changes: Any) -> Run:
    """Trains seven blocks; cached, since several tests use the same run."""
    scenario = scenario_of(micro_batches, layers=7, **changes)
    scenario = replace(scenario, model=replace(scenario.model, tie_embeddings=tied))
    return train_layout(scenario, layout(name, pp=pp))


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", ScheduleName)
def test_schedules_equal_the_reference_at_every_size(name: str, pp: int, micro_batches: int) -> None:
    """Catches a schedule that is right for some sizes only."""
    assert faults(trained(name, pp, micro_batches), reference(micro_batches, layers=7)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "micro_batches"), SIZES)
@pytest.mark.parametrize("names", EQUAL_PLACEMENTS, ids=str)
def test_equal_placements_are_bitwise_equal(names: tuple[str, str], pp: int, micro_batches: int) -> None:
    """Catches an order of accumulation that differs at some size."""
    one, other = (trained(name, pp, micro_batches, tied=names[0] == "1f1b") for name in names)
    assert differing(one, other) == []


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 3), (4, 8)])
@pytest.mark.parametrize("names", EQUAL_PLACEMENTS, ids=str)
def test_equal_placements_are_bitwise_equal_without_clipping(
    names: tuple[str, str], pp: int, micro_batches: int
) -> None:
    """Catches gradients that differ by a factor, which clipping would hide."""
    one, other = (trained(name, pp, micro_batches, tied=names[0] == "1f1b", clip_grad=0.0) for name in names)
    assert differing(one, other) == []
