"""Trains the layouts of the parity tests with megads.tools.verify; checks working weights and records collectives.

The comparison itself is part of megads: `megads verify_layout` runs it for the user's own layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megads.engine.bucket
from megads.engine.interface import TrainEngine
from megads.ops.config import OpsConfig
from megads.parallel.config import EngineKind, ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.tools.verify import checks
from megads.tools.verify import run as verified
from megads.tools.verify.checks import (
    check_curve,
    check_first_step,
    check_initial_weights,
    check_reduction_dtype,
    check_validation,
    drop_key_biases,
    relative,
)
from megads.tools.verify.compare import train_reference
from megads.tools.verify.layout import build_engine, evaluate, train_rank
from megads.tools.verify.run import RankRun, assemble, pieces
from megads.tools.verify.scenario import MODEL, Scenario, hot_weights, initial_weights, step_batches
from tests.distributed import run_ranks

__all__ = [
    "EVERY_CHECK",
    "LAYOUTS",
    "LAYOUT_CASES",
    "MODEL",
    "Run",
    "Scenario",
    "assemble",
    "build_engine",
    "check_curve",
    "check_first_step",
    "check_initial_weights",
    "check_reduction_dtype",
    "check_replicas",
    "check_validation",
    "drop_key_biases",
    "evaluate",
    "faults_of",
    "hot_weights",
    "initial_weights",
    "pieces",
    "reference_of",
    "relative",
    "scenario_with",
    "step_batches",
    "train_layout",
    "train_reference",
]

# Several buckets per rank; at the default size one bucket would hold all gradients of a role.
SMALL_BUCKET = 8192
LAYOUTS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "dp2": ParallelConfig(dp=2, bucket_elements=SMALL_BUCKET),
    "tp3": ParallelConfig(tp=3),
    "tp2pp2": ParallelConfig(tp=2, pp=2),
    "pp2dp2": ParallelConfig(pp=2, dp=2, bucket_elements=SMALL_BUCKET),
    "tp2dp2": ParallelConfig(tp=2, dp=2, tp_chunks=2),
    "pp2dp3": ParallelConfig(pp=2, dp=3),
    "tp2pp2dp2": ParallelConfig(tp=2, pp=2, dp=2, bucket_elements=SMALL_BUCKET),
    "pp2dp2, ZeRO-0": ParallelConfig(pp=2, dp=2, zero_stage=0),
    "pp2 interleaved": ParallelConfig(pp=2, schedule=ScheduleName.interleaved),
    "pp2 zb_h1": ParallelConfig(pp=2, schedule=ScheduleName.zb_h1),
    "pp2 zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    "pp2dp2 dualpipe_v": ParallelConfig(pp=2, dp=2, schedule=ScheduleName.dualpipe_v, bucket_elements=SMALL_BUCKET),
    "tp2sp": ParallelConfig(tp=2, sequence_parallel=True),
    "tp2pp2sp": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "tp2dp2sp": ParallelConfig(tp=2, dp=2, sequence_parallel=True, tp_chunks=3),
    "cp2": ParallelConfig(cp=2),
    "cp3": ParallelConfig(cp=3),
    "tp2cp2": ParallelConfig(tp=2, cp=2),
    "pp2cp2": ParallelConfig(pp=2, cp=2),
    "cp2dp2": ParallelConfig(cp=2, dp=2),
    "zero2dp2": ParallelConfig(dp=2, zero_stage=2),
    "zero2dp3": ParallelConfig(dp=3, zero_stage=2),
    "zero2tp2dp2": ParallelConfig(tp=2, dp=2, zero_stage=2),
    "zero3dp2": ParallelConfig(dp=2, zero_stage=3),
    "zero3dp3": ParallelConfig(dp=3, zero_stage=3),
    "zero3tp2dp2": ParallelConfig(tp=2, dp=2, zero_stage=3),
    "zero3dp4": ParallelConfig(dp=4, zero_stage=3),
    "hierarchical": ParallelConfig(dp=4, zero_stage=3, zero_shard_size=2),
}
IN_PAIRS = (
    *("pp2 interleaved", "pp2 zb_h1", "pp2 zb_v", "tp2pp2sp", "cp2dp2"),
    *("zero2dp3", "zero2tp2dp2", "zero3dp3", "zero3dp4"),
)
"""Layouts whose pairs of features tests/engine/test_layout_pairs.py covers, or whose schedules
tests/engine/test_schedules.py covers: no run of 50 steps of their own."""
LAYOUT_CASES = [name for name in LAYOUTS if name not in IN_PAIRS]


@dataclass
class Run(verified.Run):
    """Results of training with a layout.

    Attributes:
        working: digests of the copies of every working weight after the last step.
    """

    working: dict[str, set[str]] = field(default_factory=dict)


def scenario_with(**changes: Any) -> Scenario:
    return replace(Scenario(), **changes)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Collective:
    """One collective that the optimizer issued: its kind, its whole buffer, and its number of ranks."""

    name: str
    dtype: str
    numel: int
    ranks: int

    @property
    def received_bytes(self) -> int:
        """Bytes received per rank by a bandwidth-optimal algorithm: n - 1 of n parts; twice that for an all-reduce."""
        size = self.numel * getattr(torch, self.dtype.removeprefix("torch.")).itemsize
        passes = 2 if self.name == "all_reduce" else 1
        return passes * size * (self.ranks - 1) // self.ranks


WHOLE_BUFFER = {
    "all_reduce": 0, "reduce": 0, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 0, "all_to_all_single": 0,
}  # fmt: skip
"""Collectives that are recorded, and the index of the argument that is the buffer of all ranks' parts."""


