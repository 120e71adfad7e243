"""Host-device synchronizations: the host reads a result of the device once per step.

A CPU waits for nothing, so reads are counted by the places in the code that make them. A step on torch's meta device,
where a read raises, shows which of them concern only CPUs or tensors on the host.
"""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megads.engine.optimizer
from megads.engine.interface import EngineSpec
from megads.engine.optimizer import BucketOptimizer, NamedParameter
from megads.engine.zero_engine import ShardedModel
from megads.model.config import NormKind, Position
from megads.ops.config import TORCH, Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import TokenMeanLoss, global_tokens, share_loss
from megads.parallel.sharding import placement_of
from tests import parity
from tests.distributed import run_ranks
from tests.engine.fake_cuda import path_in_package
from tests.parity import MODEL, Scenario, build_engine, scenario_with, step_batches

OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip
"""torch operators that return to the host a value, or a shape that depends on values."""
METHODS = {"tolist", "numpy", "cpu"}
"""Tensor methods that do so without an operator."""
DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)

THE_WAIT = ("engine/train_engine.py", "_step")
HOST = {("parallel/loss.py", "<genexpr>")}
"""Reads loss masks, which are on the host."""
CPU = {
    ("parallel/loss.py", "is_backward_root"), ("optim/optimizers.py", "_step_by_torch"),
    ("parallel/embedding.py", "add_to"),
}  # fmt: skip
"""Read a value on CPUs only, where it saves a pass over memory."""

Place = tuple[str, str]


def place() -> Place:
    """Returns file and function of the running code, leaving out torch's and this file's."""
    frames = reversed(traceback.extract_stack())
    frame = next(f for f in frames if "/torch/" not in f.filename and f.filename != __file__)
    return path_in_package(Path(frame.filename)), frame.name


class Operators(TorchDispatchMode):
    """Records where operators that synchronize with the host are called."""

    def __init__(self, found: Counter[Place]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else []
        if name in OPERATORS or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in masks):
            self.found[place()] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Records where tensors are read without an operator."""

    def __init__(self, found: Counter[Place]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in METHODS:
            self.found[place()] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(
    scenario: Scenario, parallel: ParallelConfig, defect: Callable[[], None] | None
) -> tuple[Counter[Place], int]:
    """Returns where the second step of a run reads tensors, and its micro-batches; the first step fills caches."""
    load(scenario.ops, print, cuda=False)
    if defect is not None:
        defect()
    engine, found = build_engine(scenario, parallel), Counter[Place]()
    engine.step(step_batches(scenario, 0), scenario.lr)
    batches = step_batches(scenario, 1)
    with Methods(found), Operators(found):
        engine.step(batches, scenario.lr)
    return found, len(batches)


FUSED = OpsConfig(Implementation.fused)
CASES = {
    "single": (scenario_with(model=DROPOUT, documents=True), ParallelConfig()),
    "single, kernels": (scenario_with(model=DROPOUT, ops=FUSED), ParallelConfig(recompute=Recompute.full)),
    "pp2, kernels": (scenario_with(model=MODEL, ops=FUSED), ParallelConfig(pp=2)),
    "tp2, kernels, loss in chunks": (
        scenario_with(model=MODEL, ops=replace(FUSED, loss_chunk=9)),
        ParallelConfig(tp=2),
    ),
    "tp2sp": (scenario_with(model=DROPOUT), ParallelConfig(tp=2, sequence_parallel=True)),
}


@pytest.mark.always("tp2sp")
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.quick("tp2sp", "pp2, kernels", "single, kernels")
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_for_the_device_once(case: str) -> None:
    """Catches a read added anywhere in a step: on a GPU each one drains the queue of kernels, and the device idles."""
    scenario, parallel = CASES[case]
    for found, micro_batches in run_ranks(reads_of_a_step, parallel.world_size, scenario, parallel, None):
        assert found.pop(THE_WAIT) == 1
        assert set(found) <= HOST | CPU
        assert found["parallel/loss.py", "<genexpr>"] in (0, micro_batches)


def a_norm_that_is_read() -> None:
    inner = megads.engine.optimizer.clip_factor
    megads.engine.optimizer.clip_factor = lambda norm, largest: inner(norm, largest) if norm > 0 else norm


@pytest.mark.distributed
def test_an_added_host_wait_is_counted() -> None:
    """Catches counters that miss a read."""
    found, _ = run_ranks(reads_of_a_step, 1, *CASES["single"], a_norm_that_is_read)[0]
    assert set(found) - HOST - CPU - {THE_WAIT} == {("engine/optimizer.py", "_update")}


VARIANTS = {
    "alibi": scenario_with(precision="bfloat16"),
    "alibi, documents": scenario_with(documents=True),
    "alibi, dropout": scenario_with(model=DROPOUT, precision="bfloat16"),
    "alibi, loss in chunks": scenario_with(precision="bfloat16", ops=OpsConfig(Implementation.torch, loss_chunk=9)),
    "rope, RMSNorm, window, documents": scenario_with(
        model=replace(MODEL, position=Position.rope, norm=NormKind.rmsnorm, window=7), documents=True
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_value_is_read_on_the_meta_device(variant: str) -> None:
    """Catches a read on devices other than CPUs. There is no GPU here: on the meta device a read raises."""
    scenario, device, grid, parallel = VARIANTS[variant], torch.device("meta"), single_rank_grid(), ParallelConfig()
    loss = TokenMeanLoss(scenario.model.vocabulary, grid, replace(TORCH, loss_chunk=scenario.ops.loss_chunk))
    value = parity.initial_weights(scenario)
    assert value is not None
    spec = EngineSpec(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        scenario.dtype,
        scenario.micro_batch_size,
        scenario.seed,
        device,
        value,
    )
    model = ShardedModel(spec, loss)
    named = [NamedParameter(placement_of(p).key, p) for p in model.parameters()]
    optimizer = BucketOptimizer(named, scenario.optim, parallel, grid)
    batches = step_batches(scenario, 0)
    tokens = global_tokens(batches, grid, device, 0)
    loss.scale = 1.0 / tokens.clamp(min=1.0)
    losses = []
    for index, batch in enumerate(batches):
        optimizer.last_backward = index == len(batches) - 1
        losses.append(model(batch.to(device)))
        losses[-1].backward()
    optimizer.reduce()
    optimizer.step(scenario.lr)
    shared = share_loss(functools.reduce(torch.add, losses).detach(), tokens, grid, 0)
    assert shared.device == optimizer.norm.device == device
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        optimizer.norm.item()
