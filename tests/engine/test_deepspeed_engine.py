"""engine=deepspeed with ZeRO-0 and 1: DeepSpeed's PipelineEngine against the unsharded reference, and beside native."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megads.engine.interface import Shard, StepPasses, StepResult, TrainEngine
from megads.parallel.config import EngineKind, ParallelConfig, Recompute
from megads.tools.rerun.repeated_step import ComputeComparison, RepeatedStep
from megads.tools.verify.layout import rank_batches
from megads.tools.verify.run import pieces
from tests import parity
from tests.command import StartCommand, checkpoint_of, checksums, small_model, steps_of
from tests.distributed import run_ranks
from tests.engine.test_bf16_parity import FIRST, check_curve, check_first_step, curve_scenario
from tests.parity import MODEL, Scenario, build_engine, scenario_with, train_layout

pytestmark = pytest.mark.distributed

DEEPSPEED = scenario_with(steps=50, masked=True, documents=True, engine=EngineKind.deepspeed)
FEW = replace(DEEPSPEED, steps=8)
UNTIED = replace(MODEL, tie_embeddings=False)
LAYOUTS = {
    "single": ParallelConfig(),
    "dp2": ParallelConfig(dp=2),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "pp4": ParallelConfig(pp=4),
    "pp3": ParallelConfig(pp=3),
    "cp2": ParallelConfig(cp=2),
    "tp2pp2sp": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "pp2cp2": ParallelConfig(pp=2, cp=2),
    "tp2pp2dp2": ParallelConfig(tp=2, pp=2, dp=2),
    "pp2 recomputed": ParallelConfig(pp=2, recompute=Recompute.full),
}
WITHOUT_TIES = ("dp2", "tp2", "pp2", "pp4", "tp2pp2sp", "tp2pp2dp2")


IN_FEW_STEPS = ("tp2",)
"""Layouts whose errors show at once; tp2pp2sp and tp2pp2dp2 train all steps on as many tensor-parallel ranks."""


@pytest.mark.quick("pp2-1-tied", "tp2-0-untied")
@pytest.mark.parametrize(
    ("layout", "zero", "tied"),
    [
        *((layout, zero, "tied") for layout in LAYOUTS for zero in (0, 1)),
        *((layout, zero, "untied") for layout in WITHOUT_TIES for zero in (0, 1)),
    ],
)
def test_deepspeed_equals_the_reference_in_every_layout(layout: str, zero: int, tied: str) -> None:
    """Catches a tied weight that counts twice in the norm (DeepSpeed's ZeRO-0), replicated weights that count once for
    each tensor-parallel rank, losses divided by micro-batches, BatchInfo of another micro-batch, and drift: N1, N3, N7,
    N8, N10 over 50 steps with active clipping, in fp32."""
    scenario = replace(FEW if layout in IN_FEW_STEPS else DEEPSPEED, model=MODEL if tied == "tied" else UNTIED)
    run = train_layout(scenario, replace(LAYOUTS[layout], zero_stage=zero))
    assert parity.faults_of(run, scenario) == []


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "zero"), [("bfloat16", 1), ("float32", 0)])
def test_tied_copies_stay_equal_with_three_data_parallel_ranks(precision: str, zero: int) -> None:
    """Catches DeepSpeed's order, tied weights before data-parallel ranks, with which the copies drift apart, in fp32
    within eight steps (N8)."""
    scenario = replace(FEW, precision=precision, documents=False)
    run = train_layout(scenario, replace(parity.LAYOUTS["pp2dp3"], zero_stage=zero))
    assert parity.check_replicas(run, run) == []


def _gradients(scenario: Scenario, parallel: ParallelConfig) -> tuple[list[Any], float]:
    """This rank's reduced gradients in the first step, and their norm."""
    engine, found = build_engine(scenario, parallel), list[Any]()
    engine.watch_gradients(lambda shards: found.extend(pieces(shards)))
    result = engine.step(rank_batches(scenario, 0, engine.grid), 0.0)
    return found, result.grad_norm


@pytest.mark.quick("tp2pp2dp2-tied")
@pytest.mark.parametrize(
    ("layout", "tied"),
    [*((layout, "tied") for layout in LAYOUTS), *((layout, "untied") for layout in WITHOUT_TIES)],
)
def test_deepspeed_accumulates_bf16_gradients_in_fp32(layout: str, tied: str) -> None:
    """Catches gradients that DeepSpeed drops, as it does those of layers in its loss function, or accumulates or
    reduces in bf16 (N7): every gradient and the norm equal the native engine's, which computes the same layers."""
    model = MODEL if tied == "tied" else UNTIED
    scenario = parity.fitted(scenario_with(precision="bfloat16", masked=True, model=model), LAYOUTS[layout])
    gathered = []
    for kind in (EngineKind.deepspeed, EngineKind.native):
        ranks = run_ranks(_gradients, LAYOUTS[layout].world_size, replace(scenario, engine=kind), LAYOUTS[layout])
        gathered.append((parity.assemble([part for parts, _ in ranks for part in parts], "gradient"), ranks[0][1]))
    (ours, norm), (theirs, expected) = gathered
    assert ours.keys() == theirs.keys() and norm == pytest.approx(expected, rel=1e-4)
    off = {name: parity.relative(ours[name], theirs[name]) for name in theirs}
    # Alone on one stage, the two gradients of a tied weight are rounded once more: to bf16.
    assert {name for name, error in off.items() if error > 1e-6} <= {"embedding.word.weight"} and max(
        off.values()
    ) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "cp2", "tp2pp2sp", "tp2pp2dp2"])