class CollectiveSpy:
    """Replaces a module's `dist`: records every collective and its whole buffer, and runs it."""

    def __init__(self, inner: Any, seen: list[Collective]) -> None:
        self._inner, self._seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._inner, name)
        if name not in WHOLE_BUFFER:
            return original

        def call(*args: Any, **kwargs: Any) -> Any:
            buffer, ranks = args[WHOLE_BUFFER[name]], dist.get_world_size(kwargs.get("group"))
            self._seen.append(Collective(name, str(buffer.dtype), buffer.numel(), ranks))
            return original(*args, **kwargs)

        return call


@contextmanager
def recorded_collectives(seen: list[Collective], module: Any = megads.engine.bucket) -> Iterator[None]:
    """Records the collectives that a module issues through its name `dist`."""
    inner = module.dist
    module.dist = CollectiveSpy(inner, seen)
    try:
        yield
    finally:
        module.dist = inner


def _working(engine: TrainEngine) -> dict[str, str]:
    """Digest of every working weight, by its name and the rows or columns that this rank holds."""
    found = {}
    engine.replicas()  # waits for all-gathers of weights that the next forward pass would overlap with
    for p in engine.module.parameters():
        place = p.placement
        if p.numel():  # under ZeRO-3 the parameter is empty
            found[f"working/{place.key}/{place.held}"] = digest(p)
    return found


def _rank_train(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None) -> dict[str, Any]:
    if mutate is not None:
        mutate()
    engine = build_engine(scenario, parallel)
    run = train_rank(scenario, engine)
    assert run.reductions or engine.grid.data.size == 1, "the spy saw no gradient"
    return {
        "run": run, "working": _working(engine),
    }  # fmt: skip


def fitted(scenario: Scenario, parallel: ParallelConfig) -> Scenario:
    """The same global batches, in the largest micro-batches that divide them over the layout."""
    sizes = range(scenario.micro_batch_size, 0, -1)
    fitting = next(size for size in sizes if scenario.global_batch_size % (size * parallel.dp) == 0)
    return replace(scenario, micro_batch_size=fitting)


def train_layout(scenario: Scenario, parallel: ParallelConfig, mutate: Callable[[], None] | None = None) -> Run:
    """Trains on gloo ranks and assembles their results."""
    scenario = fitted(scenario, parallel)
    results = run_ranks(_rank_train, parallel.world_size, scenario, parallel, mutate)
    ranks: list[RankRun] = [result["run"] for result in results]
    joined = verified.join(ranks, scenario.model)
    run = Run(**{item.name: getattr(joined, item.name) for item in fields(joined)})
    for result in results:
        for name, value in result["working"].items():
            run.working.setdefault(name, set()).add(value)
    return run


def check_replicas(run: Run, reference: verified.Run) -> list[str]:
    """N8: copies of a tensor, in the optimizer and in the model, are bitwise equal on all ranks that hold it."""
    torn = sorted(name for name, digests in run.working.items() if len(digests) > 1)
    return checks.check_replicas(run, reference) + torn


EVERY_CHECK = (
    check_initial_weights,
    check_first_step,
    check_curve,
    check_replicas,
    check_reduction_dtype,
    check_validation,
)
"""The checks that every layout must pass."""
_REFERENCES: dict[str, verified.Run] = {}


def reference_of(scenario: Scenario) -> verified.Run:
    """Returns the reference of a scenario, whatever operators and engine its layouts use; trains it once a process."""
    key = repr(replace(scenario, ops=OpsConfig(), engine=EngineKind.auto))
    if key not in _REFERENCES:
        _REFERENCES[key] = train_reference(scenario)
    return _REFERENCES[key]


def faults_of(run: Run, scenario: Scenario) -> list[str]:
    """Returns what EVERY_CHECK finds in a run against the reference of its scenario."""
    return [fault for check in EVERY_CHECK for fault in check(run, reference_of(scenario))]
