"""Measures steps of 38 layouts and shapes on this machine's CPU, and prints them with their predictions.

For each number of ranks and threads and each precision `megads calibrate` measures the machine, then real engines train
real steps, and `megads.tools.plan` predicts them from the calibration alone, without the measured steps. Half of
the rows (fit) guided the work on the cost model, the other half (judge) did not. On an idle machine, half an hour:

    python -m scripts.bench.plan_measured [--replay] [--write] [rows whose names contain this]

--write stores calibrations and times in tests/tools/plan/measured_steps.yaml, from which a test predicts them again;
--replay prints that file's table without measuring. `scripts.bench.gpu_plan` does the same on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megads.engine import build_train_engine
from megads.engine.interface import EngineSpec
from megads.model.peak import cpu_model
from megads.ops.config import OpsConfig
from megads.ops.resolve import load
from megads.optim.config import OptimConfig
from megads.parallel.config import EngineKind, resolve_engine
from megads.parallel.grid import build_grid
from megads.runtime.environment import available_cores
from megads.tools.plan.calibrate.config import CalibrateConfig
from megads.tools.plan.calibrate.measure import calibrate, run_on_ranks
from megads.tools.verify.scenario import Scenario, step_batches
from tests.tools.plan.measured_steps import (
    ROWS,
    STORED,
    ComparedStep,
    MeasuredRow,
    compared_steps,
    half_of,
    machine_name,
    read_stored,
)

_WARM_UP, _STEPS = 2, 5
_ROUNDS = 2
"""Number of times the rows of a machine are trained; the fastest round is used, as in calibration."""


def train_rows(rows: Sequence[MeasuredRow], result: str) -> None:
    """Runs one rank: trains every row for some steps; rank 0 writes the median seconds of each."""
    found = {}
    for row in rows:
        found[row.name] = _timed(row)
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(found), encoding="utf-8")


def _timed(row: MeasuredRow) -> float:
    """Median seconds of a step, from the start of all ranks to the end of all ranks; collective."""
    gc.unfreeze()  # the previous engine, which its start has frozen
    gc.collect()
    parallel = row.parallel
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    spec = EngineSpec(
        row.model,
        parallel,
        OptimConfig(),
        grid,
        precision=torch.bfloat16 if row.precision == "bf16" else torch.float32,
        micro_batch_size=row.micro_batch_size,
        seed=1,
        device=torch.device("cpu"),
        kernels=load(OpsConfig(), print, cuda=False),
        engine=resolve_engine(EngineKind.auto, parallel.zero_stage),
    )
    engine = build_train_engine(spec)
    scenario = Scenario(
        model=row.model,
        global_batch_size=row.micro_batch_size * row.micro_batches * parallel.dp,
        micro_batch_size=row.micro_batch_size,
        seq_len=row.seq_len,
    )
    batches = step_batches(scenario, 0, grid.dp.rank, grid.dp.size)
    times = []
    gc.collect()
    gc.disable()  # as megads.runtime.process.GarbageCollectionHook does
    for _ in range(_WARM_UP + _STEPS):
        dist.barrier()
        begin = time.perf_counter()
        engine.step(batches, 1e-4)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    gc.enable()
    return median(times[_WARM_UP:])


def measured(rows: Sequence[MeasuredRow]) -> dict[str, Any]:
    """Calibrates every machine that the rows need, and trains them on it; returns the input of `compared_steps`."""
    found: dict[str, Any] = {"processor": f"{available_cores()} cores of {cpu_model()}", "machines": {}, "steps": {}}
    for machine in dict.fromkeys(row.machine for row in rows):
        ranks, threads, precision = machine
        own = [row for row in rows if row.machine == machine]
        print(f"{machine_name(machine)}: calibrating, then {len(own)} rows", flush=True)
        asked = CalibrateConfig(ranks=ranks, threads=threads, fp32=precision == "fp32")
        found["machines"][machine_name(machine)] = calibrate(asked)
        for _ in range(_ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "steps.json"
                run_on_ranks(ranks, threads, train_rows, own, str(result))
                times = json.loads(result.read_text(encoding="utf-8"))
            found["steps"] |= {name: min(taken, found["steps"].get(name, taken)) for name, taken in times.items()}
    return found


def report(steps: Sequence[ComparedStep]) -> None:
    """Prints both halves, each with a summary of the errors."""
    for half in ("fit", "judge"):
        of_half = [step for step in steps if half_of(step.row) == half]
        if not of_half:
            continue
        print(f"\n| {half} | measured | planned | error |\n|---|---:|---:|---:|")
        for step in of_half:
            planned_ms = 1e3 * step.planned.step_time_s
            print(f"| {step.row.name} | {1e3 * step.measured_s:.1f} ms | {planned_ms:.1f} ms | {step.error:+.1%} |")
        errors = [step.error for step in of_half]
        print(
            f"\n{sum(abs(error) <= 0.1 for error in errors)} of {len(errors)} within 10%; mean "
            f"{fmean(map(abs, errors)):.1%}, bias {fmean(errors):+.1%}, worst {max(errors, key=abs):+.1%}"
        )


def store(found: Mapping[str, Any]) -> None:
    """Stores a run for `read_stored`."""
    head = "# yamllint disable\n# Written by scripts.bench.plan_measured --write: calibrations, and seconds of steps.\n"
    text = yaml.safe_dump(dict(found), sort_keys=False, width=118, default_flow_style=None)
    STORED.write_text(head + text, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="only rows whose names contain this")
    parser.add_argument("--replay", action="store_true", help="predict the stored steps, measure nothing")
    parser.add_argument("--write", action="store_true", help=f"store the run in {STORED.name}")
    asked = parser.parse_args()
    chosen = [row for row in ROWS if asked.name in row.name]
    found = read_stored() if asked.replay else measured(chosen)
    if asked.write:
        store(found)
    print(f"\n{found['processor']}")
    report([step for step in compared_steps(found) if step.row in chosen])


if __name__ == "__main__":
    main()
