"""One rank of a layout: trains a scenario on the real engine and reports what it saw."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from megads.batch import MicroBatch
from megads.engine.build import build_train_engine
from megads.engine.interface import Shard, TrainEngine
from megads.model.initialise import InitialValue
from megads.ops.choice import load
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import ParallelGrid, build_grid
from megads.verify.reductions import RecordedReductions
from megads.verify.run import Piece, RankRun, pieces
from megads.verify.scenario import Scenario, initial_weights, step_batches, validation_batches


def build_engine(scenario: Scenario, parallel: ParallelConfig, value: InitialValue | None = None) -> TrainEngine:
    """The engine of a layout; collective over the world.

    Args:
        scenario: what is trained.
        parallel: the layout.
        value: initial weights; None is the scenario's.
    """
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    ops = load(scenario.ops, print, cuda=False, optimizer=scenario.optim.impl)
    return build_train_engine(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=torch.device("cpu"),
        value=value or initial_weights(scenario),
        ops=ops,
    )


def rank_batches(scenario: Scenario, step: int, grid: ParallelGrid) -> list[MicroBatch]:
    """This rank's share of a step."""
    return step_batches(scenario, step, grid.dp.rank, grid.dp.size)


def train_rank(scenario: Scenario, engine: TrainEngine) -> RankRun:
    """Validates, then trains on this rank; collective over the world.

    Args:
        scenario: what is trained.
        engine: with its initial weights.
    """
    run = RankRun(initial=pieces(engine.named_shards()))
    run.validation = evaluate(engine, scenario)
    run.gradients = first_gradients(engine)
    for step in range(scenario.steps):
        # One step shows them all, and the spy costs time.
        with RecordedReductions(engine.grid, run.reductions) if step == 0 else nullcontext():
            result = engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.tokens.append(result.tokens)
    run.shards = pieces(engine.named_shards())
    run.held = pieces(engine.named_shards(owned=False))
    return run


def evaluate(engine: TrainEngine, scenario: Scenario) -> tuple[float, int]:
    """Loss sum and tokens of the scenario's validation set; collective over the world."""
    found = engine.evaluate(validation_batches(scenario, engine.grid.dp.rank, engine.grid.dp.size))
    return found.loss_sum, found.tokens


def first_gradients(engine: TrainEngine) -> list[Piece]:
    """A list that fills with this rank's reduced gradients of the next step."""
    found: list[Piece] = []

    def keep(shards: list[Shard]) -> None:
        found.extend(pieces(shards))
        engine.watch_gradients(None)

    engine.watch_gradients(keep)
    return found
