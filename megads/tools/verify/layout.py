"""One rank of a layout: trains a scenario with the training engine and records the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.api import (
    EngineSpec,
    MicroBatch,
    ParallelConfig,
    ParallelGrid,
    TrainEngine,
    build_grid,
    build_train_engine,
    load,
    resolve_engine,
)
from megads.model.gpt import InitialValue
from megads.tools.verify.run import RankRun, TensorPart, pieces
from megads.tools.verify.scenario import Scenario, initial_weights, step_batches, validation_batches

_ACTIVATION_DIMS = 3
"""Activations have at least three dimensions; gradients are reduced flat or in the shape of their weight."""


class CollectiveObserver(TorchDispatchMode):
    """Context manager that calls `note` before every operation of torch.distributed in this thread, of any engine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the operation if it communicates, and runs it."""
        if func.namespace == "c10d":
            self.note(func.__name__, next(_ranks(args), set()), list(_tensors(args)))
        return func(*args, **(kwargs or {}))

    def note(self, name: str, ranks: set[int], tensors: list[Tensor]) -> None:
        """Called before an operation.

        Args:
            name: name of the operation, such as "allreduce_.default".
            ranks: global ranks of its process group; empty if it has none.
            tensors: its tensors, outputs included.
        """
        raise NotImplementedError


class RecordedReductions(CollectiveObserver):
    """Context manager that records every gradient reduction over ranks that share weights.

    These are reductions over all or some ranks of the data axis, and over the first and last pipeline stage, which
    share tied embeddings.

    Args:
        grid: parallel grid of this rank.
        seen: set to which (dtype, number of elements) of each reduction is added.
    """

    def __init__(self, grid: ParallelGrid, seen: set[tuple[str, int]]) -> None:
        super().__init__()
        self._seen = seen
        self._data = set(grid.data.ranks)
        self._tied = {grid.pp.ranks[0], grid.pp.ranks[-1]}

    def note(self, name: str, ranks: set[int], tensors: list[Tensor]) -> None:
        """See CollectiveObserver; ignores what is no reduction."""
        if "reduce" not in name or len(ranks) < 2 or not (ranks <= self._data or ranks == self._tied):
            return
        for tensor in tensors:
            # Context-parallel attention also reduces gradients of keys and values over ranks of the data axis, and
            # DeepSpeed's ZeRO-2 a flag for a norm that is not finite.
            if tensor.is_floating_point() and (ranks == self._tied or tensor.dim() < _ACTIVATION_DIMS):
                self._seen.add((str(tensor.dtype), tensor.numel()))


def _ranks(args: Any) -> Iterator[set[int]]:
    """Global ranks of each process group among a collective's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            # A reduce operation is a ScriptObject too.
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
            yield set(dist.get_process_group_ranks(group))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def build_engine(
    scenario: Scenario,
    parallel: ParallelConfig,
    value: InitialValue | None = None,
    device: torch.device | None = None,
) -> TrainEngine:
    """Builds the engine of a layout; collective over the world.

    Args:
        scenario: scenario to train.
        parallel: parallel layout.
        value: initial weights; None uses those of the scenario.
        device: device of this rank; None is the CPU.
    """
    device = device or torch.device("cpu")
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    kernels = load(scenario.ops, print, cuda=device.type == "cuda", optimizer=scenario.optim.impl)
    spec = EngineSpec(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=device,
        value=value or initial_weights(scenario),
        kernels=kernels,
        engine=resolve_engine(scenario.engine, parallel.zero_stage),
        z_loss=scenario.z_loss,
        float8=scenario.float8,
    )
    return build_train_engine(spec)


def rank_batches(scenario: Scenario, step: int, grid: ParallelGrid) -> list[MicroBatch]:
    """This rank's micro-batches of a step."""
    return step_batches(scenario, step, grid.dp.rank, grid.dp.size)


def train_rank(scenario: Scenario, engine: TrainEngine) -> RankRun:
    """Validates, then trains on this rank; collective over the world.

    Args:
        scenario: scenario to train.
        engine: engine with initial weights.
    """
    run = RankRun(initial=pieces(engine.named_shards()))
    run.validation = evaluate(engine, scenario)
    run.gradients = capture_gradients(engine)
    for step in range(scenario.steps):
        # One step contains all reductions, and recording is slow.
        with RecordedReductions(engine.grid, run.reductions) if step == 0 else nullcontext():
            result = engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.tokens.append(result.tokens)
    run.shards = pieces(engine.named_shards())
    run.held = pieces(engine.named_shards(owned=False))
    return run


def evaluate(engine: TrainEngine, scenario: Scenario) -> tuple[float, int]:
    """Loss sum and number of tokens of the scenario's validation set; collective over the world."""
    found = engine.evaluate(validation_batches(scenario, engine.grid.dp.rank, engine.grid.dp.size))
    return found.loss_sum, found.tokens


def capture_gradients(engine: TrainEngine) -> list[TensorPart]:
    """Returns a list to which the next step adds this rank's reduced gradients."""
    found: list[TensorPart] = []
    engine.watch_gradients(lambda shards: found.extend(pieces(shards)))
    return found
