#!/usr/bin/env python3
"""Nsight Compute counters of the kernels that are furthest from the copy bandwidth in the same run of gpu.sh.

    python -m scripts.bench.gpu_profile --work runs/bench [--device cuda] [--append bench.jsonl] [--run name]

For every kernel launch of forward and backward pass of the three slowest, at the size that gpu_kernels timed: duration,
memory and compute throughput as shares of the peak, occupancy and warp stall reasons. The report is written to the work
folder. Without ncu the kernels run unprofiled.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from scripts.bench.gpu_lines import Line, add_line_options, appender, lines_of_runs
from scripts.bench.gpu_table import share_of_copy

TIMEOUT_S = 40.0
"""Time limit per kernel."""
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "MemoryWorkloadAnalysis")
METRICS = {
    "Duration": "", "Memory Throughput": "memory ", "Compute (SM) Throughput": "compute ",
    "Achieved Occupancy": "occupancy ", "Registers Per Thread": "registers ",
}  # fmt: skip
"""What is shown of the report, and how it is called."""


def slowest(lines: Iterable[Line], count: int) -> list[str]:
    """Names of the kernels with the lowest share of the copy bandwidth over both passes.

    Args:
        lines: result lines of a run of gpu.sh; cross entropy, whose gradient comes with the loss, is excluded.
        count: number of kernels.
    """
    shares: dict[str, float] = {}
    for line in lines:
        if line["bench"] == "gpu_kernels" and "ours" in line["sides"]:
            found = [share_of_copy(line, way) for way in ("fwd_us", "bwd_us")]
            if None not in found:
                shares[line["kernel"]] = min(share for share in found if share is not None)
    return sorted(shares, key=lambda name: shares[name])[:count]


def profile_command(name: str, path: str, device: str) -> list[str]:
    """Returns the command that profiles one kernel; GPU clocks are not changed.

    Args:
        name: name of a case of gpu_kernels.
        path: path of ncu; empty runs the kernel without it.
        device: cuda or cpu.
    """
    kernel = [sys.executable, "-m", "scripts.bench.gpu_kernels", "--profiled", "--only", name, "--device", device]
    if not path:
        return kernel
    sections = [word for section in SECTIONS for word in ("--section", section)]
    marks = ["--clock-control", "none", "--profile-from-start", "off"]
    return [path, *marks, *sections, "--csv", "--page", "details", *kernel]


def read_report(output: str) -> list[tuple[str, str]]:
    """Parses ncu's CSV, which is mixed with other lines; returns the shown metrics of each kernel."""
    lines = output.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for row in csv.DictReader(lines[begin:]):
        kernel, name, value = row.get("Kernel Name"), row.get("Metric Name"), row.get("Metric Value")
        if kernel and name and value and name in METRICS:
            values = found.setdefault(str(row["ID"]), (kernel.split("(")[0], {}))[1]
            values.setdefault(name, f"{METRICS[name]}{value} {row.get('Metric Unit') or ''}".strip())
    return [
        (kernel, ", ".join(values[name] for name in METRICS if name in values)) for kernel, values in found.values()
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--kernels", type=int, default=3)
    arguments = parser.parse_args()
    append = appender(arguments, "gpu_profile")
    timed = [line for line in lines_of_runs(arguments.append) if line["run"] == arguments.run]
    names = slowest(timed, arguments.kernels)
    if not names:
        print("error: no kernel was timed in this run: run the stage kernels with it")
        return 1
    path = (shutil.which("ncu") or "") if arguments.device == "cuda" else ""
    failed = 0
    for name in names:
        command = profile_command(name, path, arguments.device)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            append({"name": f"profile, {name}", "verdict": f"took more than {TIMEOUT_S:.0f} s"})
            failed += 1
            continue
        report = arguments.work / "logs" / arguments.run / f"ncu_{name.replace(' ', '_').replace(',', '')}.csv"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(done.stdout + done.stderr)
        rows = read_report(done.stdout)
        if done.returncode or (path and not rows):
            failed += 1
            rows = [("failed", f"exit code {done.returncode}, see {report}")]
            print(done.stdout[-4000:], done.stderr[-4000:])
        for kernel, text in rows or [("not profiled", "ncu is not on the path; the kernel ran without it")]:
            append({"name": f"profile, {name}, {kernel}", "verdict": text})
            print(f"{name}, {kernel}: {text}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
