#!/usr/bin/env python3
"""Benchmark 16: the table that decides the default engine: engine=native, engine=deepspeed and stock DeepSpeed.

All run on gloo ranks of this CPU, one thread each, one after the other in the same process group. Stock DeepSpeed is
its own example of a pipeline with megads' layers (tests/stock_deepspeed.py): untied, with pipeline or data parallelism.

- Step times: blocks sleep instead of computing (scripts.bench.pipeline), fp32, so that other work on the machine hardly
  changes them; CPU time is what the engine itself computes.
- Memory and traffic (scripts.bench.optimizer_memory): bf16, ZeRO-1. Every collective of a step is counted.
- Resume: save, load into a new engine with other weights, next step; all bits of its loss, norm and state are compared.

Run from the repository: python -m scripts.bench.engines
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megads.checkpoint.read import CheckpointHandle, find_checkpoint, read_into
from megads.engine.interface import Shard
from megads.parallel.config import EngineKind, ParallelConfig
from megads.runtime.distributed import open_control_plane
from megads.tools.verify.layout import CollectiveObserver, rank_batches
from scripts.bench import optimizer_memory, pipeline
from scripts.bench.processes import ONE_RANK
from scripts.bench.results import Verdict, add_results_option, record
from scripts.bench.startup import IMPORTS, seconds_of_imports, with_cpu
from tests import distributed
from tests.distributed import run_ranks
from tests.engine.test_reshard_matrix import TRAINED_STEPS, next_step, save
from tests.parity import Collective, Scenario, build_engine, pieces, step_batches
from tests.stock_deepspeed import build_stock

ROW = 16
NOT_SLOWER = 0.97
"""Medians of step times that differ by less than this count as equal: repeated runs differ as much."""
SMALL_BUCKET = 2**21
"""Elements of a bucket with which the model has several; megads' default is larger than the model."""
NAMES = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "_allgather_base_": "all_gather_into_tensor",
}
"""Names of operations of c10d in torch.distributed."""
BUILD = """
from pathlib import Path
import torch.distributed as dist
from megads.parallel.config import EngineKind, ParallelConfig
from megads.tools.verify.layout import build_engine
from megads.tools.verify.scenario import Scenario
dist.init_process_group("gloo")
engine = build_engine(Scenario(precision="bfloat16", engine=EngineKind.{side}), ParallelConfig())
lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
print(sum(int(line[1]) for line in lines if line[0] in ("Private_Dirty:", "Private_Clean:")))
"""
"""Builds an engine in a new process and prints its private memory in KiB; this module would import both engines."""


class Side(StrEnum):
    """What is compared."""

    native = "native"
    deepspeed = "deepspeed"
    stock = "stock DeepSpeed"


OURS = (Side.native, Side.deepspeed)
MODULES = {
    Side.native: "import megads.engine.native_engine",
    Side.deepspeed: "import megads.engine.deepspeed_engine",
    Side.stock: "import torch, deepspeed.runtime.pipe.engine",
}


def build(side: Side, scenario: Scenario, parallel: ParallelConfig) -> Any:
    """Builds an engine; collective."""
    if side is Side.stock:
        return build_stock(scenario, parallel)
    return build_engine(replace(scenario, engine=EngineKind(side)), parallel)


def train_step(side: Side, engine: Any, scenario: Scenario, parallel: ParallelConfig, number: int) -> None:
    """Runs a step; collective."""
    if side is Side.stock:
        data_rank = dist.get_rank() % parallel.dp
        engine.train(step_batches(scenario, number, data_rank, parallel.dp))
    else:
        engine.step(rank_batches(scenario, number, engine.grid), scenario.lr)


def step_times(counts: list[int], rounds: int, wait_s: float) -> pipeline.Found:
    """Times steps of all sides in 1F1B with blocks that sleep; collective."""
    model, engines = pipeline.WAITING, dict[tuple[str, EngineKind], Any]()
    pipeline.wait_in_blocks(wait_s)

    def sides_of(count: int) -> dict[str, pipeline.Step]:
        sides: dict[str, pipeline.Step] = {}
        for side in OURS:
            sides[side] = pipeline.our_step(model, "1f1b", count, engines, EngineKind(side))
        sides[Side.stock] = pipeline.stock_step(model, count)
        return sides

    return pipeline.in_turns(sides_of, model, counts, rounds, wait_s)


