#!/usr/bin/env python3
"""Benchmark 9: training delay caused by a checkpoint.

The real engine trains a model whose fp32 master weights and moments total --megabytes. In every round each side saves
this same state and the engine takes --steps steps. The delay is the total time minus the same number of median steps
without a save, so that background work which slows the steps is included. Sides alternate, in another order each round;
between them, untimed, everything is flushed to disk and deleted. The limits are a copy of the bytes in memory, which a
save must make before weights may change, and a plain write to the disk with fsync. All values are medians.

megads' save is the hook of a run: with checkpoint.async_save it waits for a copy, otherwise until the checkpoint is on
disk and committed. torch.save does not wait for the disk, `torch.save, fsync` does. DCP is
torch.distributed.checkpoint, which waits, except for async_save, whose work a thread or a separate process does.
DeepSpeed's sides are separate engines, with ZeRO-1 and a state of the same size; their delay is measured on their own
steps. Decoupled, a separate process writes (in Python: the writer with asynchronous I/O needs a GPU's pinned memory),
and the next optimizer step waits for it.

Run from the repository: python -m scripts.bench.checkpoint_stall [--megabytes 1000] [--folder runs/bench]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from megads.checkpoint.async_saves import AsyncSaves
from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.hook import CheckpointHook
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.writer import CheckpointWriter
from megads.engine.deepspeed_adapter import prepare_deepspeed
from megads.engine.interface import TrainEngine
from megads.model.config import ModelConfig
from megads.model.gpt import GPT
from megads.model.model_size import parameter_count
from megads.parallel.config import ParallelConfig
from megads.runtime.environment import child_environment
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter
from scripts.bench.processes import ONE_RANK
from scripts.bench.results import Verdict, add_results_option, against_time, record
from scripts.bench.turns import with_rank_settings
from tests.parity import Scenario, build_engine, step_batches

ROW = 9
ONE_PROCESS = {**ONE_RANK, "MASTER_ADDR": "127.0.0.1"}
"""Environment; DCP's process listens at this address."""
BYTES_A_PARAMETER = 12
"""Size of the state: fp32 master weight and two moments."""
MODEL = ModelConfig(num_layers=1, hidden_size=512, num_heads=8, vocab_size=8192, max_seq_len=16)
COPY_TARGET = 1 / 1.3
"""The training loop is blocked for at most 1.3 copies in memory."""
STEPS_TARGET = 1 / 1.05
"""A save and the steps after it take at most 5% longer than the steps alone."""
CHUNK_BYTES = 2**24
OURS, OURS_WAITS, COPY, WRITE = "megads", "megads, synchronous", "copy in memory", "plain write, fsync"
_CACHED = StagingOptions(
    use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
)
"""Pinned memory and non-blocking copies want a GPU."""
_PROCESS: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
ASYNC: dict[str, tuple[bool, dict[str, Any]]] = {
    "DCP async_save": (False, {}),
    "DCP async_save, cached": (True, {}),
    "DCP async_save, process": (False, _PROCESS),
    "DCP async_save, process, shared": (True, _PROCESS),
}
"""DCP's asynchronous sides: whether the copy is kept for the next save, and options."""
# data_parallel: without it DeepSpeed 0.19.8 uses a rank that it has not set.
_WRITER = {"type": "python", "data_parallel": "replica"}
WRITERS: dict[str, dict[str, Any]] = {
    "DeepSpeed": {},
    "DeepSpeed, its writer": {"checkpoint": {"writer": _WRITER}},
    "DeepSpeed, decoupled": {"checkpoint": {"writer": {**_WRITER, "decoupled": True}}},
}
"""Settings of DeepSpeed's sides."""
PEERS = (OURS_WAITS, "torch.save", "torch.save, fsync", "DCP save", *ASYNC, *WRITERS)


@dataclass(frozen=True)
class Side:
    """A way to save.

    Attributes:
        save: the part for which the training loop waits, given the number of the save.
        settle: waits, untimed, until no background work is left.
        step: step of a side with an engine of its own; None: the side saves the state of the shared engine.
        close: terminates its processes.
    """

    save: Callable[[int], object]
    settle: Callable[[], object] = lambda: None
    step: Callable[[], object] | None = None
    close: Callable[[], object] = lambda: None


def scenario_of(megabytes: int) -> Scenario:
    """Returns a model whose optimizer state has about this many megabytes, and steps of 32 tokens."""
    one, two = (parameter_count(replace(MODEL, num_layers=layers)) for layers in (1, 2))
    layers = max(1, 1 + round((1e6 * megabytes / BYTES_A_PARAMETER - one) / (two - one)))
    return Scenario(
        model=replace(MODEL, num_layers=layers), precision="bfloat16", hot=False, seq_len=16, micro_batch_size=2,
        global_batch_size=2,
    )  # fmt: skip


