#!/usr/bin/env python3
"""Local checkpoints: stall of a training step, and time of the next start, per GB of state.

Each round copies the state into memory, waits until the copy is a complete local checkpoint, and lets a new start find,
verify and load it. For comparison: torch.save and torch.load of the same tensors in the same folder in memory, which
have no checksums, and megads' checkpoint on disk with a warm page cache. The limit is a plain copy. Medians.

Run from the repository: python -m scripts.bench.local_checkpoint [--megabytes 1000] [--rounds 5] [--memory /dev/shm]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.local_saves import LocalSaves
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import Shard
from megads.runtime.distributed import ALONE
from megads.runtime.environment import RankEnvironment
from scripts.bench.results import add_results_option, against_time, record

ROW = 9
COPY_TARGET = 1 / 1.3
"""A step is blocked for at most 1.3 copies."""
RESTART_TARGET_MS_PER_GB = 1000.0
_TENSOR_ELEMENTS = 10**6


def state_of(megabytes: float, value: float) -> list[Shard]:
    """Returns fp32 tensors of 4 MB each, of this total size."""
    count, side = max(1, round(megabytes / 4)), 1000
    shape = (_TENSOR_ELEMENTS // side, side)
    return [Shard(f"weight/{n}", shape, (0, 0), torch.full(shape, value)) for n in range(count)]


def zeros_like(state: list[Shard]) -> list[Shard]:
    """Resident memory to read a state into."""
    return [replace(shard, tensor=torch.zeros_like(shard.tensor).fill_(0.5)) for shard in state]


def run_at(step: int) -> RunRecord:
    """Run information for a manifest; the state belongs to no model."""
    return RunRecord({"step": step, "samples": step, "tokens": step}, step, "", {}, {"tp": 1, "pp": 1, "dp": 1})


def timed_ms(action: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    begin = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begin)


class LocalRounds:
    """Consecutive starts, each of which saves once and is found by the next."""

    def __init__(self, run_dir: Path, memory: Path, state: list[Shard]) -> None:
        self._run_dir, self._state, self._start = run_dir, state, 0
        self._config = CheckpointConfig(local_every_steps=1, local_folder=str(memory))

    def round(self) -> dict[str, float]:
        """Milliseconds of the copy, of its asynchronous completion, and of the two parts of the next start."""
        with closing(self._begin()) as saves:
            saves.find()
            reason = saves.allocate(self._state, self._state, free_bytes=2**62)
            if reason:
                raise RuntimeError(reason)
            run = run_at(self._start)

            def copy() -> None:
                saves.copy(self._state, run, 0, None, lambda _image: None).copied.result()

            copy_ms = timed_ms(copy)
            complete_ms = timed_ms(saves.wait)
        with closing(self._begin()) as saves:
            find_ms = timed_ms(saves.find)
            assert saves.base is not None and saves.base.state == run.state
            found = saves.base
            into = zeros_like(self._state)
            load_ms = timed_ms(lambda: read_into(found, into))
        return {"copy": copy_ms, "complete": complete_ms, "find and verify": find_ms, "load": load_ms}

    def _begin(self) -> LocalSaves:
        self._start += 1
        saves = LocalSaves(self._config, RankEnvironment(lease=self._start), "benchmark", timeout_s=600.0)
        saves.open(self._run_dir, ALONE)
        return saves

    def end(self) -> None:
        """Frees the memory."""
        self._begin().end()


def measure(folder: Path, memory: Path, megabytes: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of all measurements."""
    found: dict[str, list[float]] = defaultdict(list)
    state = state_of(megabytes, 1.0)
    ours, tensors, saved = LocalRounds(folder, memory, state), memory / "tensors.pt", folder / "on_disk"
    saved.mkdir()
    save_checkpoint(saved, state, run_at(1))

    def copy(into: list[Shard]) -> None:
        for shard, to in zip(state, into, strict=True):
            to.tensor.copy_(shard.tensor)

    def from_disk(into: list[Shard]) -> None:
        handle = find_checkpoint(saved, "auto")
        assert handle is not None
        read_into(handle, into)

    def from_tensors(into: list[Shard]) -> None:
        for shard, tensor in zip(into, torch.load(tensors), strict=True):
            shard.tensor.copy_(tensor)

    try:
        for _ in range(rounds):
            for name, milliseconds in ours.round().items():
                found[name].append(milliseconds)
            other = zeros_like(state)
            found["plain copy"].append(timed_ms(partial(copy, other)))
            found["torch.save"].append(timed_ms(lambda: torch.save([shard.tensor for shard in state], tensors)))
            found["torch.load"].append(timed_ms(partial(from_tensors, other)))
            found["from disk"].append(timed_ms(partial(from_disk, other)))
    finally:
        ours.end()
        tensors.unlink(missing_ok=True)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory")
    add_results_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=options.memory) as memory:
        found = measure(Path(folder), Path(memory), options.megabytes, options.rounds)
    for name, milliseconds in found.items():
        print(f"{name:16} {milliseconds:8.1f} ms")
    work, restart = f"{options.megabytes:,.0f} MB, local checkpoint", found["find and verify"] + found["load"]
    limit_ms, wait = RESTART_TARGET_MS_PER_GB * options.megabytes / 1000, f"{work}: a step waits"
    verdicts = [
        against_time(ROW, wait, found["copy"], "copy in memory", found["plain copy"], COPY_TARGET, limit=True),
        against_time(ROW, wait, found["copy"], "torch.save in memory", found["torch.save"], 1.0),
        against_time(ROW, f"{work}: the next start", restart, "1 s a GB", limit_ms, 1.0),
        against_time(ROW, f"{work}: the next start", restart, "torch.load in memory", found["torch.load"], None),
        against_time(ROW, f"{work}: the next start", restart, "from a disk's cache", found["from disk"], None),
    ]
    record(options.append, "local_checkpoint", {"megabytes": options.megabytes, **found}, verdicts)


if __name__ == "__main__":
    main()
