#!/usr/bin/env python3
"""`megads train` in one layout of the available GPUs: speed, memory, and the first loss compared with one GPU's.

    python -m scripts.bench.gpu_layouts --number 2 [--device cuda] [--work runs/bench] [key=value ...]
    python -m scripts.bench.gpu_layouts --configs       every layout's config is composed and checked, nothing starts

Layout 0 is one GPU with `ops.impl=torch`. The first loss of all others must equal its (2e-4, N4 of docs/numerics.md) if
it has run in the same run of gpu.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.gpu_lines import add_line_options, appender, lines_of_runs
from scripts.bench.synthetic_dataset import write
from scripts.bench.training_speed import SAME_LOSS, figures


@dataclass(frozen=True)
class Layout:
    """Number of GPUs, and the overrides of `megads train`."""

    devices: int
    overrides: str = ""

    @property
    def name(self) -> str:
        return self.overrides or "one device"


LAYOUTS = (
    Layout(1),
    Layout(1, "ops.impl=fused"),
    Layout(2, "parallel.dp=2"),
    Layout(2, "parallel.dp=2 parallel.bucket_elements=1000000000"),  # no overlap, to measure its benefit
    Layout(2, "parallel.dp=2 parallel.zero_stage=0"),
    Layout(2, "parallel.dp=2 parallel.zero_stage=2"),
    Layout(2, "parallel.dp=2 parallel.zero_stage=3"),
    Layout(2, "parallel.tp=2"),
    Layout(2, "parallel.tp=2 parallel.sequence_parallel=true"),
    Layout(2, "parallel.cp=2"),
    Layout(2, "parallel.pp=2"),
    Layout(2, "parallel.pp=2 parallel.recompute=full"),
    Layout(2, "parallel.pp=2 parallel.schedule=interleaved"),
    Layout(2, "parallel.pp=2 parallel.schedule=zb_h1"),
    Layout(2, "parallel.pp=2 parallel.schedule=zb_v"),
    Layout(2, "parallel.pp=2 parallel.schedule=dualpipe_v"),
    Layout(4, "parallel.dp=4 parallel.zero_stage=3 parallel.zero_shard_size=2"),
    Layout(8, "parallel.tp=2 parallel.sequence_parallel=true parallel.pp=2 parallel.dp=2"),
)
TRAINING = (
    "train.precision=bf16", "evaluation.at_end=false", "checkpoint.load=none", "logging.every_steps=5",
    "optim.lr=6e-4",
)  # fmt: skip
ON_GPU = (
    *("model=gpt3_125m", "train.steps=40", "train.seq_len=2048"),
    *("train.global_batch_size=64", "train.micro_batch_size=8", "schedule.warmup_samples=640"),
)
ON_CPU = (
    *("model.num_layers=4", "model.hidden_size=48", "model.num_heads=6", "model.vocab_size=512", "train.steps=4"),
    *("train.seq_len=32", "train.global_batch_size=8", "train.micro_batch_size=2", "cluster.peak_tflops=1"),
    *("cluster.threads_per_rank=1", "schedule.warmup_samples=4"),
)
SKIPPED = {"cuda": 10, "cpu": 1}
"""Warmup steps."""


def command(device: str, work: Path, overrides: list[str]) -> list[str]:
    """Overrides of `megads train`; writes its data if missing."""
    cuda = device == "cuda"
    prefix = work / ("synthetic" if cuda else "synthetic_small")
    if not prefix.with_suffix(".idx").exists():
        work.mkdir(parents=True, exist_ok=True)
        write(prefix, 8 * 10**6 if cuda else 10**5, 50257 if cuda else 512)
    return [*(ON_GPU if cuda else ON_CPU), f"data.train=[{{path: {prefix}}}]", *TRAINING, *overrides]


def check_configs(device: str, work: Path, overrides: list[str]) -> int:
    """Composes and validates every layout's config as the command does; starts nothing."""
    from megads.cli.main import run

    training = command(device, work, overrides)
    for layout in LAYOUTS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = run(["train", *training, *layout.overrides.split(), "run.dry_run=true", "run.check_memory=false"])
        if code:
            print(f"{layout.name}: exit code {code}")
            return 1
    print(f"{said.getvalue().strip()}\n{len(LAYOUTS)} layouts can be composed")
    return 0


def first_loss(path: Path | None, run: str) -> float | None:
    """First loss of layout 0 in this run of gpu.sh; None if it has not run."""
    lines = lines_of_runs(path) if path is not None and path.exists() else []
    found = [line for line in lines if line["bench"] == "gpu_layouts" and line["run"] == run and line["number"] == 0]
    return float(found[-1]["first_loss"]) if found else None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=0, help="number of the layout")
    parser.add_argument("--configs", action="store_true", help="check all configs, start nothing")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("overrides", nargs="*", help="overrides of megads train")
    add_line_options(parser)
    arguments = parser.parse_args()
    device, work = arguments.device, arguments.work
    if arguments.configs:
        return check_configs(device, work, arguments.overrides)
    layout = LAYOUTS[arguments.number]
    run_dir = work / f"layout_{arguments.run}_{arguments.number}"
    words = [*command(device, work, arguments.overrides), *layout.overrides.split(), f"run.dir={run_dir}"]
    code = subprocess.run([sys.executable, "-m", "megads.cli.main", "train", *words], check=False).returncode
    if code:
        return code
    found = figures(run_dir, SKIPPED[device])
    shutil.rmtree(run_dir)
    reference = first_loss(arguments.append, arguments.run)
    off = None if reference is None else abs(found["first_loss"] / reference - 1)
    same = "" if off is None else f", first loss off by {off:.1e}{'' if off <= SAME_LOSS else ': NOT THE SAME'}"
    text = f"{found['step_time_s'] * 1e3:.0f} ms, {found['tokens_per_s']:,.0f} tokens/s, MFU {found['mfu']:.1%}, "
    text += f"{found['peak_memory_bytes'] / 2**30:.1f} GiB{same}"
    line = {"name": f"train, {layout.name}", "number": arguments.number, "verdict": text}
    appender(arguments, "gpu_layouts")({**found, **line, "bench": "gpu_layouts"})
    print(text)
    return int(off is not None and off > SAME_LOSS)


if __name__ == "__main__":
    raise SystemExit(main())
