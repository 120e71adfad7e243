#!/usr/bin/env python3
"""Runs the stages of scripts/bench/gpu.sh within a time budget, and prints the table of results last.

    scripts/bench/gpu.sh [--stage kernels|attention|train|resume|tests|profile|...|all ...] [key=value ...]

The schedule is printed first: what runs, the expected start, and the time limit in seconds. Every item is a process
that appends its results to bench.jsonl immediately, so that nothing is lost if the budget runs out or an item dies. The
most valuable go first; items that time nothing run concurrently; items that no longer fit are reported as not run. The
failure of an item does not stop the others: its first error is in the table, its whole output in a separate log. An
item that exceeds its limit is told to print the stacks of its threads before it is killed. One that fails in CUDA is
run again with blocking kernel launches, so that the log names the operator. Exit 1: something failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import psutil

from megads.runtime.environment import available_cores, rank_variables
from scripts.bench.gpu_items import ALWAYS, BUILD, NCCL, NEEDS, STAGES, Item, chosen, command, items, rounds
from scripts.bench.gpu_lines import Append, appender, lines_of_runs
from scripts.bench.gpu_table import nccl_rows, table

RESERVE_S = 6.0
"""Reserved for ending the last item and for the table."""
SHOWN_LINES = 12
"""Lines shown of a failed item's output."""
STACKS_S = 3.0
"""Time for a killed item to print its stacks."""
LEAST_BLOCKING_S = 20.0
"""Minimum remaining time to run an item again with blocking launches."""
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}
"""Blocking launches, so that the error is raised at the launch that failed."""
_ERROR = re.compile(
    r"(\w+\.)*\w*(Error|Exception|Exit)\b|.*\berror:|.*CUDA error|no kernels:|FAILED |Fatal |terminate called"
)
"""How a line begins that reports an error: of Python, compilers, CUDA, this folder, pytest, faulthandler and C++."""


class Clock:
    """Remaining time of the budget.

    Args:
        budget_s: total seconds.
        spent_s: before this process began to count.
    """

    def __init__(self, budget_s: float, spent_s: float) -> None:
        self._begin = time.monotonic() - spent_s
        self._budget_s = budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    @property
    def left_s(self) -> float:
        """Seconds left for items."""
        return self._budget_s - RESERVE_S - self.spent_s


class Runner:
    """Runs items and records their outcomes.

    Args:
        arguments: parsed command line.
        clock: clock of the budget.
    """

    def __init__(self, arguments: argparse.Namespace, clock: Clock) -> None:
        self.arguments, self.clock = arguments, clock
        self.append: Append = appender(arguments, "gpu_item")
        self.logs = arguments.work / "logs" / arguments.run
        self.logs.mkdir(parents=True, exist_ok=True)
        self.failed = self.built = self.stopped = False
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, together: list[Item]) -> None:
        """Runs items concurrently, or records why not.

        Raises:
            KeyboardInterrupt: this process was told to stop; nothing runs any more.
        """
        with ThreadPoolExecutor(len(together)) as threads:
            try:
                list(threads.map(self._run, together))
            except KeyboardInterrupt:
                self.stopped = True
                for process in self._running:
                    end_tree(process)
                raise

    def _run(self, item: Item) -> None:
        begin = time.monotonic()
        if item.devices > 1 and item.devices > self.devices:
            outcome, reason = "not run", f"{NEEDS} {item.devices} GPUs"
        elif item.kernels and not self.built:
            outcome, reason = "not run", "the kernels were not built"
        elif self.clock.left_s < item.expected_s or self.stopped:
            outcome, reason = "not run", "no time left"
        else:
            outcome, reason = self._wait_for(item)
        seconds = time.monotonic() - begin
        self.failed |= outcome == "failed"
        self.built |= outcome == "done" and (item.stage, item.name) == (ALWAYS, BUILD)
        self.append({"stage": item.stage, "name": item.name, "outcome": outcome, "reason": reason, "seconds": seconds,
                     "expected_s": item.expected_s})  # fmt: skip
        why = f" ({reason})" if reason else ""
        said = f"{item.stage}: {item.name}: {outcome}{why}, {seconds:.0f} s of {item.expected_s:.0f} expected"
        print(f"[{self.clock.spent_s:4.0f} s] {said}", flush=True)
        if outcome == "failed" and "CUDA error" in reason and self.clock.left_s > LEAST_BLOCKING_S:
            self._wait_for(replace(item, name=f"{item.name} blocking"), BLOCKING)

    @property
    def devices(self) -> int:
        """GPUs found by the first item, because this process must not use GPU memory. A CPU has no limit on ranks."""
        if self.arguments.device == "cpu":
            return sys.maxsize
        lines = lines_of_runs(self.arguments.append)
        return max((line["devices"] for line in lines if line["bench"] == "gpu_device"), default=1)

    def _wait_for(self, item: Item, extra: Mapping[str, str] | None = None) -> tuple[str, str]:
        log = self.logs / f"{item.stage}_{item.name}.txt".replace(" ", "_").replace("/", "_")
        limit_s = min(item.most_s, self.clock.left_s)
        line = command(item, self.arguments.device, self.arguments.append, self.arguments.run, limit_s)
        cuda = self.arguments.device == "cuda"
        # Tiny tensors on a busy machine: threads would wait for each other.
        variables = rank_variables(available_cores() if cuda else 1, cuda) | {"PYTHONFAULTHANDLER": "1"}
        with log.open("wb") as said:
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                env=os.environ | variables | dict(extra or {}),
            )  # fmt: skip
            self._running.append(process)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return "ended for lack of time", f"after {limit_s:.0f} s; {log}"
            finally:
                end_tree(process)
        if code == 0:
            return "done", ""
        text = log.read_text(errors="replace").rstrip()
        print("\n".join(f"    {shown[:200]}" for shown in text.splitlines()[-SHOWN_LINES:]), flush=True)
        ended = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        return "failed", f"{ended}: {first_error(text)}"


