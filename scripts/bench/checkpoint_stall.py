#!/usr/bin/env python3
"""Benchmark 9: by how much a checkpoint delays the training step after it.

The real engine trains a model whose fp32 masters and moments come to --megabytes. In every round each side saves that
same state and the engine takes --steps steps; the delay is the time of all that less so many median steps without a
save, so what goes on in the background and slows the steps counts, too. Sides take turns, in another order each round;
between them, untimed, everything is let go to disk and deleted. Limits are a copy of the bytes in memory, which a save
must make before weights may change, and the disk's plain write with fsync. Medians.

megads' save is the hook of a run: with checkpoint.async_save it waits for a copy, without until the checkpoint is on
disk and committed. torch.save does not wait for the disk, `torch.save, fsync` does; DCP is
torch.distributed.checkpoint, which waits, but for async_save.

Run from the repository: python -m scripts.bench.checkpoint_stall [--megabytes 1000] [--folder runs/bench]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.writer import CheckpointWriter
from megads.engine.interface import TrainEngine
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.plan.model_size import parameter_count
from megads.runtime.environment import exported
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter
from scripts.bench.processes import ONE_RANK
from scripts.bench.results import Verdict, add_results_option, against_time, record
from scripts.bench.turns import with_rank_settings
from tests.parity import Scenario, build_engine, step_batches

ROW = 9
BYTES_A_PARAMETER = 12
"""Of the state: an fp32 master and two moments."""
MODEL = ModelConfig(num_layers=1, hidden_size=512, num_heads=8, vocab_size=8192, max_seq_len=16)
COPY_TARGET = 1 / 1.3
"""A delay of at most 1.3 copies in memory."""
CHUNK_BYTES = 2**24
OURS, OURS_WAITS, COPY, WRITE = "megads", "megads, synchronous", "copy in memory", "plain write, fsync"
PEERS = {
    "torch.save": 1.0,
    "torch.save, fsync": 1.0,
    "DCP save": 1.0,
    "DCP async_save": 1.0,
    "DCP async_save, cached": 1.0,
    OURS_WAITS: 1.0,
}
"""With targets."""


@dataclass(frozen=True)
class Side:
    """Somebody who saves.

    Attributes:
        save: what the loop waits for, given the number of the save.
        settle: waits, untimed, until nothing goes on in the background.
    """

    save: Callable[[int], object]
    settle: Callable[[], object] = lambda: None


def scenario_of(megabytes: int) -> Scenario:
    """A model whose optimizer state has about so many megabytes, and steps of 32 tokens."""
    one, two = (parameter_count(replace(MODEL, num_layers=layers)) for layers in (1, 2))
    layers = max(1, 1 + round((1e6 * megabytes / BYTES_A_PARAMETER - one) / (two - one)))
    return Scenario(
        model=replace(MODEL, num_layers=layers), precision="bfloat16", hot=False, seq_len=16, micro_batch_size=2,
        global_batch_size=2,
    )  # fmt: skip


def megads_side(engine: TrainEngine, folder: Path, writer: CheckpointWriter | None) -> Side:
    """The hook with which `megads train` saves; every save gives way to the next."""
    state = TrainState()
    about = RunRecord({}, 0, "digest", {}, {})
    config = CheckpointConfig(every_steps=1, keep=1, async_save=writer is not None)
    hook = CheckpointHook(engine, folder, config, about, state, EventWriter(folder), writer=writer)
    hook.on_start(state)

    def save(_: int) -> None:
        state.step = step = engine.optimizer_steps
        hook.on_step(StepInfo(step, 0, 0, 0.0, 0.0, 0.0, 2, 16, 0.0, 0.0, skipped=False, culprit="", batch_hash=""))

    return Side(save, lambda: hook.on_end(state))


def torch_side(tensors: dict[str, Tensor], folder: Path, fsync: bool) -> Side:
    """torch.save into one file."""

    def save(number: int) -> None:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(tensors, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())

    return Side(save)


def async_side(tensors: dict[str, Tensor], folder: Path, **options: Any) -> Side:
    """DCP's async_save, which returns once it has copied the state."""
    running: list[Any] = []

    def settle() -> None:
        while running:
            running.pop().result()

    return Side(
        lambda number: running.append(dcp.async_save(tensors, checkpoint_id=folder / str(number), **options)), settle
    )


