"""Measures steps of 38 layouts and shapes on this machine, and prints them with their predictions.

For each number of ranks and threads and each precision `megads calibrate` measures the machine, then real engines train
real steps, and `megads.tools.plan` predicts them from the calibration alone, without the measured steps. Half of
the rows (fit) guided the work on the cost model, the other half (judge) did not. On an idle machine, half an hour:

    python -m scripts.bench.plan_measured --append bench.jsonl --picture docs/notes/pictures/plan_measured.png --write

--write stores calibrations and times in tests/tools/plan/measured_steps.yaml, from which a test predicts them again;
--replay prints that file's table without measuring.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from megads.tools.plan.devices import device_from
from megads.tools.plan.operators import MEGADS
from megads.tools.plan.step_estimate import StepEstimate, estimate_step
from scripts.bench.plan_rows import ROWS, MeasuredRow, half_of
from scripts.bench.results import add_results_option, record

STORED = Path(__file__).parents[2] / "tests" / "tools" / "plan" / "measured_steps.yaml"
_WARM_UP = 2
_ROUNDS = 2
"""Number of times the rows of a machine are trained; the fastest round is used, as in calibration."""
_WITHIN = 0.1


@dataclass(frozen=True)
class ComparedStep:
    """A row with its measured and predicted time.

    Attributes:
        row: what was trained.
        measured_s: median of its steps in the fastest round.
        planned: prediction from the calibration.
    """

    row: MeasuredRow
    measured_s: float
    planned: StepEstimate

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.planned.step_time_s / self.measured_s - 1


def machine_name(machine: tuple[int, int, str]) -> str:
    """Name of a calibration: 2x1 bf16 means two ranks of one thread."""
    ranks, threads, precision = machine
    return f"{ranks}x{threads} {precision}"


def compared_steps(stored: Mapping[str, Any]) -> list[ComparedStep]:
    """Returns the rows of a stored run with new predictions.

    Args:
        stored: with `machines`, device files by `machine_name`, and `steps`, seconds by the rows' names.
    """
    devices = {name: device_from(found, name) for name, found in stored["machines"].items()}
    return [
        ComparedStep(
            row,
            stored["steps"][row.name],
            estimate_step(row.model, row.parallel, row.shape, devices[machine_name(row.machine)], execution=MEGADS),
        )
        for row in ROWS
        if row.name in stored["steps"]
    ]


def read_stored(path: Path = STORED) -> dict[str, Any]:
    """Reads the file of --write."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def store(found: Mapping[str, Any], path: Path) -> None:
    """Stores a run for `read_stored`."""
    head = "# yamllint disable\n# Written by scripts.bench.plan_measured --write: calibrations, and seconds of steps.\n"
    text = yaml.safe_dump(dict(found), sort_keys=False, width=118, default_flow_style=None)
    path.write_text(head + text, encoding="utf-8")
    print(f"stored: {path}")


def train_rows(rows: Sequence[MeasuredRow], steps: int, result: str) -> None:
    """Runs one rank: trains every row for some steps; rank 0 writes the median seconds of each."""
    import torch.distributed as dist

    found = {}
    for row in rows:
        found[row.name] = _timed(row, steps)
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(found), encoding="utf-8")


def _timed(row: MeasuredRow, steps: int) -> float:
    """Median seconds of a step, from the start of all ranks to the end of all ranks; collective."""
    import torch
    import torch.distributed as dist

    from megads.engine import build_train_engine
    from megads.engine.interface import EngineSpec
    from megads.ops.config import OpsConfig
    from megads.ops.resolve import load
    from megads.optim.config import OptimConfig
    from megads.parallel.config import EngineKind, resolve_engine
    from megads.parallel.grid import build_grid
    from megads.tools.verify.scenario import Scenario, step_batches

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
    for _ in range(_WARM_UP + steps):
        dist.barrier()
        begin = time.perf_counter()
        engine.step(batches, 1e-4)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    gc.enable()
    return median(times[_WARM_UP:])


