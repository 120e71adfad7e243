"""The EMA of the weights: equal in every layout, unchanged by skipped steps, and not used in training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megads.checkpoint.initial import WeightSource, read_weights
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import find_checkpoint, read_into, with_averages_from_weights
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import EvaluationResult, Shard, TrainEngine
from megads.model.gpt import GPT, initial_value, token_losses
from megads.optim.config import OptimConfig
from megads.optim.masters import update_average
from megads.runtime.distributed import open_control_plane
from megads.tools.verify.layout import rank_batches
from megads.tools.verify.run import TensorPart
from megads.tools.verify.scenario import validation_batches
from tests import parity
from tests.distributed import run_ranks
from tests.parity import (
    LAYOUTS,
    Scenario,
    assemble,
    build_engine,
    evaluate,
    pieces,
    scenario_with,
    train_layout,
)

DECAY = 0.6
AVERAGED = scenario_with(steps=4, optimizer=OptimConfig(ema_decay=DECAY))
CASES = ("tp2", "pp2", "cp2", "tp2pp2", "pp2dp2, ZeRO-0", "zero2dp2", "zero3dp2", "hierarchical", "tp2pp2dp2")


@pytest.mark.distributed
@pytest.mark.quick("zero3dp2")
@pytest.mark.parametrize("layout", CASES)
def test_weight_averages_equal_the_reference_in_every_layout(layout: str) -> None:
    """Catches an average of the weights before a step, one that starts at zero, decay and 1 - decay swapped, a shard
    that no rank averages, and replicas that diverge (N3, N8, against fp64)."""
    run = train_layout(AVERAGED, LAYOUTS[layout])
    assert run.averages.keys() == run.weights.keys()
    reference = parity.reference_of(AVERAGED)
    assert parity.check_curve(run, reference) + parity.check_replicas(run, reference) == []


@dataclass
class Seen:
    """Results of a rank.

    Attributes:
        losses: validation losses of the weights, of the average, and of the weights again.
        steps: losses of the steps.
        shards: owned shards after two steps and after the third.
        stale: working weights that differ from their master weights.
        warned: whether copies of the state were waited for before averages replaced the master weights, if they did.
    """

    losses: list[EvaluationResult]
    steps: list[float]
    shards: list[list[TensorPart]]
    stale: list[str]
    warned: bool = True


def _bits(engine: TrainEngine) -> list[bytes]:
    return [part.values.tobytes() for part in pieces(engine.named_shards())]


def _evaluate_in_between(layout: str, looks: bool) -> Seen:
    scenario = parity.fitted(AVERAGED, LAYOUTS[layout])
    engine = build_engine(scenario, LAYOUTS[layout])
    seen = Seen([], [], [], [])

    def step(number: int) -> None:
        seen.steps.append(engine.step(rank_batches(scenario, number, engine.grid), scenario.lr).loss)

    step(0)
    step(1)
    if looks:
        seen.losses.append(_validated(engine, scenario))
        before, waits = _bits(engine), list[bool]()
        engine.before_update(lambda: waits.append(_bits(engine) == before))
        with engine.averaged_weights():
            seen.warned = _bits(engine) == before or waits == [True]
            seen.losses.append(_validated(engine, scenario))
        seen.losses.append(_validated(engine, scenario))
    seen.stale = engine.stale_weights()
    seen.shards.append(pieces(engine.named_shards()))
    step(2)
    seen.shards.append(pieces(engine.named_shards()))
    return seen


def _validated(engine: TrainEngine, scenario: Scenario) -> EvaluationResult:
    return EvaluationResult(*evaluate(engine, scenario))


@pytest.mark.distributed
@pytest.mark.quick("zero2dp2")
@pytest.mark.parametrize("layout", ["zero3dp2", "pp2dp2", "zero2dp2", "tp2pp2", "pp2dp2, ZeRO-0"])
def test_evaluating_the_average_leaves_the_weights_unchanged(layout: str) -> None:
    """Catches an evaluation of other weights than the average, tied or gathered weights that are not updated, weights
    that are not restored bitwise when training continues, and a state that changes while it is copied."""
    ranks = LAYOUTS[layout].world_size
    looked, untouched = (run_ranks(_evaluate_in_between, ranks, layout, looks) for looks in (True, False))
    first, averaged, again = looked[0].losses
    assert first == again and averaged != first
    averages = assemble([part for rank in looked for part in rank.shards[0]], "average")
    assert averaged.loss_sum == pytest.approx(_loss_of(averages), rel=1e-6)
    for one, other in zip(looked, untouched, strict=True):
        assert one.stale == [] and one.warned and one.steps == other.steps
        for mine, theirs in zip(one.shards, other.shards, strict=True):
            assert [part.key for part in mine] == [part.key for part in theirs]
            assert all(a.values.tobytes() == b.values.tobytes() for a, b in zip(mine, theirs, strict=True))


def _loss_of(weights: dict) -> float:
    """Loss on the scenario's validation set, by the unsharded model."""
    scenario = AVERAGED
    model = GPT(scenario.model, scenario.seed, lambda name, _: torch.from_numpy(weights[name])).eval()
    total = 0.0
    with torch.no_grad():
        for batch in validation_batches(scenario):
            assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
            losses = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs)
            total += float((losses * batch.loss_mask_bs).double().sum())
    return total


