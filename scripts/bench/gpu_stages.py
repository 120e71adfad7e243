#!/usr/bin/env python3
"""Runs the stages of scripts/bench/gpu.sh within a time budget, and prints the table of results last.

    scripts/bench/gpu.sh [--stage kernels|train|resume|tests|...|all ...] [key=value ...]

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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megads.ops.apex import ApexState, find_apex
from megads.runtime.environment import available_cores, rank_variables
from scripts.bench.gpu_kernels import SANITIZERS
from scripts.bench.gpu_runs import CASES
from scripts.bench.gpu_table import NEEDS, Append, appender, lines_of_runs, run_rows, table

NCCL = "nccl"
"""Stage with several ranks on one GPU. It has its own budget: it runs only if it is named."""
STAGES = ("sanitizer", "tests", "resume", "memory", "kernels", "train", "peers", "experts", "plan", "layouts")
ALWAYS = "start"
"""Stage that all other stages need."""
BUILD = "build"
"""The item that compiles the kernels."""
ENDING_S = 10.0
"""Time that an item with --limit-s takes to end after its limit."""
CHECKED = ("one device", "parallel.dp=2", "resumed, ops.impl=fused")
"""Of the resumed runs and the layouts, those that --check starts."""
TRAININGS: tuple[Any, ...] = (
    ("1.3b", "fused", 40.0), ("8b", "fused", 55.0, 120.0), ("1.3b", "fused_free", 40.0), ("350m", "fused", 25.0),
    ("350m", "fused_graphs", 25.0), ("350m", "fused_graphs_auto", 25.0), ("bloom_1b1", "fused", 25.0),
    ("bloom_1b1", "hf", 25.0),
    ("llama_1b", "fused", 25.0), ("llama_1b", "torchtitan", 45.0, 100.0),
)  # fmt: skip
"""Arguments of `training`."""
LATER_TRAININGS: tuple[Any, ...] = (
    ("1.3b", "torch", 25.0), ("1.3b", "fused_compiled", 45.0, 120.0), ("bloom_1b1", "torch", 25.0),
    ("llama_1b", "torch", 25.0), ("bloom_1b1", "hf_compiled", 60.0, 120.0), ("8b", "fused_compiled", 80.0, 150.0),
    ("long", "fused", 60.0, 120.0), ("long", "fused_offload", 60.0, 120.0),
    ("long_recomputed", "fused", 60.0, 120.0), ("long_recomputed", "fused_offload", 60.0, 120.0),
    ("long_recomputed", "fused_offload_chunks", 60.0, 120.0),
    ("1.3b", "fused_fp8", 40.0), ("1.3b", "fused_fp8_rows", 40.0), ("llama_1b", "fused_fp8", 25.0),
    *([("1.3b", "apex", 25.0)] if find_apex().state is ApexState.present else []),
)  # fmt: skip
CHECKED_TRAININGS: tuple[Any, ...] = (
    ("1.3b", "fused"), ("1.3b", "fused_free"), ("1.3b", "fused_compiled"), ("bloom_1b1", "torch"), ("bloom_1b1", "hf"),
    ("llama_1b", "torch"), ("llama_1b", "torchtitan"), ("1.3b", "fused_fp8"), ("long", "fused_offload"),
    ("long_recomputed", "fused_offload_chunks"),
)  # fmt: skip
PEER_ROWS: tuple[Any, ...] = (
    ("124m", "fused", 30.0), ("124m", "plain", 40.0, 100.0), ("124m", "fused_compiled", 45.0, 120.0),
    ("124m", "fused_graphs", 30.0), ("1.3b", "fused", 40.0), ("1.3b", "plain", 60.0, 120.0),
    ("llama_1b", "fused", 25.0), ("llama_1b", "torchtitan", 45.0, 100.0), ("bloom_1b1", "fused", 25.0),
    ("bloom_1b1", "hf_compiled", 60.0, 120.0), ("124m", "hf_compiled", 60.0, 120.0), ("124m", "fused_free", 30.0),
)  # fmt: skip
"""Arguments of `training` in the stage peers: megads beside each peer in the same run."""
CHECKED_PEERS: tuple[Any, ...] = (("124m", "fused"), ("124m", "plain"))
EXPERTS: tuple[Any, ...] = (
    ("qwen3_moe", "fused", 45.0, 100.0), ("qwen3_moe", "fused_loop", 45.0, 100.0), ("qwen3_dense", "fused", 30.0),
    ("qwen3_moe", "hf", 45.0, 100.0), ("qwen3_moe", "torchtitan", 60.0, 120.0),
    ("qwen3_moe", "hf_compiled", 90.0, 180.0), ("qwen3_moe", "torch", 45.0, 100.0),
)  # fmt: skip
"""Arguments of `training` in the stage experts."""
CHECKED_EXPERTS = tuple(row for row in EXPERTS if row[1] != "hf_compiled")
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


@dataclass(frozen=True)
class Item:
    """One process of gpu.sh.

    Attributes:
        stage: one of STAGES, or ALWAYS.
        name: short name.
        arguments: arguments of Python.
        expected_s: expected duration, an estimate until measured on a GPU; with less time left it is not started.
        most_s: time limit.
        devices: number of GPUs it needs.
        appends: accepts --device, --append and --run.
        alone: runs exclusively, because it measures time; the others run concurrently with their neighbors.
        group: of the others, only those of one group run concurrently.
        kernels: needs the compiled kernels.
        limited: accepts --limit-s, at which it ends by itself.
    """

    stage: str
    name: str
    arguments: tuple[str, ...]
    expected_s: float = 30.0
    most_s: float = 75.0
    devices: int = 1
    appends: bool = True
    alone: bool = True
    group: str = ""
    kernels: bool = False
    limited: bool = False


def bench(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this folder."""
    return ("-m", f"scripts.bench.{module}", *arguments)


