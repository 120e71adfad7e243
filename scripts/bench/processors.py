#!/usr/bin/env python3
"""Training steps in fp32 and bf16, idle and beside a busy process, on this processor and limited to AVX2.

The same work runs as this machine is, and with the instruction sets of PyTorch, oneDNN and megads' kernels limited to
AVX2: that is what Zen 1 to 3 and most clients have. fp32 and bf16 steps alternate in one process. The exit code is 1
where a bf16 step takes more than 1.3 times an fp32 step (goal: 1.15). Beside one busy loop on two cores a step should
take at most 2.2 times the idle one; on a machine with other load that ratio means nothing, so it is only reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megads.model.config import ModelConfig
from megads.model.peak import cpu_model
from megads.ops.config import Implementation, OpsConfig
from megads.ops.processor import instruction_sets
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.environment import available_cores, rank_variables
from megads.tools.verify.layout import build_engine
from megads.tools.verify.scenario import Scenario, step_batches
from scripts.bench.results import Verdict, add_results_option, record
from tests.distributed import run_ranks

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
MACHINES = {
    "this processor": {},
    "AVX2": {"MEGADS_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""Limits of the instruction sets, by environment variables."""
GOAL, LIMIT, BUSY_GOAL = 1.15, 1.3, 2.2
SETTLED = 1
"""Steps before the timed ones."""


@dataclass(frozen=True)
class Work:
    """A training step.

    Attributes:
        model: model shape.
        optimizer: optimizer settings.
        batch, micro_batch, seq_len: samples per step and per micro-batch, tokens per sample.
        ranks: data-parallel ranks.
        threads: threads of each rank.
        row: row of docs/notes/performance.md; 0 for none.
    """

    model: ModelConfig
    optimizer: OptimConfig
    batch: int
    micro_batch: int
    seq_len: int
    ranks: int = 1
    threads: int = 1
    row: int = 0

    def scenario(self, precision: str, impl: str) -> Scenario:
        return Scenario(
            model=self.model, optimizer=self.optimizer, precision=precision, hot=False, seq_len=self.seq_len,
            global_batch_size=self.batch, micro_batch_size=self.micro_batch, ops=OpsConfig(Implementation(impl)),
        )  # fmt: skip


_ROW_1 = ModelConfig(num_layers=8, hidden_size=512, num_heads=8, vocab_size=32_000, max_seq_len=512)
_MUON = OptimConfig(name="muon")
WORKS = {
    "tiny, 16 micro-batches of 1 x 128": Work(
        ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=1000, max_seq_len=256), OptimConfig(),
        batch=16, micro_batch=1, seq_len=128,
    ),
    "demo": Work(
        ModelConfig(num_layers=4, hidden_size=256, num_heads=8, vocab_size=8192, max_seq_len=256), _MUON,
        batch=8, micro_batch=4, seq_len=256, ranks=2,
    ),
    "row 1, AdamW": Work(_ROW_1, OptimConfig(), 4, 4, 512, threads=2, row=1),
    "row 15, Muon": Work(_ROW_1, _MUON, 4, 4, 512, row=15),
}  # fmt: skip


def steps_of_rank(work: Work, impl: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of this rank's steps in each precision, which alternate; called on every rank."""
    torch.set_num_threads(work.threads)
    parallel = ParallelConfig(dp=work.ranks)
    engines: dict[str, Any] = {}
    for name, precision in PRECISIONS.items():
        scenario = work.scenario(precision, impl)
        engine = build_engine(scenario, parallel)
        engines[name] = (engine, step_batches(scenario, 0, engine.grid.dp.rank, work.ranks), scenario.lr)
    found: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    spent = 0.0
    # Rank 0's clock may not decide alone: every rank runs as many steps as the first one after warm-up says.
    count = SETTLED + 1
    number = 0
    while number < count:
        for name, (engine, batches, lr) in engines.items():
            begin = time.perf_counter()
            engine.step(batches, lr)
            found[name].append(1e3 * (time.perf_counter() - begin))
        number += 1
        if number == SETTLED + 1:
            spent = sum(times[-1] for times in found.values()) / 1e3
            rounds = torch.tensor([seconds / spent])
            if work.ranks > 1:
                torch.distributed.broadcast(rounds, 0)
            count += min(40, max(1, int(rounds.item())))
    return {name: times[SETTLED:] for name, times in found.items()}


@contextmanager
def busy_loop(wanted: bool) -> Iterator[None]:
    """One process that keeps one core busy."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(name: str, machine: str, impl: str, seconds: float, busy: bool) -> dict[str, float]:
    """Median milliseconds of a step in each precision, from a process with that machine's limits."""
    work = WORKS[name]
    command = [sys.executable, "-m", __spec__.name, "--child", name, "--impl", impl, "--seconds", str(seconds)]
    environment = os.environ | rank_variables(work.threads, cuda=False) | MACHINES[machine]
    with busy_loop(busy):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} on {machine} failed with exit code {done.returncode}:\n{done.stderr}")
    times: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {precision: statistics.median(of) for precision, of in times.items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[name.split(",")[0] for name in WORKS], help="only this work")
    parser.add_argument("--machines", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--impl", default="fused", choices=["fused", "torch"], help="value of ops.impl")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of steps of each measurement")
    parser.add_argument("--idle-only", action="store_true", help="omit the steps beside a busy loop")
    parser.add_argument("--child", choices=list(WORKS), help=argparse.SUPPRESS)
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.child:
        work = WORKS[arguments.child]
        print(json.dumps(run_ranks(steps_of_rank, work.ranks, work, arguments.impl, arguments.seconds)[0]))
        return 0
    wanted = [name for name in WORKS if not arguments.only or name.split(",")[0] in arguments.only]
    load = os.getloadavg()[0]
    print(
        f"{cpu_model()} ({instruction_sets()}), {available_cores()} cores, load {load:.1f}, torch {torch.__version__}"
    )
    print("\n| step | machine | fp32, ms | bf16, ms | bf16 / fp32 | beside a busy loop, bf16, ms | busy / idle |")
    print("|---|---|---|---|---|---|---|", flush=True)
    slow, taken = [], []
    for name in wanted:
        for machine in arguments.machines:
            idle = measure(name, machine, arguments.impl, arguments.seconds, busy=False)
            ratio, busy_ms, beside = idle["bf16"] / idle["fp32"], float("nan"), float("nan")
            if not arguments.idle_only:
                busy_ms = measure(name, machine, arguments.impl, arguments.seconds, busy=True)["bf16"]
                beside = busy_ms / idle["bf16"]
            print(f"| {name} | {machine} | {idle['fp32']:.1f} | {idle['bf16']:.1f} | {ratio:.2f} | {busy_ms:.1f} "
                  f"| {beside:.2f} |", flush=True)  # fmt: skip
            what = f"bf16 step of {name}, {machine}"
            ours = f"{idle['bf16']:.1f} ms"
            verdict = Verdict(WORKS[name].row, what, ours, "fp32", f"{idle['fp32']:.1f} ms", 1 / ratio, 1 / GOAL)
            figures = {"work": name, "machine": machine, "impl": arguments.impl, **idle, "busy_ms": busy_ms}
            taken.append((figures, verdict))
            if ratio > LIMIT:
                slow.append(f"{what}: {ratio:.2f} times the fp32 step, limit {LIMIT}")
    print()
    for figures, verdict in taken:
        record(arguments.append, "processors", figures, [verdict])
    print("\n".join(slow) or f"no bf16 step takes more than {LIMIT} times the fp32 step")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