def memory(parallel: ParallelConfig, *, tied: bool) -> dict[Side, tuple[float, float]]:
    """Peak bytes, and bytes between steps, per parameter that this rank holds, by side; collective."""
    found = {}
    for side in OURS if tied else Side:
        kind = EngineKind.native if side is Side.stock else EngineKind(side)
        scenario = optimizer_memory.scenario_of(parallel.dp, kind, tied=tied)
        train = optimizer_memory.train_stock if side is Side.stock else optimizer_memory.train_ours
        train(scenario, parallel)  # initializes everything that is loaded at first use
        found[side] = optimizer_memory.memory_of(partial(train, scenario, parallel))
    return found


class Traffic(CollectiveObserver):
    """Counts the bytes that this rank receives in collectives, and notes when gradient reductions start.

    Attributes:
        received: received bytes by dtype, of an algorithm that is optimal in bandwidth.
        reductions: times at which reductions of more than one element started, time.perf_counter().
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, int] = {}
        self.reductions: list[float] = []

    def note(self, name: str, ranks: set[int], tensors: list[Tensor]) -> None:
        """See CollectiveObserver."""
        kind = NAMES.get(name.partition(".")[0])
        if kind is None or len(ranks) < 2:
            return
        whole = max(tensors, key=Tensor.numel)
        dtype = str(whole.dtype).removeprefix("torch.")
        received = Collective(kind, str(whole.dtype), whole.numel(), len(ranks)).received_bytes
        self.received[dtype] = self.received.get(dtype, 0) + received
        if kind != "all_gather_into_tensor" and whole.numel() > 1:
            self.reductions.append(time.perf_counter())


@contextmanager
def backward_passes(seen: list[tuple[float, float]]) -> Iterator[None]:
    """Records start and end of every backward pass, time.perf_counter()."""
    original = torch.autograd.backward

    def call(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        original(*args, **kwargs)
        seen.append((begin, time.perf_counter()))

    torch.autograd.backward = call
    try:
        yield
    finally:
        torch.autograd.backward = original


class Communication(NamedTuple):
    """Collectives of a step of one rank.

    Attributes:
        received: received bytes per parameter by dtype.
        first_start: start of the first gradient reduction as a share of the last backward pass; above 1 it starts when
            the pass has ended.
    """

    received: dict[str, float]
    first_start: float


def communication(parallel: ParallelConfig) -> dict[Side, Communication]:
    """Observes the second step of every side; collective."""
    found, scenario = {}, optimizer_memory.scenario_of(parallel.dp)
    for side in Side:
        engine, traffic, passes = build(side, scenario, parallel), Traffic(), list[tuple[float, float]]()
        train_step(side, engine, scenario, parallel, 0)
        with traffic, backward_passes(passes):
            train_step(side, engine, scenario, parallel, 1)
        parameters = sum(parameter.numel() for parameter in engine.module.parameters())
        begin, end = passes[-1]
        received = {dtype: count / parameters for dtype, count in sorted(traffic.received.items())}
        first = min(moment for moment in traffic.reductions if moment > begin)
        found[side] = Communication(received, (first - begin) / (end - begin))
    return found


class State(NamedTuple):
    """A step after a checkpoint: its loss and gradient norm, and a digest of this rank's state after it."""

    loss: float
    grad_norm: float
    digest: str


def state_after(engine: Any, scenario: Scenario) -> State:
    """Runs the step after the checkpoint."""
    step = next_step(engine, scenario, TRAINED_STEPS)
    digest = hashlib.sha256()
    for part in pieces(engine.named_shards(owned=False)):
        digest.update(repr(part[:3]).encode() + part.values.tobytes())
    return State(step.loss, step.grad_norm, digest.hexdigest())