def items(check: bool, work: Path, overrides: list[str]) -> list[Item]:
    """Returns all items, in order of value.

    Args:
        check: on a CPU, with tiny shapes.
        work: folder of data and runs.
        overrides: overrides of `megads train` in the layout runs.
    """
    kernels = bench("gpu_kernels", *(("--dtype", "fp32", "--rounds", "1") if check else ()))
    plan = bench("gpu_plan", *(("--seconds", "0.001") if check else ()))
    compiled = (*kernels, "--compiled", *(("--only", "RMSNorm") if check else ()))
    found = [
        Item(ALWAYS, "device", bench("gpu_checks", "device"), 5.0),
        Item(ALWAYS, BUILD, bench("gpu_checks", "build"), 40.0, 200.0),
        # None of these is timed, so they share the GPU.
        *(sanitizer(tool) for tool in SANITIZERS[: 1 if check else None]),
        Item(
            "tests", "GPU tests", bench("gpu_checks", "tests"), 130.0, 240.0, alone=False, group="checks", limited=True
        ),
        *runs("resume", work, overrides),
        Item("kernels", "kernels", kernels, 10.0, kernels=True),
        *(training(*row) for row in (CHECKED_TRAININGS if check else TRAININGS)),
        Item("plan", "calibration and steps", plan, 180.0, 300.0, kernels=not check),
        Item("memory", "process and communicators", bench("gpu_checks", "memory"), 20.0),
        Item("kernels", "torch.compile", compiled, 40.0, 120.0, kernels=check),
        *(replace(training(*row), stage="experts") for row in (CHECKED_EXPERTS if check else EXPERTS)),
        *(replace(training(*row), stage="peers") for row in (CHECKED_PEERS if check else PEER_ROWS)),
        *(training(*row) for row in (() if check else LATER_TRAININGS)),
        *runs("layouts", work, overrides),
        *runs(NCCL, work, overrides),
    ]
    if not check:
        return found
    # Without a GPU there is no need to hurry, and a shared machine may be slow.
    kept = [item for item in found if item.name in CHECKED or item.stage not in ("resume", "layouts")]
    return [replace(item, expected_s=10.0, most_s=600.0 if item.stage == NCCL else 240.0,
                    alone=item.alone or item.stage == NCCL) for item in kept]  # fmt: skip


def sanitizer(tool: str) -> Item:
    """Runs a tool of compute-sanitizer over all kernels."""
    return Item(
        "sanitizer",
        tool,
        bench("gpu_kernels", "--sanitizer", tool),
        15.0,
        100.0,
        alone=False,
        group="checks",
        kernels=True,
    )


def training(size: str, side: str, expected_s: float = 30.0, most_s: float = 75.0) -> Item:
    """A row of the training table."""
    arguments = bench("gpu_train", "--size", size, "--side", side)
    return Item("train", f"{size} {side}", arguments, expected_s, most_s, kernels=side.startswith("fused"))


def runs(stage: str, work: Path, overrides: list[str]) -> list[Item]:
    """The cases of gpu_runs of a stage."""
    module = bench("gpu_runs", "--work", str(work), *(overrides if stage == "layouts" else ()))
    return [
        Item(
            stage, case.name, (*module, "--case", case.name), case.expected_s, case.most_s, case.devices,
            alone=not case.group, group=case.group, kernels=case.kernels,
        )
        for case in CASES
        if case.stage == stage
    ]  # fmt: skip


def chosen(found: list[Item], stages: list[str]) -> list[Item]:
    """Items of these stages, once each, and those they depend on; kernels are built when the first needs them."""
    build = [item for item in found if (item.stage, item.name) == (ALWAYS, BUILD)]
    of_stages = [item for item in found if (item.stage == ALWAYS or item.stage in stages) and item not in build]
    wanted = list({item.arguments: item for item in reversed(of_stages)}.values())[::-1]
    first = next((place for place, item in enumerate(wanted) if item.kernels), 1)
    return [*wanted[:first], *build, *wanted[first:]]


def rounds(found: list[Item]) -> list[list[Item]]:
    """Items in execution order; those of one list run concurrently."""
    numbered = list(enumerate(found))
    together = groupby(numbered, key=lambda pair: pair[0] if pair[1].alone else pair[1].group)
    return [[item for _, item in group] for _, group in together]


def command(item: Item, device: str, append: Path, run: str, limit_s: float) -> list[str]:
    """Command line of an item; the process is killed after the limit."""
    results = ["--device", device, "--append", str(append), "--run", run] if item.appends else []
    limit = ["--limit-s", f"{max(1.0, limit_s - ENDING_S):.0f}"] if item.limited else []
    return [sys.executable, *item.arguments, *results, *limit]


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
                shown = run_rows(lines_of_runs(arguments.append), [item.name for item in together])
                print("\n".join(shown), flush=True)
    except KeyboardInterrupt:
        cut_short = True
    print(f"\n{table(lines_of_runs(arguments.append))}")
    print(f"{runner.clock.spent_s:.0f} s of {arguments.budget_s:.0f}{', cut short' if cut_short else ''}; all figures: "
          f"{arguments.append}, run {arguments.run}; output: {runner.logs}")  # fmt: skip
    return int(runner.failed or cut_short)


if __name__ == "__main__":
    sys.exit(main())