def test_deepspeeds_first_step_in_bf16_is_within_n4(layout: str) -> None:
    """Catches weights, activations or a loss in a lower precision than the native engine's (N4, N7)."""
    run = train_layout(replace(FIRST, engine=EngineKind.deepspeed), LAYOUTS[layout])
    check_first_step(layout, run)
    assert parity.check_reduction_dtype(run, run) == []


@pytest.mark.slow
def test_deepspeeds_curve_in_bf16_is_within_n4() -> None:
    """Catches drift within 200 steps (N4)."""
    scenario = replace(curve_scenario(2), engine=EngineKind.deepspeed)
    check_curve("tp2pp2", train_layout(scenario, LAYOUTS["tp2pp2sp"]).losses)


class EveryStepTwice:
    """A StepCheck that computes every step twice."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine, self.judged = engine, list[list[ComputeComparison]]()

    def compute(self, step: StepPasses) -> Tensor | None:
        loss_sum = RepeatedStep(self.engine.grid, self.engine.device, step).run(self.judged.append)
        step.reduce()
        return loss_sum


def _computed_twice() -> bool:
    parallel = ParallelConfig(pp=2, dp=2)
    scenario = parity.fitted(scenario_with(precision="bfloat16", engine=EngineKind.deepspeed), parallel)
    plain, checked = (build_engine(scenario, parallel) for _ in range(2))
    check = EveryStepTwice(checked)
    checked.check_compute(check)
    for step in range(3):
        batches = rank_batches(scenario, step, plain.grid)
        assert plain.step(batches, 1e-3) == checked.step(batches, 1e-3)
    states = ([part.values.tobytes() for part in pieces(engine.named_shards())] for engine in (plain, checked))
    return not check.judged and len(set(map(tuple, states))) == 1


def test_a_step_computed_twice_is_the_same() -> None:
    """Catches gradients of the first computation that stay, and computations of DeepSpeed that are not repeatable."""
    assert run_ranks(_computed_twice, 4) == [True] * 4


def _what_runs(precision: str, zero: int) -> list[Any]:
    engine = build_engine(replace(FEW, precision=precision), ParallelConfig(pp=2, zero_stage=zero))
    inner = engine._pipeline.engine  # type: ignore[attr-defined]
    calls: list[str] = []
    for name in ("train_batch", "_exec_reduce_grads", "_exec_reduce_tied_grads", "_exec_optimizer_step"):
        original = getattr(inner, name)
        setattr(inner, name, lambda *args, run=original, of=name: (calls.append(of), run(*args))[1])
    engine.step(rank_batches(FEW, 0, engine.grid), 1e-3)
    return [type(inner) is PipelineEngine, type(inner.optimizer) is BF16_Optimizer, calls]


def test_deepspeeds_own_classes_run_the_step() -> None:
    """Catches an engine of ours under DeepSpeed's name: its own classes run the passes, the reductions and the step."""
    for is_pipeline, is_bf16, calls in run_ranks(_what_runs, 2, "bfloat16", 1):
        assert is_pipeline and is_bf16
        assert calls == ["train_batch", "_exec_reduce_grads", "_exec_reduce_tied_grads", "_exec_optimizer_step"]


