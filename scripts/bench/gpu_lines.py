"""Result lines of scripts/bench/gpu.sh in bench.jsonl: one per result, appended immediately."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megads.runtime.metrics import JsonLinesWriter, read_json_lines

PREFIX = "gpu_"
"""Prefix of the names of these benchmarks."""

Append = Callable[[Mapping[str, Any]], None]
"""Keeps one result."""
Line = dict[str, Any]


def add_line_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --append and --run."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--append", type=Path, help="file of results, JSON lines")
    parser.add_argument("--run", default="", help="name of the run of gpu.sh to which the results belong")


def appender(arguments: argparse.Namespace, bench: str) -> Append:
    """Returns a function that appends results of one benchmark to the file given on the command line, if any.

    Args:
        arguments: those of `add_line_options`.
        bench: name of the benchmark, beginning with PREFIX.
    """
    assert bench.startswith(PREFIX), bench
    writer = JsonLinesWriter(arguments.append) if arguments.append else None

    def append(result: Mapping[str, Any]) -> None:
        if writer is not None:
            writer.write_line({"bench": bench, "run": arguments.run, "time": time.time(), **result})

    return append


def lines_of_runs(path: Path, runs: int = 1) -> list[Line]:
    """Returns the lines of the last runs in a file, in the order in which they were written.

    Args:
        path: bench.jsonl, possibly with results of other benchmarks.
        runs: number of runs.

    Raises:
        SystemExit: there is no such line.
    """
    lines = [line for line in read_json_lines(path) if str(line.get("bench", "")).startswith(PREFIX)]
    if not lines:
        raise SystemExit(f"{path}: no line of scripts/bench/gpu.sh in it: run that first")
    names = list(dict.fromkeys(line["run"] for line in lines))[-runs:]
    return [line for line in lines if line["run"] in names]
