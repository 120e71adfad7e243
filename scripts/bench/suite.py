#!/usr/bin/env python3
"""Runs the benchmarks of `make bench` one after the other, with the time of each; then shows the table.

    python -m scripts.bench.suite [--quick] [--only train_step] [--append bench.jsonl] [--megatron FOLDER]
    python -m scripts.bench.suite --show [--page docs/notes/benchmarks.md]      the last results, without a run

--quick ends within five minutes on two idle cores: fewer rounds, less data, nothing compiled. Its figures are rough.
On a busy machine use --by processor_ms --threads 1 for compute benchmarks, because wall-clock time is unreliable there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megads.runtime.environment import available_cores
from scripts.bench.results import latest_verdicts, page, summary, table
from scripts.bench.turns import add_judge_option

QUICK_OPERATORS = (
    *("attention", "softmax", "bias_gelu", "gelu", "swiglu", "layer_norm"),
    *("add_layer_norm", "rms_norm", "rotary", "cross_entropy", "linear", "adamw"),
)


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
        module: module of scripts.bench.
        full: arguments of a full run.
        quick: arguments of a quick run.
        judged: accepts --threads and --by.
    """

    module: str
    full: str = ""
    quick: str = ""
    judged: bool = False


PARTS = (
    Part("train_step", quick="--rounds 2 --warm-up 1 --eager-only", judged=True),
    Part("experts", quick="--rounds 2 --warm-up 1 --eager-only", judged=True),
    Part("ops", quick="--rounds 3 --eager-only " + " ".join(f"--only {name}" for name in QUICK_OPERATORS), judged=True),
    Part("startup", quick="--rounds 1 --ranks 1"),
    Part("optimizer_memory", quick="--dp 1 2"),
    Part("checkpoint_stall", quick="--megabytes 100 --rounds 2"),
    Part("local_checkpoint", quick="--megabytes 200 --rounds 3"),
    Part("pipeline", full="--wait-ms 5 --rounds 3", quick="--wait-ms 2 --rounds 1 --micro-batches 4 8"),
    Part("loader", quick="--tokens 3000000 --rounds 5"),
    Part("blend", quick="--documents 200000 --samples 200000 --rounds 3"),
    Part("data_start", quick="--documents 1000000 --tokens 10000000000"),
    Part("many_datasets", quick="--rounds 50 --seq-len 2048"),
    Part("preprocess", quick="--megabytes 4 --repeats 1"),
)


def run(part: Part, quick: bool, more: list[str]) -> tuple[int, float]:
    """Runs a benchmark in a separate process; returns exit code and seconds."""
    command = [
        sys.executable,
        "-m",
        f"scripts.bench.{part.module}",
        *(part.quick if quick else part.full).split(),
        *more,
    ]
    print(f"\n=== {part.module}: {' '.join(command[1:])}", flush=True)
    begin = time.monotonic()
    return subprocess.run(command, check=False).returncode, time.monotonic() - begin


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rough figures within five minutes")
    parser.add_argument("--only", choices=[part.module for part in PARTS], action="append")
    parser.add_argument("--append", type=Path, default=Path("bench.jsonl"), help="file of results")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--page", type=Path, help="page of the docs to write")
    parser.add_argument(
        "--megatron", type=Path, help="folder of an unpacked megatron-core, the peer of the blend benchmark"
    )
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="threads of the training step and operator benchmarks"
    )
    add_judge_option(parser)
    arguments = parser.parse_args()
    judged = ["--threads", str(arguments.threads), "--by", arguments.by]
    ended = {}
    for part in PARTS:
        if not arguments.show and (arguments.only is None or part.module in arguments.only):
            more = ["--append", str(arguments.append), *(judged if part.judged else [])]
            if part.module == "blend" and arguments.megatron:
                more += ["--peer", str(arguments.megatron)]
            ended[part.module] = run(part, arguments.quick, more)
    verdicts = latest_verdicts(arguments.append)
    if not verdicts:
        print(f"{arguments.append} has no results: run `make bench` first", file=sys.stderr)
        return 1
    print(f"\n=== the last figures of every benchmark in {arguments.append}\n\n{table(verdicts)}\n")
    print(summary(verdicts))
    if arguments.page:
        page(arguments.append, arguments.page)
    for name, (code, seconds) in ended.items():
        print(f"{name:<18} {seconds:6.0f} s" + (f"   FAILED with exit code {code}" if code else ""))
    if ended:
        print(f"{'altogether':<18} {sum(seconds for _, seconds in ended.values()):6.0f} s")
    return int(any(code for code, _ in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
