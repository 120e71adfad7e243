#!/usr/bin/env python3
"""Benchmark 13: time and private memory until a rank has the samples of its first step, by dataset size.

    python -m scripts.bench.data_start --documents 100000000 --tokens 1000000000000 --folder <disk with 13 GB>

The dataset is synthetic: documents of random lengths with a .bin that is one hole. Separate processes start one after
the other: the one that builds the index map, one on a node that has verified nothing yet, and two ranks at once on a
node that has. Memory is what a process cannot share (anonymous, from smaps_rollup), without that of the imports; the
peak is sampled. Pages of mapped files belong to the system, which holds them once for all ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megads.data.config import DataConfig, DatasetConfig
from megads.data.indexed.dataset import HEADER, MAGIC, bin_path, idx_path
from megads.data.sampling.datasets import open_datasets
from megads.data.sampling.loader import PLAIN, assemble
from megads.runtime.environment import node_name
from scripts.bench.results import Verdict, add_results_option, against_time, record

ROW = 13
SEQ_LEN = 2048
STEP_SAMPLES = 64
ALLOWED_S, ALLOWED_MB = 5.0, 200.0
"""Targets of a start without building an index map, at 10^12 tokens."""
CHUNK = 1 << 20
SETTLE_S = 2.5


def fabricate(prefix: Path, documents: int, tokens: int) -> None:
    """Writes an index of documents of all lengths up to twice the mean, and a .bin that is a hole."""
    random, mean = np.random.default_rng(0), tokens // documents
    sizes = np.memmap(f"{prefix}.sizes", "<i4", "w+", shape=(documents,))
    for begin in range(0, documents, CHUNK):
        count = min(CHUNK, documents - begin)
        # In pairs whose sum is twice the mean.
        half = random.integers(1, 2 * mean, -(-count // 2))
        sizes[begin : begin + count] = np.stack((half, 2 * mean - half), 1).reshape(-1)[:count]
    sizes[-1] += tokens - int(sizes.sum(dtype=np.int64))
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
        file.write(sizes.data)
        end = 0
        for begin in range(0, documents, CHUNK):
            ends = end + np.cumsum(sizes[begin : begin + CHUNK], dtype=np.int64)
            file.write((np.concatenate(([end], ends[:-1])) * 2).astype("<i8").data)
            end = int(ends[-1])
        for begin in range(0, documents + 1, CHUNK):
            file.write(np.arange(begin, min(begin + CHUNK, documents + 1), dtype="<i8").data)
    Path(f"{prefix}.sizes").unlink()
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * tokens)


def anonymous_mb() -> float:
    """Memory that this process cannot share, in MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Anonymous"))) * 1024 / 1e6


@contextmanager
def peak_of_memory(found: list[float]) -> Iterator[None]:
    """Appends the peak of `anonymous_mb` in the block, sampled every 20 ms."""
    ended, seen = threading.Event(), [anonymous_mb()]

    def look() -> None:
        while not ended.wait(0.02):
            seen.append(anonymous_mb())

    watcher = threading.Thread(target=look)
    watcher.start()
    yield
    ended.set()
    watcher.join()
    found.append(max(seen))


def start(prefix: str, temporary: str, ready: Any, results: Any) -> None:
    """Runs the start of a rank on its node, concurrently with others."""
    tempfile.tempdir = temporary
    ready.wait()
    results.put(first_samples(prefix)[0])


def first_samples(prefix: str) -> tuple[dict[str, float], set[Path]]:
    """Opens the data and reads the samples of a step, as a rank before its first step; returns its figures, and the
    files that it has mapped."""
    config = DataConfig(train=[DatasetConfig(prefix)], split=[1.0, 0.0])
    before, processor, begin = anonymous_mb(), time.process_time(), time.perf_counter()
    peaks: list[float] = []
    with peak_of_memory(peaks):
        train, _ = open_datasets(config, SEQ_LEN, 0, 1 << 16)
        opened = time.perf_counter()
        ids = np.arange(STEP_SAMPLES).reshape(-1, 4)
        train.sample_keys(ids.reshape(-1))
        assemble(train, ids, 1 << 16, True, PLAIN)
    figures = {
        "start_s": time.perf_counter() - begin,
        "open_s": opened - begin,
        "processor_s": time.process_time() - processor,
        "own_mb": anonymous_mb() - before,
        "peak_mb": peaks[0] - before,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    return figures, mapped_files()


def rank_of_a_job(prefix: str) -> None:
    """Prints one line of JSON: the figures of a rank of a SLURM job, its node, and the messages of the map cache."""
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("megads.data.sampling").addHandler(Said())
    logging.getLogger("megads.data.sampling").setLevel(logging.INFO)
    figures, mapped = first_samples(prefix)
    maps = sorted(str(path) for path in mapped if path.suffix == ".npy")
    print(json.dumps(figures | {"node": node_name(), "said": said, "maps": maps}))


def mapped_files() -> set[Path]:
    """Returns the files that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(words[5]) for words in (line.split(maxsplit=5) for line in lines) if len(words) == 6}


def starts(prefix: Path, temporary: Path, ranks: int) -> list[dict[str, float]]:
    """Figures of this many ranks that start concurrently."""
    temporary.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    results, ready = context.Queue(), context.Barrier(ranks)
    processes = [
        context.Process(target=start, args=(str(prefix), str(temporary), ready, results)) for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def verdicts_of(size: str, figures: dict[str, list[dict[str, float]]]) -> list[Verdict]:
    """Judges the slowest and the largest rank of the starts that build nothing."""
    ranks = figures["later starts"]
    slowest, largest = (max(rank[name] for rank in ranks) for name in ("start_s", "peak_mb"))
    work = f"start of a rank, {size}"
    return [
        against_time(ROW, work, 1e3 * slowest, "the target", 1e3 * ALLOWED_S, 1.0),
        Verdict(
            ROW, f"{work}, its own memory", f"{largest:.0f} MB", "the target", f"{ALLOWED_MB:.0f} MB",
            ALLOWED_MB / max(largest, 0.1), 1.0,
        ),
    ]  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=100_000_000_000)
    parser.add_argument("--folder", help="folder on the disk to measure (default: a temporary folder)")
    parser.add_argument("--rank", metavar="PREFIX", help=argparse.SUPPRESS)
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_of_a_job(arguments.rank)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        prefix = folder / "corpus"
        fabricate(prefix, arguments.documents, arguments.tokens)
        os.sync()
        figures = {}
        for who, node, ranks in (
            ("builds the map", "one", 1), ("later starts", "one", 2), ("first on a node", "other", 1),
        ):  # fmt: skip
            time.sleep(SETTLE_S)  # every process verifies newer files
            figures[who] = starts(prefix, folder / node, ranks)
            print(who, *(json.dumps({key: round(value, 3) for key, value in rank.items()}) for rank in figures[who]))
        maps = sum(path.stat().st_size for path in Path(f"{prefix}.cache").iterdir())
        index = idx_path(prefix).stat().st_size
    size = f"{arguments.tokens:.0e} tokens in {arguments.documents:.0e} documents".replace("e+", "e")
    print(f"{size}: index {index / 1e9:.2f} GB, map {maps / 1e9:.2f} GB")
    described = {"tokens": arguments.tokens, "documents": arguments.documents, "maps_bytes": maps, "starts": figures}
    record(arguments.append, "data_start", described, verdicts_of(size, figures))


if __name__ == "__main__":
    main()
