"""Sides that alternate in one process with a rank's settings, so that other load on the machine affects all of them."""

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
"""Measures by which targets can be judged."""


@dataclass(frozen=True)
class Times:
    """Wall-clock and CPU milliseconds of one side in every round; CPU time is that of all threads.

    On a busy machine only CPU time is meaningful, and only with --threads 1, because threads that wait for each other
    count as busy.
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
    parser.add_argument("--by", choices=COLUMNS, default="fastest_ms", help="measure by which targets are judged")


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, Times]:
    """Times of every side, after the warmup calls; what a call returns is freed after its time is taken."""
    for call in sides.values():
        for _ in range(warm_up):
            call()
    times = {name: Times([], []) for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            found = call()
            times[name].clock.append(1e3 * (time.perf_counter() - begin))
            times[name].processor.append(1e3 * (time.process_time() - begin_processor))
            del found
    return times


def with_rank_settings(threads: int, module: str) -> None:
    """Restarts this process with the environment of a rank, because glibc reads it only at startup.

    Args:
        threads: threads of the rank.
        module: module to run, as in python -m.
    """
    variables = rank_variables(threads, cuda=False)
    if any(os.environ.get(name) != value for name, value in variables.items() if name.startswith(("MALLOC", "OMP"))):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | variables)