def megads_side(engine: TrainEngine, folder: Path, writer: CheckpointWriter | None) -> Side:
    """The hook with which `megads train` saves; a new save replaces an older one in progress."""
    state = TrainState()
    about = RunRecord({}, 0, "digest", {}, {})
    config = CheckpointConfig(every_steps=1, keep=1, async_save=writer is not None)
    events = EventWriter(folder)
    background = AsyncSaves(config, writer=writer)
    hook = CheckpointHook(engine, folder, config, about, state, events, background=background)
    hook.on_start(state)

    def save(_: int) -> None:
        state.step = step = engine.optimizer_steps
        hook.on_step(StepInfo(step, 0, 0, 0.0, 0.0, 0.0, 2, 16, 0.0, 0.0, skipped=False, culprit="", batch_hash=""))

    return Side(save, lambda: hook.on_end(state))


def torch_side(tensors: dict[str, Tensor], folder: Path, fsync: bool) -> Side:
    """torch.save to one file."""

    def save(number: int) -> None:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(tensors, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())

    return Side(save)


def async_side(tensors: dict[str, Tensor], folder: Path, **options: Any) -> Side:
    """DCP's async_save, which returns after copying the state."""
    running: list[Any] = []

    def settle() -> None:
        while running:
            running.pop().result()

    return Side(
        lambda number: running.append(dcp.async_save(tensors, checkpoint_id=folder / str(number), **options)), settle
    )