def _ramp(precision: str) -> list[Any]:
    """Steps of two, one and no counted micro-batches, and of a shorter sequence, with an evaluation in between."""
    parallel = ParallelConfig(pp=2)
    scenario = scenario_with(masked=True, clip_grad=0.0, precision=precision, engine=EngineKind.deepspeed)
    engine = build_engine(scenario, parallel)
    many = rank_batches(scenario, 0, engine.grid)
    short = rank_batches(replace(scenario, seq_len=scenario.seq_len // 2), 1, engine.grid)[:1]
    blind = [replace(batch, loss_mask_bs=torch.zeros_like(batch.loss_mask_bs)) for batch in many]
    first = engine.step(many, 0.0)
    before = engine.evaluate(many[:2])
    between = [engine.step(short, 0.0), engine.step(blind, 0.0), engine.evaluate(short)]
    assert between[1] == StepResult(loss=0.0, tokens=0, grad_norm=0.0)
    return [first == engine.step(many, 0.0), before == engine.evaluate(many[:2]), between[0]]


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_deepspeed_steps_do_not_depend_on_what_came_before(precision: str) -> None:
    """Catches a batch ramp that divides by the first step's micro-batches, activations received into buffers of another
    shape, and gradients left over."""
    found, other = run_ranks(_ramp, 2, precision)
    assert found == other and found[:2] == [True, True] and found[2].tokens > 0


def _broken_step(precision: str, zero: int) -> dict[str, Any]:
    parallel = ParallelConfig(pp=2, dp=1, zero_stage=zero)
    scenario = scenario_with(precision=precision, engine=EngineKind.deepspeed)
    engine, good = (build_engine(scenario, parallel) for _ in range(2))
    batches = rank_batches(scenario, 0, engine.grid)

    def spoil(shards: list[Shard]) -> None:
        for shard in shards:
            shard.tensor.fill_(math.nan)

    before = pieces(engine.named_shards())
    engine.watch_gradients(spoil)
    result = engine.step(batches, 1e-3)
    after = pieces(engine.named_shards())
    same = all(a.values.tobytes() == b.values.tobytes() for a, b in zip(before, after, strict=True))
    return {"result": result, "same": same, "next": engine.step(batches, 1e-3) == good.step(batches, 1e-3)}


@pytest.mark.quick("bfloat16-1")
@pytest.mark.parametrize(("precision", "zero"), [("bfloat16", 1), ("float32", 1), ("float32", 0)])
def test_a_nonfinite_step_under_deepspeed_changes_nothing(precision: str, zero: int) -> None:
    """Catches a step with gradients that are not finite, which DeepSpeed applies in fp32, and what it leaves behind."""
    for found in run_ranks(_broken_step, 2, precision, zero):
        assert found["result"].skipped and found["result"].grad_norm == math.inf
        assert found["same"] and found["next"]


@pytest.mark.slow
def test_a_killed_deepspeed_run_continues_bit_for_bit(corpus: Path, megads: StartCommand) -> None:
    """Catches state of DeepSpeed's engine that is not saved, or loaded in another order (N5)."""
    runs = megads.folder / "whole", megads.folder / "killed"
    layout = {"engine": "deepspeed", "parallel__pp": 2, "parallel__dp": 2, "train__precision": "bf16"}
    steps = {"train__steps": 12, "checkpoint__every_steps": 2}
    whole, killed = (small_model(corpus, run__dir=run, **layout, **steps) for run in runs)
    ended = megads("train", *whole).end()
    assert ended.code == 0, ended.err
    command = megads("train", *killed)
    command.wait_for(lambda: any(line["step"] >= 5 for line in steps_of(runs[1])))
    command.kill_everything()
    assert megads("train", *killed).end().code == 0
    assert steps_of(runs[1]) == steps_of(runs[0])
    assert checksums(checkpoint_of(runs[1], 12)) == checksums(checkpoint_of(runs[0], 12))
