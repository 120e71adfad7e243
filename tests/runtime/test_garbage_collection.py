"""The garbage collector runs at fixed steps, and a step leaves it no tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.runtime.garbage_collection import GarbageCollectionHook
from megads.runtime.hooks import StepInfo, TrainState
from tests.distributed import run_ranks
from tests.parity import build_engine, scenario_with, step_batches


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generation of every collection since."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()
    gc.unfreeze()


def step(number: int) -> StepInfo:
    return StepInfo(number, number, number, 1.0, 1.0, 1e-3, 1, 1, 1.0, 0.0, skipped=False, culprit="", batch_hash="")


class Cycle:
    """Garbage that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_come_at_fixed_steps(collections: list[int]) -> None:
    """Catches a rank that collects when it likes, at whose steps all others wait, and a collector left off."""
    hook = GarbageCollectionHook(4)
    hook.on_start(TrainState())
    collections.clear()
    for number in range(3, 13):
        garbage = [Cycle() for _ in range(2000)]
        del garbage
        hook.on_step(step(number))
    assert collections == [1, 1, 1]
    hook.on_end(TrainState())
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_null_leaves_it_to_python(collections: list[int]) -> None:
    """Catches a collector that is off although the user asked for Python's own."""
    hook = GarbageCollectionHook(None)
    hook.on_start(TrainState())
    hook.on_step(step(50))
    assert gc.isenabled() and collections.count(2) == 0


def tensors_in_cycles(parallel: ParallelConfig, documents: bool) -> list[str]:
    """Shapes of the tensors that three steps leave to the collector, on this rank."""
    scenario = scenario_with(steps=6, masked=True, documents=documents, micro_batch_size=2)
    engine = build_engine(scenario, parallel)

    def train(steps: range) -> None:
        for number in steps:
            engine.step(step_batches(scenario, number, engine.grid.dp.rank, parallel.dp), scenario.lr)

    train(range(3))
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    train(range(3, 6))
    gc.collect()
    return [str(tuple(found.shape)) for found in gc.garbage if isinstance(found, torch.Tensor)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=2, sequence_parallel=True, recompute=Recompute.selective),
        ParallelConfig(pp=2, schedule=ScheduleName.zb_h1),
        ParallelConfig(dp=2, zero_stage=3, recompute=Recompute.full),
    ],
    ids=["tp2sp", "zb_h1", "zero3"],
)
def test_a_step_leaves_no_tensor_in_a_cycle(parallel: ParallelConfig) -> None:
    """Catches activations that stay in memory until the next collection, fifty steps later."""
    assert run_ranks(tensors_in_cycles, 2, parallel, True) == [[], []]