def resumed(scenario: Scenario, parallel: ParallelConfig, folder: Path) -> dict[tuple[Side, Side], tuple[State, State]]:
    """Saves with each of megads' engines and continues with each; returns the uninterrupted and the resumed step."""
    found = {}
    for first in OURS:
        mine = replace(scenario, engine=EngineKind(first))
        engine = build_engine(mine, parallel)
        for number in range(TRAINED_STEPS):
            next_step(engine, mine, number)
        save(engine, folder / first, parallel)
        expected = state_after(engine, mine)
        for then in OURS:
            theirs = replace(scenario, engine=EngineKind(then), seed=scenario.seed + 1)
            engine = build_engine(theirs, parallel)
            handle = find_checkpoint(folder / first, "auto", open_control_plane())
            assert handle is not None
            engine.load_shards(partial(_fill, handle, engine.grid.rank), handle.optimizer_steps)
            found[first, then] = expected, state_after(engine, theirs)
    return found


def _fill(handle: CheckpointHandle, rank: int, shards: list[Shard]) -> None:
    read_into(handle, shards, rank)


def stock_resumes(scenario: Scenario, parallel: ParallelConfig, folder: Path) -> bool:
    """Whether stock DeepSpeed continues bit for bit from a checkpoint of its own, on this rank."""

    def after(engine: Any) -> tuple[float, list[Tensor]]:
        train_step(Side.stock, engine, scenario, parallel, TRAINED_STEPS)
        loss = 0.0 if engine.total_loss is None else float(engine.total_loss)
        masters = [master.detach().clone() for master in engine.optimizer.fp32_groups_flat_partition]
        return loss, masters

    engine = build_stock(scenario, parallel)
    for number in range(TRAINED_STEPS):
        train_step(Side.stock, engine, scenario, parallel, number)
    engine.save_checkpoint(str(folder), tag="saved")
    loss, masters = after(engine)
    fresh = build_stock(replace(scenario, seed=scenario.seed + 1), parallel)
    fresh.load_checkpoint(str(folder), tag="saved")
    again, loaded = after(fresh)
    return loss == again and all(torch.equal(a, b) for a, b in zip(masters, loaded, strict=True))


def groups_opened(side: Side, parallel: ParallelConfig) -> int:
    """Process groups that this rank joins while it builds an engine, in a new process; collective."""
    world = dist.distributed_c10d._world
    before = len(world.pg_map)
    build(side, pipeline.scenario_of(pipeline.WAITING, 4), parallel)
    return len(world.pg_map) - before


def build_seconds(parallel: ParallelConfig, rounds: int) -> dict[Side, tuple[float, float]]:
    """Median seconds, and CPU seconds, until an engine is built, by side, without the first time; collective."""
    scenario = pipeline.scenario_of(pipeline.WAITING, 4)
    taken: dict[Side, list[tuple[float, float]]] = {}
    for _ in range(rounds + 1):
        for side in Side:
            taken.setdefault(side, []).append(pipeline.time_s(partial(build, side, scenario, parallel)))
    found = {}
    for side, times in taken.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
        found[side] = wall, cpu
    return found


def import_seconds(rounds: int) -> dict[str, float]:
    """Median CPU seconds of a new process that imports a side, by side, and of one that imports torch."""
    statements: dict[str, str] = {"torch": IMPORTS[EngineKind.native]} | {str(side): of for side, of in MODULES.items()}
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, statement in statements.items():
            taken.setdefault(name, []).append(with_cpu(partial(seconds_of_imports, 1, statement))[1])
    return {name: statistics.median(of) for name, of in taken.items()}


def first_build(rounds: int) -> dict[Side, tuple[float, float]]:
    """Median CPU seconds of a new process that builds an engine of one rank, and its private MiB; megads' engines."""
    variables = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **ONE_RANK}
    kilobytes: dict[Side, list[int]] = {}

    def build_in_a_process(side: Side) -> float:
        program = BUILD.format(side=side)
        environment = os.environ | variables | {"MASTER_PORT": str(distributed.free_port())}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        kilobytes.setdefault(side, []).append(int(done.stdout.splitlines()[-1]))
        return 0.0

    taken: dict[Side, list[float]] = {}
    for _ in range(rounds):
        for side in OURS:
            taken.setdefault(side, []).append(with_cpu(partial(build_in_a_process, side))[1])
    return {side: (statistics.median(taken[side]), statistics.median(kilobytes[side]) / 2**10) for side in OURS}


