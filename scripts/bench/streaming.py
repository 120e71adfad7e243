"""Time of a training step on local files and on the same files in object storage, alternating in one run.

The store is moto's S3 server on this machine, which delays every request and fails some. It reads a whole object for
every range of it, so the data is small. Each round starts with an empty cache that holds half of the data: because a
start reads all of a small file, a cache of all of it would fetch nothing later. Run from the repository:

    python -m scripts.bench.streaming [--rounds 3] [--mb 16] [--delay-ms 50] [--fail 0.01] [--steps 40] [--dp 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from megads.data.indexed.writer import IndexedDatasetWriter
from megads.runtime.metrics import read_json_lines
from scripts.bench.results import add_results_option, against_time, record
from tests.command import small_model
from tests.s3_server import s3_server

ROW = 15
VOCAB_SIZE = 509
FIRST_STEPS = 3
"""Excluded: they wait for the first blocks, and compile."""


def write(prefix: Path, megabytes: int) -> None:
    """Writes a dataset of documents of 100 to 5,000 tokens of two bytes."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        while writer.num_tokens < megabytes * 500_000:
            writer.append(random.integers(0, VOCAB_SIZE, int(random.integers(100, 5001))))


def train(data: str, run_dir: Path, given: argparse.Namespace, variables: dict[str, str]) -> list[dict[str, float]]:
    """Trains once and returns the metrics of the steps that are not excluded."""
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(run_dir.with_name("cache"), ignore_errors=True)
    size = {"model__hidden_size": 96, "train__seq_len": 128, "train__global_batch_size": 16, "data__split": "[1, 0]"}
    stream = {
        "data__stream__cache_dir": run_dir.with_name("cache"),
        "data__stream__block_kib": given.block_kib,
        "data__stream__cache_gib": given.mb / 2000,
    }
    run = {"train__steps": given.steps, "parallel__dp": given.dp, "run__dir": run_dir}
    words = small_model(Path(data), **(size | stream | run), data__train=f"[{{path: '{data}'}}]")
    command = [sys.executable, "-m", "megads.cli.main", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **variables})
    lines = [line for line in read_json_lines(run_dir / "metrics.jsonl") if "loss" in line]
    return lines[FIRST_STEPS:]


def main() -> None:
    """Alternates the two, and prints medians, wait times and counters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=16)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--fail", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--block-kib", type=int, default=16)
    add_results_option(parser)
    given = parser.parse_args()
    step_ms: dict[str, list[float]] = {"local": [], "streamed": []}
    wait_ms: dict[str, list[float]] = {"local": [], "streamed": []}
    counted = {"stream_fetched_bytes": 0.0, "stream_requests": 0.0, "stream_retries": 0.0, "stream_waits": 0.0}
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name) / "s3") as server:
        folder = Path(name)
        write(folder / "data", given.mb)
        for ending in (".bin", ".idx"):
            server.put(f"data{ending}", (folder / f"data{ending}").read_bytes())
        server.order(delay_s=given.delay_ms / 1000, fail=given.fail)
        for number in range(given.rounds):
            sides = {"local": str(folder / "data"), "streamed": f"{server.url}/data"}
            for side in sides if number % 2 == 0 else reversed(sides):
                lines = train(sides[side], folder / "run", given, dict(server.variables))
                step_ms[side].append(1000 * median(line["step_time_s"] for line in lines))
                wait_ms[side].append(1000 * sum(line["data_time_s"] for line in lines) / len(lines))
                for key in counted if side == "streamed" else ():
                    counted[key] += sum(line[key] for line in lines) / given.rounds
    for side, milliseconds in step_ms.items():
        rounds = ", ".join(f"{some:.1f}" for some in milliseconds)
        print(f"{side}: {median(milliseconds):.1f} ms a step ({rounds}), {median(wait_ms[side]):.3f} ms of it for data")
    print("training run without its first steps:", ", ".join(f"{key} {value:,.0f}" for key, value in counted.items()))
    work = f"step on streamed data, {given.delay_ms:g} ms latency, {100 * given.fail:g}% failing, dp{given.dp}"
    verdict = against_time(ROW, work, median(step_ms["streamed"]), "local files", median(step_ms["local"]), None)
    record(given.append, "streaming", {"step_ms": step_ms, "data_ms": wait_ms, **counted}, [verdict])


if __name__ == "__main__":
    main()