def plain_write(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes the bytes of all tensors one after the other, and calls fsync."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK_BYTES):
                file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the output of DeepSpeed."""
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        yield


def deepspeed_side(scenario: Scenario, folder: Path, settings: dict[str, Any]) -> Side:
    """DeepSpeed's engine with the benchmark's model and one of its checkpoint engines."""
    prepare_deepspeed()
    model = GPT(scenario.model, scenario.seed).to(scenario.dtype)
    config: dict[str, Any] = {
        "train_batch_size": scenario.global_batch_size,
        "train_micro_batch_size_per_gpu": scenario.micro_batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **settings,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=scenario.lr, fused=True)
    with child_environment({"CROSS_RANK": "0", "CROSS_SIZE": "1"}), quiet():
        engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    (batch,) = step_batches(scenario, 0)

    def step() -> None:
        labels_bs = batch.labels_bs
        assert labels_bs is not None
        with quiet():
            logits_bsv = engine(batch.tokens_bs, batch.info)
            engine.backward(nn.functional.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten()))
            engine.step()

    def save(number: int) -> None:
        # Without no_grad its fp32 partitions are not leaves, and torch refuses to pass them to another process.
        with torch.no_grad(), quiet():
            engine.save_checkpoint(str(folder), tag=str(number))

    def close() -> None:
        with quiet():
            getattr(engine.checkpoint_engine, "cleanup", lambda: None)()

    return Side(save, step=step, close=close)


def copy_side(tensors: dict[str, Tensor]) -> Side:
    """A limit: copies the bytes in memory."""
    copies = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}

    def copy(_number: int) -> None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor)

    return Side(copy)


def side_of(name: str, scenario: Scenario, engine: TrainEngine, folder: Path, writer: CheckpointWriter | None) -> Side:
    """Returns a side, which saves in this folder."""
    tensors = {shard.key: shard.tensor for shard in engine.named_shards()}
    if name in (OURS, OURS_WAITS):
        return megads_side(engine, folder, writer if name == OURS else None)
    if name.startswith("torch.save"):
        return torch_side(tensors, folder, fsync=name.endswith("fsync"))
    if name in ASYNC:
        cached, options = ASYNC[name]
        return async_side(tensors, folder, **options, **({"async_stager": DefaultStager(_CACHED)} if cached else {}))
    if name in WRITERS:
        return deepspeed_side(scenario, folder, WRITERS[name])
    if name == COPY:
        return copy_side(tensors)
    if name == WRITE:
        return Side(lambda number: plain_write(tensors, folder / f"{number}.bin"))
    assert name == "DCP save"
    return Side(lambda number: dcp.save(tensors, checkpoint_id=folder / str(number)))  # type: ignore[no-any-return]


def in_turn(sides: dict[str, Side], number: int) -> list[tuple[str, Side]]:
    """Order of a round: each starts with another side, because earlier writes affect a disk for a while."""
    ordered = list(sides.items())
    first = 3 * number % len(ordered)
    return ordered[first:] + ordered[:first]


@contextmanager
def engine_and_writer(scenario: Scenario, threads: int) -> Iterator[tuple[Any, Any]]:
    """The engine of a single rank, and the writer that was forked before it."""
    writer = CheckpointWriter(0, 1)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield build_engine(scenario, ParallelConfig()), writer
    finally:
        dist.destroy_process_group()
        writer.close()


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    begin = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begin)


def measure(
    megabytes: int, folder: Path, rounds: int, threads: int, num_steps: int, names: Sequence[str]
) -> dict[str, Any]:
    """Returns milliseconds of every side by round, on one rank: `save`, the blocking time; `both`, with the steps after
    it; and `step`, a step without a save."""
    scenario = scenario_of(megabytes)
    with engine_and_writer(scenario, threads) as (engine, writer):
        batches, state = step_batches(scenario, 0), sum(shard.tensor.nbytes for shard in engine.named_shards())
        sides = {name: side_of(name, scenario, engine, folder / name, writer) for name in names}

        def step() -> None:
            engine.step(batches, scenario.lr)

        found: dict[str, dict[str, list[float]]] = {name: {"save": [], "both": [], "step": []} for name in sides}
        for number in range(rounds + 1):  # the first does not count
            alone = [timed(step) for _ in range(num_steps)]
            for name, side in in_turn(sides, number):
                (folder / name).mkdir(exist_ok=True)
                its_step = side.step or step
                found[name]["step"] += alone if side.step is None else [timed(its_step) for _ in range(num_steps)]
                begin = time.perf_counter()
                side.save(number + 1)
                saved = time.perf_counter()
                for _ in range(num_steps):
                    its_step()
                found[name]["save"].append(1e3 * (saved - begin))
                found[name]["both"].append(1e3 * (time.perf_counter() - begin))
                side.settle()
                require_saved(name, folder / name, state)
                empty(folder / name)
        for side in sides.values():
            side.close()
    counted = {
        name: {kind: times[len(times) // (rounds + 1) :] for kind, times in of.items()} for name, of in found.items()
    }
    return {"state_bytes": state, "num_steps": num_steps, "step_ms": counted[OURS]["step"], "sides": counted}


def require_saved(name: str, folder: Path, state_bytes: int) -> None:
    """Raises RuntimeError if a side was fast because it saved nothing; DeepSpeed's model has no vocabulary padding."""
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if name != COPY and found < 0.9 * state_bytes:
        raise RuntimeError(f"{name} has saved {found:,} bytes of {state_bytes:,}")


def empty(folder: Path) -> None:
    """Deletes what was saved, after flushing it to disk."""
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    os.sync()


def delays(found: dict[str, Any]) -> dict[str, float]:
    """Median delay of every side in milliseconds; for the limits, which no step waits for, their own time."""
    alone, steps = (COPY, WRITE), found["num_steps"]
    return {
        name: statistics.median(
            times["save"]
            if name in alone
            else [both - steps * statistics.median(times["step"]) for both in times["both"]]
        )
        for name, times in found["sides"].items()
    }


def verdicts_of(found: dict[str, Any]) -> list[Verdict]:
    """Compares blocking time with a copy, and a save with the steps after it with the steps alone and every peer."""
    taken, size = delays(found), f"{found['state_bytes'] / 1e6:,.0f} MB"
    steps = found["num_steps"] * statistics.median(found["step_ms"])
    stall, copy = (statistics.median(found["sides"][name]["save"]) for name in (OURS, COPY))
    work = f"checkpoint of {size} and {found['num_steps']} steps"
    return [
        against_time(ROW, f"wait for a checkpoint of {size}", stall, COPY, copy, COPY_TARGET, limit=True),
        against_time(ROW, work, steps + taken[OURS], "the steps alone", steps, STEPS_TARGET, limit=True),
        *(
            against_time(ROW, work, steps + taken[OURS], name, steps + taken[name], 1.0)
            for name in PEERS
            if name in taken
        ),
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the optimizer state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="training steps after each save")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of the rank; background work has the other cores"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="folder on the disk to measure")
    parser.add_argument("--no-peers", action="store_true", help="measure only megads and the limits")
    add_results_option(parser)
    arguments = parser.parse_args()
    with_rank_settings(arguments.threads, "scripts.bench.checkpoint_stall")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="stall-") as folder, child_environment(ONE_PROCESS):
        where = Path(folder)
        names = [OURS, OURS_WAITS, COPY, WRITE] if arguments.no_peers else [OURS, *PEERS, COPY, WRITE]
        for name in names:
            (where / name).mkdir()
        found = measure(arguments.megabytes, where, arguments.rounds, arguments.threads, arguments.steps, names)
    step, taken = statistics.median(found["step_ms"]), delays(found)
    print(f"{found['state_bytes'] / 1e6:,.0f} MB of state; a step without a save takes {step:,.0f} ms; medians in ms")
    print(f"| side | the loop waits | delay of the next {found['num_steps']} steps |\n|---|---|---|")
    for name, times in found["sides"].items():
        print(f"| {name} | {statistics.median(times['save']):,.0f} | {taken[name]:,.0f} |")
    record(arguments.append, "checkpoint_stall", found, verdicts_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
