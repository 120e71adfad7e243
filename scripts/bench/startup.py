#!/usr/bin/env python3
"""Benchmark 11: time from `megads train` to the first step against bare imports, and process groups of many ranks.

    python -m scripts.bench.startup                    # both
    python -m scripts.bench.startup --engine deepspeed
    python -m scripts.bench.startup --ranks 64         # groups of tp4 x pp4 x dp4 over gloo

The command and the bare imports alternate; medians. The imports are torch, and with --engine deepspeed also deepspeed,
in one process, or in as many as there are ranks. Groups are created by real gloo ranks, forked from a process that has
imported everything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megads.parallel.config import AXES, EngineKind, ParallelConfig, axis_ranks
from megads.parallel.grid import build_grid
from megads.runtime.metrics import read_json_lines
from scripts.bench.results import add_results_option, against_time, record
from tests.command import small_model
from tests.corpus import write_corpus

IMPORTS = {EngineKind.native: "import torch", EngineKind.deepspeed: "import torch, deepspeed"}
"""What every rank must import, by engine."""
LAYOUTS = {8: (2, 2, 2), 16: (4, 2, 2), 32: (4, 4, 2), 64: (4, 4, 4), 128: (4, 4, 8)}
TIMEOUT_S = 240.0
ROW = 11
ALLOWED_S = 2.0
"""Target: seconds in addition to the imports alone."""


def seconds_to_first_step(folder: Path, corpus: Path, ranks: int, engine: EngineKind) -> float:
    """Starts a run of one step and waits until the step is in metrics.jsonl."""
    run_dir = folder / f"run-{time.monotonic_ns()}"
    overrides = small_model(
        corpus,
        engine=str(engine),
        parallel__dp=ranks,
        train__steps=1,
        train__global_batch_size=16,
        run__dir=str(run_dir),
        checkpoint__load="none",
    )
    begin = time.time()
    command = [sys.executable, "-m", "megads.cli.main", "train", *overrides, "logging.wandb.mode=disabled"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    # The step takes milliseconds; its line has no timestamp, but the event after it has.
    saved = next(line for line in read_json_lines(run_dir / "events.jsonl") if line["event"] == "checkpoint_saved")
    return float(saved["time"]) - begin


def seconds_of_imports(ranks: int, statement: str) -> float:
    """Seconds of an import in this many concurrent processes."""
    begin = time.time()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    started = [subprocess.Popen([sys.executable, "-c", statement], env=environment) for _ in range(ranks)]
    assert [process.wait() for process in started] == [0] * ranks
    return time.time() - begin


def compare_start(rounds: int, sizes: list[int], engine: EngineKind, results: Path | None) -> None:
    """Prints medians and differences, by the number of ranks."""
    with tempfile.TemporaryDirectory() as name:
        corpus = write_corpus(Path(name) / "corpus")
        for ranks in sizes:
            ours, imports = [], []
            for _ in range(rounds):
                imports.append(with_cpu(partial(seconds_of_imports, ranks, IMPORTS[engine])))
                ours.append(with_cpu(partial(seconds_to_first_step, Path(name), corpus, ranks, engine)))
            start, bare = (statistics.median(seconds for seconds, _ in timed) for timed in (ours, imports))
            cpu, bare_cpu = (statistics.median(seconds for _, seconds in timed) for timed in (ours, imports))
            print(
                f"{ranks} ranks: first step after {start:.2f} s, {IMPORTS[engine]} {bare:.2f} s, +{start - bare:.2f} s"
            )
            print(f"    CPU of the whole command {cpu:.2f} s, of the imports {bare_cpu:.2f} s")
            figures = {"ranks": ranks, "start_s": start, "imports_s": bare, "cpu_s": cpu, "imports_cpu_s": bare_cpu}
            work = f"start to first step, engine={engine}, {ranks} rank{'s' if ranks > 1 else ''}"
            allowed_ms = 1e3 * (bare + ALLOWED_S)
            verdict = against_time(ROW, work, 1e3 * start, f"{IMPORTS[engine]} + {ALLOWED_S:.0f} s", allowed_ms, 1.0)
            record(results, "startup", {"engine": str(engine), **figures}, [verdict])


def with_cpu(measure: Callable[[], float]) -> tuple[float, float]:
    """Returns what a measurement returns, and the CPU seconds of the processes that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = measure()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _rank(connection: Connection, rank: int, sizes: tuple[int, int, int], port: int) -> None:
    tp, pp, dp = sizes
    parallel = ParallelConfig(tp=tp, pp=pp, dp=dp)
    world = parallel.world_size
    limit = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False, timeout=limit, wait_for_workers=False)
    times = [time.perf_counter()]

    def lap() -> None:
        dist.barrier()
        times.append(time.perf_counter())

    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    lap()
    for axis in (*AXES, "data"):  # as build_grid once did, each distinct set of lines once
        if axis != "data":
            for line in axis_ranks(axis, parallel):
                if len(line) > 1:
                    dist.new_group(list(line))
    lap()
    build_grid(parallel, rank, world)
    lap()
    dist.new_group(list(range(world)))
    lap()
    connection.send([after - before for before, after in pairwise(times)])
    dist.barrier()
    os._exit(0)


def groups(ranks: int) -> None:
    """Prints how long the creation of the process groups of many ranks takes."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megads.parallel.grid"])
    server = dist.TCPStore("127.0.0.1", 0, ranks + 1, is_master=True, wait_for_workers=False)
    connections, started = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        started.append(context.Process(target=_rank, args=(theirs, rank, LAYOUTS[ranks], server.port), daemon=True))
        started[-1].start()
        theirs.close()
        connections.append(ours)
    laps = [connection.recv() for connection in connections]
    for process in started:
        process.join()
    names = ("world", "every group on all ranks", "own groups only", "a second group of all ranks")
    slowest = {name: round(max(lap[place] for lap in laps), 3) for place, name in enumerate(names)}
    print(f"groups of {ranks} ranks, tp x pp x dp = {LAYOUTS[ranks]}, seconds: {json.dumps(slowest)}")


def main() -> None:
    """Runs the measurements selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="*", choices=LAYOUTS, help="measure only process groups, of this many ranks"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start-ranks", type=int, nargs="*", default=[1, 4], help="ranks of the started runs")
    kinds = [str(kind) for kind in IMPORTS]
    parser.add_argument("--engine", choices=kinds, default=kinds[0], help="engine of the started runs")
    parser.add_argument("--no-groups", action="store_true", help="measure only the start")
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.ranks is None:
        compare_start(arguments.rounds, arguments.start_ranks, EngineKind(arguments.engine), arguments.append)
    for ranks in () if arguments.no_groups else arguments.ranks or (16, 64):
        groups(ranks)


if __name__ == "__main__":
    main()
