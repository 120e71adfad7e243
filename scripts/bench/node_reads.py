#!/usr/bin/env python3
"""Redundant reads of ranks of a node that need the same tokens: bytes from the disk, and time, by number of ranks.

Each rank assembles the same steps from a file with a cold page cache, and again with a warm one. Run from the
repository: python -m scripts.bench.node_reads
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from megads.data.indexed.dataset import IndexedDataset, bin_path
from megads.data.sampling.loader import PLAIN, assemble
from megads.data.sampling.samples import TrainSamples
from scripts.bench.results import add_results_option, record
from scripts.bench.synthetic_dataset import write

VOCAB_SIZE = 32000
SEQ_LEN = 2048
STEP_SAMPLES = 64
STEPS = 40


def disk_bytes() -> int:
    """Bytes that this process has read from disks so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def rank(prefix: str, start: Barrier, results: Any) -> None:
    """Assembles the same steps as every other rank, twice."""
    dataset = IndexedDataset(prefix)
    samples = TrainSamples(dataset, range(dataset.num_documents), SEQ_LEN, 0)
    found = {}
    for state in ("cold", "warm"):
        start.wait()
        before, seconds = disk_bytes(), []
        for step in range(STEPS):
            ids = step * STEP_SAMPLES + np.arange(STEP_SAMPLES).reshape(-1, 4)
            begin = time.perf_counter()
            assemble(samples, ids, VOCAB_SIZE, True, PLAIN)
            seconds.append(time.perf_counter() - begin)
        found[state] = (disk_bytes() - before, statistics.median(seconds))
    results.put(found)


def forget(path: Path) -> None:
    """Evicts a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(prefix: Path, ranks: int) -> dict[str, tuple[float, float]]:
    """Returns (MB read by all ranks together, median ms per step) by the state of the page cache."""
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(ranks), spawn.Queue()
    forget(bin_path(prefix))
    processes = [spawn.Process(target=rank, args=(str(prefix), start, results)) for _ in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {
        state: (sum(of[state][0] for of in found) / 1e6, 1000 * statistics.mean(of[state][1] for of in found))
        for state in ("cold", "warm")
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--folder", help="folder on the disk to measure (default: a temporary folder)")
    add_results_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefix = Path(folder) / "corpus"
        write(prefix, arguments.tokens, VOCAB_SIZE)
        found = {ranks: measure(prefix, ranks) for ranks in (1, 2, 4)}
        size = bin_path(prefix).stat().st_size / 1e6
    wanted = STEPS * STEP_SAMPLES * (SEQ_LEN + 1) * 2 / 1e6
    print(f".bin {size:.1f} MB, of which the steps want {wanted:.1f} MB per rank")
    for ranks, states in found.items():
        for state, (megabytes, milliseconds) in states.items():
            print(f"{ranks} ranks, {state}: {megabytes:6.1f} MB from disk, {milliseconds:6.2f} ms per step and rank")
    record(arguments.append, "node_reads", {"tokens": arguments.tokens, "mb_and_ms": found})


if __name__ == "__main__":
    main()