@dataclass
class Table:
    """Rows of the table, and the figures and verdicts that are recorded."""

    rows: list[tuple[str, dict[Side, str]]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def add(self, row: str, figures: Mapping[Side, Any], shown: Callable[[Any], str]) -> None:
        """Adds a row and prints it; a side that cannot do the work has no figure."""
        self.rows.append((row, {side: shown(figure) for side, figure in figures.items()}))
        self.figures[row] = dict(figures)
        cells = [self.rows[-1][1].get(side, "-") for side in Side]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)

    def begin(self) -> None:
        """Prints the head."""
        print("| | " + " | ".join(("native", "deepspeed", "stock DeepSpeed")) + " |\n|---|" + "---|" * len(Side))


def add_step_times(table: Table, sizes: list[int], counts: list[int], rounds: int, wait_s: float) -> None:
    """Rows of step times, and the verdicts: native against both others, and engine=deepspeed against stock."""
    for ranks in sizes:
        found = run_ranks(step_times, ranks, counts, rounds, wait_s)[0]
        for count in counts:
            over = {side: [taken.over_ideal for taken in found[side, count]] for side in Side}
            work = f"step time over 1F1B's formula, pp {ranks}, m = {count}"
            medians = {side: (statistics.median(of_side), min(of_side)) for side, of_side in over.items()}
            table.add(f"{work}: median (least)", medians, lambda pair: f"{pair[0]:.3f} ({pair[1]:.3f})")
            for ours, theirs in (
                (Side.native, Side.deepspeed),
                (Side.native, Side.stock),
                (Side.deepspeed, Side.stock),
            ):
                mine, other = medians[ours][0], medians[theirs][0]
                against = "engine=deepspeed" if theirs is Side.deepspeed else theirs
                table.verdicts.append(
                    Verdict(
                        ROW, f"{work}, engine={ours}", f"{mine:.3f} x", against, f"{other:.3f} x", other / mine,
                        NOT_SLOWER,
                    )
                )  # fmt: skip
        busy = {side: statistics.median(taken.cpu_s for taken in found[side, counts[-1]]) for side in Side}
        row = f"CPU ms of rank 0 per micro-batch, pp {ranks}, m = {counts[-1]}"
        table.add(row, {side: 1e3 * busy[side] / counts[-1] for side in Side}, "{:.2f}".format)


def add_memory_and_traffic(table: Table, sizes: list[int]) -> None:
    """Rows of memory, of bytes communicated, and of the overlap with the backward pass."""
    kept, peaks = dict[str, dict[Side, float]](), dict[str, dict[Side, float]]()
    for parallel, tied in [(ParallelConfig(dp=dp), False) for dp in sizes] + [(ParallelConfig(pp=2), True)]:
        ranks = run_ranks(partial(memory, tied=tied), parallel.world_size, parallel)
        name = f"pp {parallel.pp}, tied" if tied else f"dp {parallel.dp}"
        peaks[name], kept[name] = ({side: max(rank[side][i] for rank in ranks) for side in ranks[0]} for i in range(2))
    for name, of_side in kept.items():
        table.add(f"bytes per parameter between steps, {name}", of_side, "{:.2f}".format)
    for name, of_side in peaks.items():
        table.add(f"peak bytes per parameter, {name}", of_side, "{:.2f}".format)
    for dp in sizes:
        observed = run_ranks(communication, dp, ParallelConfig(dp=dp, bucket_elements=SMALL_BUCKET))
        received = {side: found.received for side, found in observed[0].items()}
        table.add(f"bytes received per parameter and step, dp {dp}", received, shown_traffic)
        starts = {side: max(rank[side].first_start for rank in observed) for side in Side}
        table.add(f"gradients are reduced during the last backward pass, dp {dp}", starts, shown_start)


def shown_traffic(received: dict[str, float]) -> str:
    """Bytes by dtype; amounts below a thousandth of a byte are flags and norms."""
    return ", ".join(f"{dtype} {count:.2f}" for dtype, count in received.items() if count > 1e-3)


def shown_start(share: float) -> str:
    """When the first reduction starts."""
    return f"yes, from {share:.0%} of it" if share < 1 else "no"


