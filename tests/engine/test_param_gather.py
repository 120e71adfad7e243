"""All-gathers of new weights that overlap with the next forward pass (parallel.overlap_param_gather): bitwise equal,
and waited for by whatever reads weights.

From the update to the wait every parameter is NaN, so a reader that does not wait cannot pass unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megads.engine.interface import Shard, StepPasses, TrainEngine
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.tools.verify.layout import rank_batches
from megads.tools.verify.scenario import VALIDATION_SAMPLES, validation_batches
from tests import parity
from tests.distributed import run_ranks
from tests.engine.test_moe import scenario as expert_scenario
from tests.parity import LAYOUTS, SMALL_BUCKET, Scenario, build_engine, scenario_with, train_layout

pytestmark = pytest.mark.distributed

SHORT = scenario_with(steps=3)
UNTIED = replace(SHORT, model=replace(SHORT.model, tie_embeddings=False), precision="bfloat16")
CASES: dict[str, tuple[ParallelConfig, Scenario]] = {
    "dp2": (LAYOUTS["dp2"], UNTIED),
    "dp2 muon": (LAYOUTS["dp2"], scenario_with(steps=3, optimizer=OptimConfig(name="muon"))),
    "tp2dp2sp": (replace(LAYOUTS["tp2dp2sp"], bucket_elements=SMALL_BUCKET), SHORT),
    "pp2dp2": (LAYOUTS["pp2dp2"], SHORT),
    "pp2dp2 interleaved": (
        ParallelConfig(pp=2, dp=2, schedule=ScheduleName.interleaved, bucket_elements=SMALL_BUCKET),
        UNTIED,
    ),
    "pp2dp2 dualpipe_v": (LAYOUTS["pp2dp2 dualpipe_v"], SHORT),
    "ep2": (ParallelConfig(dp=4, ep=2, bucket_elements=SMALL_BUCKET), expert_scenario("mixtral", steps=3)),
}


def overlapped(parallel: ParallelConfig) -> ParallelConfig:
    return replace(parallel, overlap_param_gather=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sets of named arrays are equal, bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(values, other[name]) for name, values in one.items())


@pytest.mark.quick("dp2", "pp2dp2 interleaved")
@pytest.mark.parametrize("name", CASES)
def test_overlapped_gathers_change_no_bit(name: str) -> None:
    """N2, N3. Catches a layer that does not wait for its weights or waits for others', a copy of a tied embedding or of
    an expert that is forgotten, and an update while old weights are being sent."""
    parallel, scenario = CASES[name]
    run, expected = train_layout(scenario, overlapped(parallel)), train_layout(scenario, parallel)
    assert (run.losses, run.norms, run.tokens) == (expected.losses, expected.norms, expected.tokens)
    assert run.disagreements == [] and not any(run.replicas.values())
    assert run.working == expected.working and all(len(copies) == 1 for copies in run.working.values())
    assert same(run.weights, expected.weights) and same(run.gradients, expected.gradients)
    assert run.losses[0] != run.losses[1], "the weights changed"


Batches = Sequence[Any]


def _average(engine: TrainEngine, batches: Batches) -> Any:
    with engine.averaged_weights():
        return engine.evaluate(batches)


def _load(engine: TrainEngine, batches: Batches) -> Any:
    def fill(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.mul_(1.01)

    engine.load_shards(fill, engine.optimizer_steps)
    return engine.evaluate(batches)


def _replicas(engine: TrainEngine, _batches: Batches) -> Any:
    return [(replica.key, parity.digest(replica.tensor)) for replica in engine.replicas()]


READERS: dict[str, Callable[[TrainEngine, Batches], Any]] = {
    "evaluate": lambda engine, batches: engine.evaluate(batches),
    "losses_by_position": lambda engine, batches: engine.losses_by_position(batches, 64).tolist(),
    "score": lambda engine, batches: engine.score(batches, VALIDATION_SAMPLES).log_likelihoods_nl.tolist(),
    "averaged_weights": _average,
    "load_shards": _load,
    "replicas": _replicas,
    "stale_weights": lambda engine, _: engine.stale_weights(),
}
"""Methods of an engine that read or replace working weights; a step as well."""
# Of these `layers` returns modules, whose weights only their own passes may read.
OTHERS = {
    *("bounds", "layers", "named_shards", "watch_gradients", "before_update", "watch_activations", "optimizer_steps"),
    *("rerun_nonfinite", "check_compute", "choose_cuda_graphs", "watch_spans", "step"),
}


def test_every_method_of_an_engine_is_known() -> None:
    """Catches a new method that READERS does not call while weights are pending."""
    assert {name for name in vars(TrainEngine) if not name.startswith("_")} - {"device", "grid"} == {*READERS, *OTHERS}


class Twice:
    """A StepCheck that computes each step twice, first without reductions during the backward pass."""

    def compute(self, step: StepPasses) -> Any:
        """Runs the passes."""
        step.run_alone(step.micro_batches[:1])
        step.forget()
        loss_sum = step.run()
        step.reduce()
        return loss_sum


def _spoil(shards: list[Shard]) -> None:
    for shard in shards:
        shard.tensor.fill_(math.nan)


def _read_everything(scenario: Scenario, parallel: ParallelConfig) -> list[Any]:
    """Results of steps with every reader in between; while weights are pending, all are NaN and nobody notices."""
    engine = build_engine(scenario, parallel)
    pending = parallel.overlap_param_gather
    batches = validation_batches(scenario, engine.grid.dp.rank, engine.grid.dp.size)
    results: list[Any] = []

    def step(number: int) -> None:
        result = engine.step(rank_batches(scenario, number, engine.grid), scenario.lr)
        results.append((result.loss, result.grad_norm, result.skipped, result.culprit))
        if not result.skipped:
            assert all(p.isnan().all() == pending for p in engine.module.parameters())

    for number, (name, read) in enumerate(READERS.items()):
        step(number)
        results.append((name, read(engine, batches)))
        assert not any(p.isnan().any() for p in engine.module.parameters()), name
    step(7)
    engine.watch_gradients(_spoil)
    step(8)
    engine.rerun_nonfinite(lambda first, second: results.append((first.skipped, second.skipped)))
    engine.watch_gradients(_spoil)
    step(9)
    engine.check_compute(Twice())
    step(10)
    step(11)
    return results


@pytest.mark.quick("dp2")
@pytest.mark.parametrize("name", ["dp2", "pp2dp2"])
def test_every_reader_of_weights_waits_for_them(name: str) -> None:
    """Catches an evaluation, a comparison of replicas, an average, a load, the search for the rank of a non-finite
    value, a repeated and a checked step that read or overwrite weights which are still to arrive."""
    scenario = parity.fitted(replace(SHORT, optimizer=OptimConfig(ema_decay=0.6)), LAYOUTS[name])
    found, expected = (
        run_ranks(_read_everything, parallel.world_size, scenario, parallel)
        for parallel in (overlapped(LAYOUTS[name]), LAYOUTS[name])
    )
    assert found == expected
    skipped = [result for result in found[0] if len(result) == 4 and result[2]]
    assert len(skipped) == 1 and (True, False) in found[0]


def _alone(parallel: ParallelConfig) -> list[Any]:
    engine = build_engine(SHORT, parallel)
    results = [engine.step(rank_batches(SHORT, number, engine.grid), SHORT.lr) for number in range(2)]
    assert not any(parameter.isnan().any() for parameter in engine.module.parameters())
    return [(result.loss, result.grad_norm) for result in results]


def test_one_rank_has_nothing_to_wait_for() -> None:
    """Catches weights that are made NaN although no other rank holds a slice of them."""
    assert run_ranks(_alone, 1, overlapped(ParallelConfig())) == run_ranks(_alone, 1, ParallelConfig())