def first_error(text: str) -> str:
    """First line of an output that reports an error, because later errors often follow from it; else the last line."""
    lines = text.splitlines() or ["no output"]
    return next((line for line in lines if _ERROR.match(line)), lines[-1]).strip()[:300]


def plan(found: list[list[Item]], clock: Clock) -> str:
    """Returns the schedule if everything takes as long as expected."""
    rows, begin_s = [f"{'begins':>8}{'takes':>7}{'at most':>9}  of {clock.spent_s + clock.left_s:.0f} s"], clock.spent_s
    for together in found:
        if together[0].devices > 1:
            continue
        for item in together:
            beside = "" if item.alone else ", concurrent"
            rows.append(
                f"{begin_s:6.0f} s{item.expected_s:5.0f} s{item.most_s:7.0f} s  {item.stage}: {item.name}{beside}"
            )
        begin_s += max(item.expected_s for item in together)
    several = sum(together[0].devices > 1 for together in found)
    return "\n".join([*rows, f"then {several} layouts of several GPUs, where there are so many"])


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process of gpu.sh and its descendants if it still runs; faulthandler prints their stacks first."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        tree = [launcher, *launcher.children(recursive=True)]
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGABRT)
        _, alive = psutil.wait_procs(tree, STACKS_S)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def stop(_signal: int, _frame: FrameType | None) -> None:
    """Ends the running item and continues with the table."""
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage", choices=(*STAGES, NCCL, "all"), action="append", help=f"stages to run (default: all but {NCCL})"
    )
    parser.add_argument("--check", action="store_true", help="check everything on a CPU, with tiny shapes")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--spent-s", type=float, default=0.0, help="seconds of the budget that are already spent")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--append", type=Path, default=Path("bench.jsonl"))
    parser.add_argument("overrides", nargs="*", help="overrides of megads train in the stage layouts")
    arguments = parser.parse_args()
    arguments.device = "cpu" if arguments.check else "cuda"
    arguments.run = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    stages = list(STAGES) if arguments.stage is None or "all" in arguments.stage else arguments.stage
    signal.signal(signal.SIGTERM, stop)
    runner = Runner(arguments, Clock(arguments.budget_s, arguments.spent_s))
    found = rounds(chosen(items(arguments.check, arguments.work, arguments.overrides), stages))
    print(plan(found, runner.clock), flush=True)
    cut_short = False
    try:
        for together in found:
            runner.run(together)
            if together[0].stage == NCCL:
                shown = nccl_rows(lines_of_runs(arguments.append), [item.name for item in together])
                print("\n".join(shown), flush=True)
    except KeyboardInterrupt:
        cut_short = True
    print(f"\n{table(lines_of_runs(arguments.append))}")
    print(f"{runner.clock.spent_s:.0f} s of {arguments.budget_s:.0f}{', cut short' if cut_short else ''}; all figures: "
          f"{arguments.append}, run {arguments.run}; output: {runner.logs}")  # fmt: skip
    return int(runner.failed or cut_short)


if __name__ == "__main__":
    sys.exit(main())