def _skip_a_step(layout: str) -> list[bool]:
    scenario = parity.fitted(AVERAGED, LAYOUTS[layout])
    engine = build_engine(scenario, LAYOUTS[layout])

    def spoil(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.fill_(math.nan)

    engine.step(rank_batches(scenario, 0, engine.grid), scenario.lr)
    before = pieces(engine.named_shards())
    engine.watch_gradients(spoil)
    skipped = engine.step(rank_batches(scenario, 1, engine.grid), scenario.lr).skipped
    after = pieces(engine.named_shards())
    same = all(a.values.tobytes() == b.values.tobytes() for a, b in zip(before, after, strict=True))
    return [skipped, same]


@pytest.mark.quick("zero3dp2")
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["dp2", "zero3dp2"])
def test_a_skipped_step_is_not_averaged(layout: str) -> None:
    """Catches an average that includes the same weights twice, or a gradient that is not finite."""
    assert run_ranks(_skip_a_step, 2, layout) == [[True, True]] * 2


def test_the_average_update_is_exact_in_fp64() -> None:
    """Catches decay and 1 - decay swapped, and a skipped step that is averaged, against fp64."""
    generator = torch.Generator().manual_seed(0)
    average, master = (torch.randn(1000, generator=generator) for _ in range(2))
    exact = 0.999 * average.double() + 0.001 * master.double()
    for taken in (None, torch.tensor(True)):
        found = average.clone()
        update_average(found, master, 0.999, taken)
        torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=0)
    untouched = average.clone()
    update_average(untouched, master, 0.999, torch.tensor(False))
    assert torch.equal(untouched, average)


def _save_without(folder: Path) -> None:
    scenario = scenario_with(steps=2)
    engine = build_engine(scenario, LAYOUTS["dp2"])
    for step in range(2):
        engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
    record = RunRecord(
        state={"step": 2, "samples": 24, "tokens": 0}, optimizer_steps=2, config_digest="", model={},
        layout={"tp": 1, "cp": 1, "pp": 1, "dp": 2},
    )  # fmt: skip
    save_checkpoint(folder, engine.named_shards(), record, control=open_control_plane())


def _load_with(folder: Path, resumes: bool) -> list[tuple[str, bool]]:
    engine = build_engine(AVERAGED, LAYOUTS["tp2"])
    handle = find_checkpoint(folder, "auto", open_control_plane())
    assert handle is not None

    def fill(shards: list[Shard]) -> None:
        if resumes:
            read_into(handle, with_averages_from_weights(handle, shards))
        else:
            read_weights(WeightSource(str(folder), handle), shards, initial_value(AVERAGED.model, 0))

    engine.load_shards(fill, handle.optimizer_steps)
    held = {(part.key, part.offset): part.values for part in pieces(engine.named_shards(owned=False))}
    weights = {(key.partition("/")[2], at): values for (key, at), values in held.items() if key.startswith("weight/")}
    averages = [(key, at) for key, at in held if key.startswith("average/")]
    assert len(averages) == len(weights)
    return [(key, bool((held[key, at] == weights[key.partition("/")[2], at]).all())) for key, at in averages]


@pytest.mark.slow
@pytest.mark.distributed
def test_an_average_may_begin_at_a_resume(tmp_path: Path) -> None:
    """Catches a run that cannot resume with optim.ema_decay from a checkpoint without averages, and an average that
    starts there at the initial weights, or at zero if the run starts from another's weights (checkpoint.init_from)."""
    run_ranks(_save_without, 2, tmp_path)
    for resumes in (True, False):
        for found in run_ranks(_load_with, 2, tmp_path, resumes):
            assert [key for key, same in found if not same] == []
