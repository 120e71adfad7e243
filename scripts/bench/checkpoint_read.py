#!/usr/bin/env python3
"""checkpoint.read: how much data-parallel replicas read of a checkpoint that all of them need, and how long it takes.

On one node the replicas read one folder and share its page cache. For "nodes", each has its own copy of the checkpoint,
because each node has its own page cache. The pages are dropped before each round ("cold") or are in memory ("warm").
The reader counts bytes of tensors, the kernel bytes from the disk (/proc/self/io), summed over all ranks. Seconds are
those of the slowest rank. All values are medians.

Run from the repository: python -m scripts.bench.checkpoint_read [--ranks 4] [--megabytes 400] [--rounds 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megads.checkpoint.config import CheckpointRead
from megads.checkpoint.read import CheckpointHandle, open_checkpoint
from megads.checkpoint.shared_read import read_shards
from megads.checkpoint.store import save_checkpoint
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from scripts.bench.local_checkpoint import run_at, state_of, zeros_like
from scripts.bench.node_reads import disk_bytes, forget
from scripts.bench.results import add_results_option, record

PLACES, STATES, WAYS = ("one node", "nodes"), ("cold", "warm"), (CheckpointRead.all, CheckpointRead.one)


@dataclass(frozen=True)
class Seen:
    """One rank in one round: bytes of tensors read by all ranks, bytes read from disk by this rank, seconds."""

    read_bytes: int
    disk_bytes: int
    seconds: float


Case = tuple[str, str, str]


def rank_main(rank: int, ranks: int, port: int, folders: list[Path], megabytes: float, rounds: int, queue: Any) -> None:
    """Reads the state repeatedly, in each way per round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    grid = build_grid(ParallelConfig(dp=ranks, zero_stage=0), rank, ranks)
    opened = open_checkpoint(folders[0], grid.control)
    shards, found = zeros_like(state_of(megabytes, 0.0)), defaultdict[Case, list[Seen]](list)
    for _, place, state, how in product(range(rounds), PLACES, STATES, WAYS):
        # Headers are read again, as at a start.
        folder = opened.folder if place == "one node" else folders[rank]
        handle = replace(opened, folder=folder, headers={})
        if state == "cold":
            for path in folder.iterdir():
                forget(path)
        else:
            touch(handle)
        grid.control.barrier()
        before, begin = disk_bytes(), time.perf_counter()
        report = read_shards(handle, shards, grid, how)
        grid.control.barrier()
        found[place, state, how].append(Seen(report.read_bytes, disk_bytes() - before, time.perf_counter() - begin))
        assert all(bool((shard.tensor == 1.0).all()) for shard in shards), "another value"
        for shard in shards:
            shard.tensor.fill_(0.5)
    queue.put(dict(found))
    dist.barrier()


def touch(handle: CheckpointHandle) -> None:
    """Reads a checkpoint into the page cache."""
    for path in handle.folder.iterdir():
        path.read_bytes()


def measure(folder: Path, ranks: int, megabytes: float, rounds: int) -> dict[Case, Seen]:
    """Returns the sums and the slowest rank of each case, as medians over rounds."""
    first = save_checkpoint(folder / "run", state_of(megabytes, 1.0), run_at(1))
    folders = [first, *(folder / f"copy_{rank}" for rank in range(1, ranks))]
    for copy in folders[1:]:
        shutil.copytree(first, copy)
    os.sync()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=rank_main, args=(rank, ranks, port, folders, megabytes, rounds, queue))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        case: Seen(
            found[0][case][0].read_bytes,
            round(statistics.median(sum(of[case][n].disk_bytes for of in found) for n in range(rounds))),
            statistics.median(max(of[case][n].seconds for of in found) for n in range(rounds)),
        )
        for case in found[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel replicas")
    parser.add_argument("--megabytes", type=float, default=400, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder on the disk to read from (default: the temporary folder)")
    add_results_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), options.ranks, options.megabytes, options.rounds)
    print(f"{options.ranks} ranks, {options.megabytes:,.0f} MB of state")
    print(f"{'replicas on':12} {'pages':6} {'read':5} {'MB of tensors':>14} {'MB from disk':>13} {'seconds':>8}")
    figures = {}
    for (place, state, how), seen in found.items():
        tensors_mb, disk_mb = seen.read_bytes / 1e6, seen.disk_bytes / 1e6
        print(f"{place:12} {state:6} {how:5} {tensors_mb:14,.0f} {disk_mb:13,.0f} {seen.seconds:8.2f}")
        figures[f"{place}, {state}, {how}"] = [tensors_mb, disk_mb, seen.seconds]
    record(options.append, "checkpoint_read", {"ranks": options.ranks, "megabytes": options.megabytes, **figures})


if __name__ == "__main__":
    main()