def add_resume(table: Table) -> None:
    """Rows of the step after a resume, in the same and in the other engine."""
    scenario = Scenario(precision="bfloat16", steps=TRAINED_STEPS, masked=True, micro_batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        parallel = ParallelConfig(pp=2, dp=2)
        ranks = run_ranks(resumed, parallel.world_size, scenario, parallel, Path(folder) / "ours")
        untied = replace(scenario, model=replace(scenario.model, tie_embeddings=False))
        pipeline_alone = ParallelConfig(pp=2)
        stock = run_ranks(stock_resumes, 2, untied, pipeline_alone, Path(folder) / "stock")
    same = {side: all(found[side, side][0] == found[side, side][1] for found in ranks) for side in OURS}
    row = "the step after a resume has the same bits, bf16, pp 2 dp 2 (stock: pp 2)"
    table.add(row, {**same, Side.stock: all(stock)}, lambda equal: "yes" if equal else "no")
    others = {Side.native: Side.deepspeed, Side.deepspeed: Side.native}
    off = {side: [difference(*rank[others[side], side]) for rank in ranks] for side in OURS}
    row = "loss and gradient norm after a checkpoint of the other engine are off by"
    table.add(row, {side: tuple(map(max, zip(*off[side], strict=True))) for side in OURS}, shown_difference)


def difference(expected: State, found: State) -> tuple[float, float]:
    """Relative differences of loss and gradient norm."""
    return abs(found.loss / expected.loss - 1), abs(found.grad_norm / expected.grad_norm - 1)


def shown_difference(off: tuple[float, ...]) -> str:
    """Relative differences in two digits."""
    return ", ".join("0" if part == 0 else f"{part:.1e}" for part in off)


def add_start(table: Table, rounds: int) -> None:
    """Rows of imports, of building an engine and of process groups."""
    imports = import_seconds(rounds)
    row = f"CPU seconds of importing it (torch alone: {imports['torch']:.2f})"
    table.add(row, {side: imports[side] for side in Side}, "{:.2f}".format)
    first = first_build(rounds)
    table.add("CPU seconds of a new process that builds it", {side: first[side][0] for side in OURS}, "{:.2f}".format)
    table.add("private MiB of that process", {side: first[side][1] for side in OURS}, "{:.0f}".format)
    built = run_ranks(build_seconds, 2, ParallelConfig(pp=2), rounds)[0]
    shown = partial(str.format, "{0[0]:.3f} ({0[1]:.3f})")
    table.add("seconds until another is built, pp 2 (of CPU)", built, shown)
    for parallel, sides in ((ParallelConfig(pp=2), Side), (ParallelConfig(pp=2, dp=2), OURS)):
        groups = {side: max(run_ranks(groups_opened, parallel.world_size, side, parallel)) for side in sides}
        name = f"pp {parallel.pp}" + (f" dp {parallel.dp}" if parallel.dp > 1 else "")
        table.add(f"process groups of a rank, {name}", groups, str)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="*", default=[2, 4], help="pipeline ranks of the step times")
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--dp", type=int, nargs="*", default=[2, 4], help="data-parallel ranks of memory and traffic")
    parser.add_argument("--rounds", type=int, default=5, help="of everything that is timed")
    parser.add_argument("--wait-ms", type=float, default=20.0, help="milliseconds for which blocks sleep")
    parser.add_argument("--quick", action="store_true", help="the smallest of everything, once")
    add_results_option(parser)
    arguments = parser.parse_args()
    distributed.TIMEOUT_S = 3600.0
    table = Table()
    if arguments.quick:
        measure(table, [2], [4], [2], 1, 2.0)
    else:
        a = arguments
        measure(table, a.pp, a.micro_batches, a.dp, a.rounds, a.wait_ms)
    print(f"load average {os.getloadavg()[0]:.1f}")
    record(arguments.append, "engines", {"rows": table.figures}, table.verdicts)
    return 0


def measure(table: Table, pp: list[int], counts: list[int], dp: list[int], rounds: int, wait_ms: float) -> None:
    """Fills the table."""
    table.begin()
    add_step_times(table, pp, counts, rounds, wait_ms / 1e3)
    add_memory_and_traffic(table, dp)
    add_resume(table)
    add_start(table, rounds)


if __name__ == "__main__":
    raise SystemExit(main())