def measured(rows: Sequence[MeasuredRow], steps: int, seconds: float) -> dict[str, Any]:
    """Calibrates every machine that the rows need, and trains them on it; returns the input of `compared_steps`."""
    from megads.model.peak import cpu_model
    from megads.runtime.environment import available_cores
    from megads.tools.plan.calibrate.config import CalibrateConfig
    from megads.tools.plan.calibrate.measure import calibrate, run_on_ranks

    found: dict[str, Any] = {"processor": f"{available_cores()} cores of {cpu_model()}", "machines": {}, "steps": {}}
    for machine in dict.fromkeys(row.machine for row in rows):
        ranks, threads, precision = machine
        own = [row for row in rows if row.machine == machine]
        print(f"{machine_name(machine)}: calibrating, then {len(own)} rows", flush=True)
        asked = CalibrateConfig(ranks=ranks, threads=threads, fp32=precision == "fp32", seconds=seconds)
        found["machines"][machine_name(machine)] = calibrate(asked)
        for _ in range(_ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "steps.json"
                run_on_ranks(ranks, threads, train_rows, own, steps, str(result))
                times = json.loads(result.read_text(encoding="utf-8"))
            found["steps"] |= {name: min(taken, found["steps"].get(name, taken)) for name, taken in times.items()}
    return found


def statistics(steps: Sequence[ComparedStep]) -> dict[str, Any]:
    """Summarizes the errors of the predictions."""
    errors: list[float] = [step.error for step in steps]
    worst: float = max(errors, key=lambda error: error * error)
    return {
        "rows": len(errors),
        "within_10_percent": sum(abs(error) <= _WITHIN for error in errors),
        "mean": round(fmean(map(abs, errors)), 4),
        "bias": round(fmean(errors), 4),
        "worst": round(worst, 4),
    }


def report(steps: Sequence[ComparedStep], *, parts: bool) -> dict[str, dict[str, Any]]:
    """Prints both halves; returns their statistics."""
    found = {}
    for half in ("fit", "judge"):
        of_half = [step for step in steps if half_of(step.row) == half]
        if not of_half:
            continue
        print(f"\n| {half} | measured | planned | error |\n|---|---:|---:|---:|")
        for step in of_half:
            planned_ms = 1e3 * step.planned.step_time_s
            print(f"| {step.row.name} | {1e3 * step.measured_s:.1f} ms | {planned_ms:.1f} ms | {step.error:+.1%} |")
            if parts:
                shares = sorted(step.planned.parts.items(), key=lambda part: -part[1])
                print("    " + ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in shares))
        numbers = found[half] = statistics(of_half)
        print(
            f"\n{numbers['within_10_percent']} of {numbers['rows']} within 10%; mean {numbers['mean']:.1%}, "
            f"bias {numbers['bias']:+.1%}, worst {numbers['worst']:+.1%}"
        )
    return found


def draw(steps: Sequence[ComparedStep], path: Path) -> None:
    """Draws predicted over measured times of both halves, with the bounds of 10%."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    from megads.tools.report.style import BLUE, MUTED, ORANGE, house_style, png

    with house_style():
        figure = Figure(figsize=(6.0, 5.0))
        axes = figure.subplots()
        ends = [f(step.measured_s for step in steps) * 1e3 for f in (min, max)]
        line = [ends[0] / 1.3, ends[1] * 1.3]
        axes.plot(line, line, color=MUTED, linewidth=0.8)
        axes.fill_between(line, [0.9 * end for end in line], [1.1 * end for end in line], color=MUTED, alpha=0.2)
        for half, color in (("fit", BLUE), ("judge", ORANGE)):
            of_half = [step for step in steps if half_of(step.row) == half]
            axes.plot(
                [1e3 * step.measured_s for step in of_half],
                [1e3 * step.planned.step_time_s for step in of_half],
                "o",
                markersize=4.5,
                color=color,
                label=half,
            )
        axes.set(xscale="log", yscale="log", xlabel="measured, ms per step", ylabel="planned, ms per step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(lambda value, _place: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.legend(title="grey: within 10%")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(figure))
    print(f"picture: {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="only rows whose names contain this")
    parser.add_argument("--half", choices=("fit", "judge"), help="only this half")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per row, of which the median is used")
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds of measurement per operator")
    parser.add_argument("--parts", action="store_true", help="print the parts of the predicted time, in ms")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    parser.add_argument("--replay", action="store_true", help="predict the stored steps, measure nothing")
    parser.add_argument("--write", action="store_true", help=f"store the run in {STORED.name}")
    parser.add_argument("--store", type=Path, default=STORED, help="alternative file for --write and --replay")
    add_results_option(parser)
    asked = parser.parse_args(arguments)
    chosen = [row for row in ROWS if asked.name in row.name and asked.half in (None, half_of(row))]
    found = read_stored(asked.store) if asked.replay else measured(chosen, asked.steps, asked.seconds)
    steps = [step for step in compared_steps(found) if step.row in chosen]
    if asked.write:
        store(found, asked.store)
    print(f"\n{found['processor']}")
    numbers = report(steps, parts=asked.parts)
    if asked.picture:
        draw(steps, asked.picture)
    errors = {step.row.name: round(step.error, 4) for step in steps}
    record(asked.append, "plan_measured", {"processor": found["processor"], "halves": numbers, "errors": errors})


if __name__ == "__main__":
    main()
