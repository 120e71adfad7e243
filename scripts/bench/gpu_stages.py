#!/usr/bin/env python3
"""Runs what scripts/bench/gpu.sh asks for, within a budget of time, and prints the table of it last.

    scripts/bench/gpu.sh [--stage kernels|attention|train|resume|tests|layouts|all ...] [key=value ...]

Every item is a process that appends its results to bench.jsonl as they come, so that nothing is lost when the time is
over, or one of them dies. The most valuable go first; what no longer fits is said as not run. Exit 1: something failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import psutil

from megads.runtime.environment import available_cores, rank_variables
from scripts.bench.gpu_items import NEEDS, STAGES, Item, chosen, command, items
from scripts.bench.gpu_lines import Append, appender, lines_of_runs
from scripts.bench.gpu_table import table

RESERVE_S = 6.0
"""Kept for ending the last item and for the table."""
SAID = 12
"""Lines of a failed item's output that are shown."""


class Clock:
    """How much of the budget is left.

    Args:
        budget_s: of the whole run.
        spent_s: before this process began to count.
    """

    def __init__(self, budget_s: float, spent_s: float) -> None:
        self._begin = time.monotonic() - spent_s
        self._budget_s = budget_s

    @property
    def spent_s(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """For items."""
        return self._budget_s - RESERVE_S - self.spent_s


class Runner:
    """Runs items one after the other.

    Args:
        arguments: of the command line.
        clock: of the budget.
    """

    def __init__(self, arguments: argparse.Namespace, clock: Clock) -> None:
        self.arguments, self.clock = arguments, clock
        self.append: Append = appender(arguments, "gpu_item")
        self.logs = arguments.work / "logs" / arguments.run
        self.logs.mkdir(parents=True, exist_ok=True)
        self.failed = False

    def run(self, item: Item) -> None:
        """Runs one, or says why not."""
        begin = time.monotonic()
        if item.devices > 1 and item.devices > self.devices:
            outcome, reason = "not run", f"{NEEDS} {item.devices} GPUs"
        elif self.clock.left_s < item.least_s:
            outcome, reason = "not run", "no time left"
        else:
            outcome, reason = self._wait_for(item)
        seconds = time.monotonic() - begin
        self.failed |= outcome == "failed"
        self.append({"stage": item.stage, "name": item.name, "outcome": outcome, "reason": reason, "seconds": seconds})
        why = f" ({reason})" if reason else ""
        print(f"[{self.clock.spent_s:4.0f} s] {item.stage}: {item.name}: {outcome}{why}, {seconds:.0f} s", flush=True)

    @property
    def devices(self) -> int:
        """GPUs here, as the first item found: this process must not take memory of one. A CPU has ranks as it likes."""
        if self.arguments.device == "cpu":
            return sys.maxsize
        lines = lines_of_runs(self.arguments.append)
        return max((line["devices"] for line in lines if line["bench"] == "gpu_device"), default=1)

    def _wait_for(self, item: Item) -> tuple[str, str]:
        log = self.logs / f"{item.stage}_{item.name}.txt".replace(" ", "_").replace("/", "_")
        limit_s = min(item.most_s, self.clock.left_s)
        line = command(item, self.arguments.device, self.arguments.append, self.arguments.run)
        cuda = self.arguments.device == "cuda"
        # Tiny tensors on a busy machine: threads would wait for each other.
        variables = rank_variables(available_cores() if cuda else 1, cuda)
        with log.open("wb") as said:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=os.environ | variables
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return "ended for lack of time", f"after {limit_s:.0f} s"
            finally:
                end_tree(process)
        if code == 0:
            return "done", ""
        last = log.read_text(errors="replace").rstrip().splitlines()[-SAID:]
        print("\n".join(f"    {text[:200]}" for text in last), flush=True)
        return "failed", f"exit code {code}"


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process of ours and all that it started, if it still runs."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        for each in [launcher, *launcher.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def stop(_signal: int, _frame: FrameType | None) -> None:
    """Ends the running item and goes on to the table."""
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=(*STAGES, "all"), action="append", help="what to run; all by default")
    parser.add_argument("--check", action="store_true", help="everything on a CPU, with tiny shapes: does it work?")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--spent-s", type=float, default=0.0, help="of the budget, before this began")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--append", type=Path, default=Path("bench.jsonl"))
    parser.add_argument("overrides", nargs="*", help="of megads train, in the stage layouts")
    arguments = parser.parse_args()
    arguments.device = "cpu" if arguments.check else "cuda"
    arguments.run = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    stages = list(STAGES) if arguments.stage is None or "all" in arguments.stage else arguments.stage
    signal.signal(signal.SIGTERM, stop)
    runner = Runner(arguments, Clock(arguments.budget_s, arguments.spent_s))
    cut_short = False
    try:
        for item in chosen(items(arguments.check, arguments.work, arguments.overrides), stages):
            runner.run(item)
    except KeyboardInterrupt:
        cut_short = True
    print(f"\n{table(lines_of_runs(arguments.append))}")
    print(f"{runner.clock.spent_s:.0f} s of {arguments.budget_s:.0f}{', cut short' if cut_short else ''}; all figures: "
          f"{arguments.append}, run {arguments.run}; output: {runner.logs}")  # fmt: skip
    return int(runner.failed or cut_short)


if __name__ == "__main__":
    sys.exit(main())
