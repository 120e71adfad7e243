#!/usr/bin/env python3
"""Reports the speed of a finished run, by the medians of its steps, and appends the figures to a JSON lines file."""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megads.runtime.metrics import JsonLinesWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

SAME_LOSS = 2e-4
"""Relative bound on the first loss of two layouts in bf16: N4 of docs/numerics.md."""

MEDIANS = ("tokens_per_s", "tflops_per_device", "mfu", "step_time_s", "data_time_s")


def figures(run_dir: Path, skip: int) -> dict[str, Any]:
    """Medians over the steps after the first `skip`, which are warmup.

    Raises:
        SystemExit: the run has no more steps than that.
    """
    steps = [record for record in read_json_lines(run_dir / METRICS_FILE) if "tokens_per_s" in record]
    if len(steps) <= skip:
        raise SystemExit(f"{run_dir / METRICS_FILE}: {len(steps)} steps, want more than {skip}")
    start = next(event for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] == "start")
    return {
        "bench": "training_speed",
        "time": time.time(),
        "device": start["device"],
        "parameters": start["parameters"],
        "precision": start["precision"],
        "layout": start["layout"],
        "seq_len": steps[-1]["seq_len"],
        "global_batch_size": steps[-1]["global_batch_size"],
        "steps": len(steps) - skip,
        **{name: statistics.median(step[name] for step in steps[skip:]) for name in MEDIANS},
        "peak_memory_bytes": max(step["peak_memory_bytes"] for step in steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--skip", type=int, default=10, help="steps skipped at the start")
    parser.add_argument("--same-as", type=Path, help="run whose first loss this run must reproduce (exit 1 otherwise)")
    parser.add_argument("--append", type=Path, required=True, help="file of results")
    arguments = parser.parse_args()
    found = figures(arguments.run_dir, arguments.skip)
    print(
        f"{found['device']}: {found['tokens_per_s']:,.0f} tokens/s, {found['tflops_per_device']:.1f} model TFLOPs a "
        f"device, MFU {found['mfu']:.1%} (12 L h s attention, no recomputation counted), "
        f"{found['peak_memory_bytes'] / 2**30:.1f} GiB, loss {found['first_loss']:.3f} -> {found['last_loss']:.3f}"
    )
    writer = JsonLinesWriter(arguments.append)
    writer.write_line(found)
    writer.close()
    if arguments.same_as is None:
        return 0
    off = abs(found["first_loss"] / figures(arguments.same_as, arguments.skip)["first_loss"] - 1)
    print(f"first loss off by {off:.1e} from {arguments.same_as}, bound {SAME_LOSS:.0e}")
    return int(off > SAME_LOSS)


if __name__ == "__main__":
    sys.exit(main())