def plain_write(tensors: dict[str, Tensor], path: Path) -> None:
    """The bytes of all tensors, one after the other, and fsync."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())


def sides_of(engine: TrainEngine, folder: Path, writer: CheckpointWriter) -> dict[str, Side]:
    """Everybody, in the order of their turns; each has a folder of its own."""
    tensors = {shard.key: shard.tensor for shard in engine.named_shards()}
    copies = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}

    # Pinned memory and non-blocking copies want a GPU.
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )

    def copy(_number: int) -> None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor)

    return {
        OURS: megads_side(engine, folder / OURS, writer),
        OURS_WAITS: megads_side(engine, folder / OURS_WAITS, None),
        "torch.save": torch_side(tensors, folder / "torch.save", fsync=False),
        "torch.save, fsync": torch_side(tensors, folder / "torch.save, fsync", fsync=True),
        "DCP save": Side(lambda number: dcp.save(tensors, checkpoint_id=folder / "DCP save" / str(number))),
        "DCP async_save": async_side(tensors, folder / "DCP async_save"),
        "DCP async_save, cached": async_side(tensors, folder / "DCP async_save, cached", async_stager=stager),
        COPY: Side(copy),
        WRITE: Side(lambda number: plain_write(tensors, folder / WRITE / f"{number}.bin")),
    }


def in_turn(sides: dict[str, Side], number: int) -> list[tuple[str, Side]]:
    """The order of a round: each starts elsewhere, as a disk remembers for a while how much it was just given."""
    ordered = list(sides.items())
    first = 3 * number % len(ordered)
    return ordered[first:] + ordered[:first]


def measure(megabytes: int, folder: Path, rounds: int, threads: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of every side by round: `save`, what the loop waits for, and `both`, with the steps; of one rank."""
    writer = CheckpointWriter(0, 1)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    scenario = scenario_of(megabytes)
    engine = build_engine(scenario, ParallelConfig())
    batches = step_batches(scenario, 0)
    sides = sides_of(engine, folder, writer)
    found: dict[str, dict[str, list[float]]] = {name: {"save": [], "both": []} for name in sides}
    steps: list[float] = []
    for number in range(rounds + 1):  # the first does not count
        for _ in range(num_steps):
            begin = time.perf_counter()
            engine.step(batches, scenario.lr)
            steps.append(1e3 * (time.perf_counter() - begin))
        for name, side in in_turn(sides, number):
            (folder / name).mkdir(exist_ok=True)
            begin = time.perf_counter()
            side.save(number + 1)
            saved = time.perf_counter()
            for _ in range(num_steps):
                engine.step(batches, scenario.lr)
            found[name]["save"].append(1e3 * (saved - begin))
            found[name]["both"].append(1e3 * (time.perf_counter() - begin))
            side.settle()
            for leftover in (folder / name).iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            os.sync()
    counted = {name: {kind: times[1:] for kind, times in of.items()} for name, of in found.items()}
    state = sum(shard.tensor.nbytes for shard in engine.named_shards())
    dist.destroy_process_group()
    writer.close()
    return {"state_bytes": state, "num_steps": num_steps, "step_ms": steps[num_steps:], "sides": counted}


def delays(found: dict[str, Any]) -> dict[str, float]:
    """Median delay of every side in milliseconds; of the limits, which nobody waits for in a step, their own time."""
    step = found["num_steps"] * statistics.median(found["step_ms"])
    alone = (COPY, WRITE)
    return {
        name: statistics.median(times["save"] if name in alone else [both - step for both in times["both"]])
        for name, times in found["sides"].items()
    }


def verdicts_of(found: dict[str, Any]) -> list[Verdict]:
    """Against every peer and both limits."""
    taken = delays(found)
    work, ours = f"delay by a checkpoint of {found['state_bytes'] / 1e6:,.0f} MB", taken[OURS]
    return [
        against_time(ROW, work, ours, COPY, taken[COPY], COPY_TARGET, limit=True),
        against_time(ROW, work, ours, WRITE, taken[WRITE], None, limit=True),
        *(against_time(ROW, work, ours, name, taken[name], target) for name, target in PEERS.items()),
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of optimizer state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="after each save")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the rank; what goes on beside it has the other cores"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="on the disk that is meant")
    add_results_option(parser)
    arguments = parser.parse_args()
    with_rank_settings(arguments.threads, "scripts.bench.checkpoint_stall")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="stall-") as folder:
        where = Path(folder)
        for name in (OURS, COPY, WRITE, *PEERS):
            (where / name).mkdir()
        with exported(ONE_RANK):
            found = measure(arguments.megabytes, where, arguments.rounds, arguments.threads, arguments.steps)
    step, taken = statistics.median(found["step_ms"]), delays(found)
    print(f"{found['state_bytes'] / 1e6:,.0f} MB of state; a step without a save takes {step:,.0f} ms; medians in ms")
    print(f"| side | the loop waits | delay of the next {arguments.steps} steps |\n|---|---|---|")
    for name, times in found["sides"].items():
        print(f"| {name} | {statistics.median(times['save']):,.0f} | {taken[name]:,.0f} |")
    record(arguments.append, "checkpoint_stall", found, verdicts_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
