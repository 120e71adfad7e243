"""Sides that take turns in one process with a rank's settings, so that other work on the machine hits all alike."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megads.runtime.environment import rank_variables

COLUMNS = {"fastest_ms": "fastest", "median_ms": "median", "processor_ms": "processor"}
"""What targets may be judged by."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one side in every round: by the clock, and of all threads on the processor.

    Where other work takes most of the machine only the second says much, and only with --threads 1: threads that wait
    for each other count as busy.
    """

    clock: list[float]
    processor: list[float]

    @property
    def summary(self) -> dict[str, float]:
        return {
            "fastest_ms": min(self.clock),
            "median_ms": statistics.median(self.clock),
            "processor_ms": min(self.processor),
        }


def add_judge_option(parser: argparse.ArgumentParser) -> None:
    """Adds --by."""
    parser.add_argument("--by", choices=COLUMNS, default="fastest_ms", help="what targets are judged by")


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Times of every side, after two calls each that warm up."""
    for call in sides.values():
        call()
        call()
    times = {name: Times([], []) for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            call()
            times[name].clock.append(1e3 * (time.perf_counter() - begin))
            times[name].processor.append(1e3 * (time.process_time() - begin_processor))
    return times


def with_rank_settings(threads: int, module: str) -> None:
    """Starts this process anew with the environment of a rank, as glibc reads it at its start only.

    Args:
        threads: of the rank.
        module: what runs, as in python -m.
    """
    variables = rank_variables(threads, cuda=False)
    if any(os.environ.get(name) != value for name, value in variables.items() if name.startswith(("MALLOC", "OMP"))):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | variables)
