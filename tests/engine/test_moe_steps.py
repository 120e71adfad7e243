"""The state of routers after steps that are computed several times, skipped, or continued by new processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from megads.engine.expert_balance import ExpertBalance
from megads.engine.interface import Shard, StepPasses, TrainEngine
from megads.tools.verify.layout import rank_batches
from tests.distributed import run_ranks
from tests.engine.test_moe import LAYOUTS, scenario
from tests.engine.test_training import state
from tests.parity import build_engine

pytestmark = pytest.mark.distributed

BALANCES = ("deepseek", "mixtral")
"""Models with expert_bias, and with expert_load."""


def poison_once(engine: TrainEngine) -> None:
    """Makes a layer's output of the next forward pass non-finite, of which all tokens then choose the same experts."""

    def spoil(layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * math.nan

    handle = next(layer for name, layer in engine.layers() if name == "embedding").register_forward_hook(spoil)


def _steps(model: str, layout: str, rerun: bool, poisoned: bool, defect: Callable[[], None] | None) -> dict[str, Any]:
    """Takes two steps, the second of which may be non-finite at first; returns the state before and after it."""
    if defect is not None:
        defect()
    chosen = scenario(model)
    engine = build_engine(chosen, LAYOUTS[layout])
    reruns = list[Any]()
    engine.rerun_nonfinite((lambda *results: reruns.append(results)) if rerun else None)
    engine.step(rank_batches(chosen, 0, engine.grid), chosen.lr)
    before = state(engine)
    if poisoned:
        poison_once(engine)
    result = engine.step(rank_batches(chosen, 1, engine.grid), chosen.lr)
    after = state(engine)
    routers = [key for key in before if ".router.expert_" in key[0]]
    assert routers and len(reruns) == (rerun and poisoned)
    return {"skipped": result.skipped, "before": before, "after": after, "routers": routers}


def moved(run: dict[str, Any]) -> bool:
    return any((run["after"][key] != run["before"][key]).any() for key in run["routers"])


def equal(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return all((run["after"][key] == other["after"][key]).all() for key in other["after"])


@pytest.mark.quick("ep2-deepseek")
@pytest.mark.parametrize("model", BALANCES)
@pytest.mark.parametrize("layout", ["ep2", "tp2ep2sp"])
def test_a_step_that_is_computed_again_balances_experts_once(layout: str, model: str) -> None:
    """Catches counts of a computation that is not applied, and a balance that changes in a step that is skipped."""
    world = LAYOUTS[layout].world_size
    plain = run_ranks(_steps, world, model, layout, True, False, None)
    again = run_ranks(_steps, world, model, layout, True, True, None)
    skipped = run_ranks(_steps, world, model, layout, False, True, None)
    for first, second, third in zip(plain, again, skipped, strict=True):
        assert not first["skipped"] and not second["skipped"] and third["skipped"]
        assert moved(first) and equal(second, first)
        assert not moved(third)


def copied(shard: Shard) -> Any:
    return shard.tensor.numpy().copy()


class Outcomes:
    """A StepCheck that computes every step once, and keeps its gradient norms."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def compute(self, step: StepPasses) -> Tensor | None:
        loss_sum = step.run()
        self.norms.append(step.outcome(loss_sum)[1])
        return loss_sum


def _overflowing(factor: float | None) -> dict[str, Any]:
    """Three checked steps of experts with a capacity; the gradients of the second are watched."""
    plain = scenario("deepseek")
    chosen = replace(plain, model=replace(plain.model, moe=replace(plain.model.moe, capacity_factor=factor)))
    engine = build_engine(chosen, LAYOUTS["ep2"])
    results, gradients, outcomes = [], dict[Any, Any](), Outcomes()
    engine.check_compute(outcomes)
    for step in range(3):
        if step == 1:
            engine.watch_gradients(lambda shards: gradients.update({(s.key, s.offset): copied(s) for s in shards}))
        results.append(engine.step(rank_batches(chosen, step, engine.grid), chosen.lr))
    assert all(map(math.isfinite, outcomes.norms)), "checks would take an overflow for a fault"
    return {"results": results, "after": state(engine), "gradients": gradients, "steps": engine.optimizer_steps}


def test_a_step_with_an_overflow_is_that_without_a_capacity() -> None:
    """Catches a discarded computation that moves a weight, a bias or the number of steps, reports the losses or counts
    of the rows that fit, or shows their gradients; and a step that fits and is computed again."""
    plain, narrow, wide = (run_ranks(_overflowing, 2, factor) for factor in (None, 1.0, 8 / 3))
    for one, other, fitting in zip(plain, narrow, wide, strict=True):
        assert equal(one, other) and one["steps"] == other["steps"] == fitting["steps"] == 3
        assert one["gradients"] and one["gradients"].keys() == other["gradients"].keys()
        assert all((one["gradients"][key] == other["gradients"][key]).all() for key in one["gradients"])
        for expected, found, fits in zip(one["results"], other["results"], fitting["results"], strict=True):
            assert (found.loss, found.grad_norm, found.skipped) == (expected.loss, expected.grad_norm, False)
            assert found.experts.counts == expected.experts.counts == fits.experts.counts
            assert sum(found.experts.dropped) == sum(fits.experts.dropped) == 0
            assert max(found.experts.capacity_needed) > 1.0 and found.experts.fullest == fits.experts.fullest
            assert not fits.experts.recomputed and fits.loss == pytest.approx(found.loss, rel=1e-6)
        assert [result.experts.recomputed for result in other["results"]] == [True, False, True]


def counts_of_every_computation() -> None:
    ExpertBalance.begin = lambda self: None


def balanced_although_skipped() -> None:
    inner = ExpertBalance.update
    ExpertBalance.update = lambda self, norm: inner(self, norm.new_ones(()))


def test_the_test_of_repeated_steps_sees_defects() -> None:
    """Catches a test that cannot fail."""
    plain, counted, taken = (
        run_ranks(_steps, 2, "mixtral", "ep2", rerun, poisoned, defect)
        for rerun, poisoned, defect in (
            (True, False, None),
            (True, True, counts_of_every_computation),
            (False, True, balanced_although_skipped),
        )
    )
    assert not equal(counted[0], plain[0])
    assert moved(taken[0])
