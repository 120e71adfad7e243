#!/usr/bin/env python3
"""1,000 steps on real text with ops.impl=fused and torch: same loss curve, and same validation loss at the end.

    python -m scripts.bench.long_run --folder runs/long_run --picture docs/notes/pictures/long_run.png

Trains a small model on the demo's text with the real command from three seeds with each implementation. In fp32 every
loss of the first 200 steps must be within 1e-4 (relative) of the other implementation's; --precision bf16 rounds more
than that. At the end the difference between the validation losses must be within the spread (largest minus smallest) of
the seeds. The same command continues interrupted runs, and shows finished ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megads.runtime.environment import available_cores
from megads.runtime.metrics import read_json_lines
from scripts.bench.results import add_results_option, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2, 3)
IMPLEMENTATIONS = ("torch", "fused")
COMPARED = 200
BOUND = {"fp32": 1e-4, "bf16": math.inf}
"""Bound on the relative difference of losses in the first steps, by precision."""
SMOOTHED = 20
WARMUP_SAMPLES = 400
"""At most a quarter of the run."""
SHAPE: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "model.num_heads": 4,
    "model.max_seq_len": 128,
    "tokenizer.vocab_size": 2048,
    "train.seq_len": 128,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "optim.lr": 2e-3,
    "optim.min_lr": 2e-4,
    "data.split": "[0.97, 0.03]",
    "cluster.threads_per_rank": 1,
    "cluster.peak_tflops": 1,
    "logging.console": "quiet",
    "logging.wandb.mode": "disabled",
}
"""Overrides of every run: 0.66 M parameters, 1,024 tokens a step."""


@dataclass(frozen=True)
class Curve:
    """Losses of one run.

    Attributes:
        losses: loss of every step.
        validation: mean loss per token over the validation set after the last step.
    """

    losses: list[float]
    validation: float

    @classmethod
    def read(cls, run_dir: Path) -> Curve | None:
        """Reads metrics.jsonl of a run; None before its end."""
        lines = list(read_json_lines(run_dir / "metrics.jsonl"))
        ended = next((line for line in reversed(lines) if "loss" not in line), None)
        if ended is None:
            return None
        return cls(
            [line["loss"] for line in lines if "loss" in line],
            next(value for key, value in ended.items() if key.endswith("/loss") and key.startswith("valid/")),
        )


Curves = dict[tuple[str, int], Curve]
"""By implementation and seed."""


def command(*words: str) -> None:
    """Runs a command with this Python; if it fails, prints its output and exits."""
    done = subprocess.run(
        [sys.executable, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        folder: absolute path of the folder of text and runs.
        steps: steps of every run.
        precision: fp32 or bf16.
    """

    folder: Path
    steps: int
    precision: str

    @property
    def overrides(self) -> list[str]:
        """Overrides of all runs."""
        shape = [f"{key}={value}" for key, value in SHAPE.items()]
        samples = self.steps * SHAPE["train.global_batch_size"]
        shape.append(f"schedule.warmup_samples={min(WARMUP_SAMPLES, samples // 4)}")
        data = [f"data.raw={self.folder / 'text.jsonl'}", f"data.cache_dir={self.folder / 'cache'}"]
        return [*shape, *data, f"train.steps={self.steps}", f"train.precision={self.precision}"]

    def run_dir(self, implementation: str, seed: int) -> Path:
        return self.folder / f"{self.precision}_{implementation}_{seed}"


def prepare(work: Comparison, megabytes: float) -> None:
    """Prepares text, tokenizer and index maps, once."""
    folder = work.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    if not text.exists():
        sizes = ("--min-megabytes", str(megabytes / 2), "--max-megabytes", str(megabytes))
        command("scripts/demo/collect_corpus.py", "--output", str(text), *sizes)
    first = f"run.dir={folder / 'prepared'}"
    command("-m", "megads.cli.main", "train", *work.overrides, first, "run.prepare_only=true")


def train(work: Comparison, implementation: str, seed: int) -> Curve:
    """Trains one run, or resumes it."""
    run_dir = work.run_dir(implementation, seed)
    if (done := Curve.read(run_dir)) is not None and len(done.losses) == work.steps:
        return done
    own = (f"ops.impl={implementation}", f"train.seed={seed}", f"run.dir={run_dir}")
    command("-m", "megads.cli.main", "train", *work.overrides, *own)
    trained = Curve.read(run_dir)
    assert trained is not None
    return trained


def train_all(work: Comparison) -> Curves:
    """Trains every implementation from every seed, as many concurrently as there are cores."""
    runs = [(implementation, seed) for seed in SEEDS for implementation in IMPLEMENTATIONS]
    with ThreadPoolExecutor(available_cores()) as pool:
        curves = pool.map(lambda run: train(work, *run), runs)
        return dict(zip(runs, curves, strict=True))


def drift(curves: Curves, seed: int) -> list[float]:
    """Relative difference of the two implementations' losses, per step."""
    return [
        abs(fused / torchs - 1)
        for fused, torchs in zip(curves["fused", seed].losses, curves["torch", seed].losses, strict=True)
    ]


def spread(curves: Curves, implementation: str) -> float:
    """Largest minus smallest validation loss over the seeds."""
    ends = [curves[implementation, seed].validation for seed in SEEDS]
    return max(ends) - min(ends)


def verdict(curves: Curves, precision: str) -> list[str]:
    """Returns the conditions that are not met."""
    wrong, bound = [], BOUND[precision]
    allowed = spread(curves, "torch")
    for seed in SEEDS:
        largest = max(drift(curves, seed)[:COMPARED])
        apart = abs(curves["fused", seed].validation - curves["torch", seed].validation)
        if not largest <= bound:
            wrong.append(
                f"seed {seed}: a loss of the first {COMPARED} steps is off by {largest:.1e}, bound {bound:.0e}"
            )
        if not apart <= allowed:
            wrong.append(f"seed {seed}: final losses {apart:.4f} apart, the seeds' spread is {allowed:.4f}")
    return wrong


def show(curves: Curves) -> None:
    """Prints a table."""
    print(
        f"| seed | largest difference in steps 1-{COMPARED} | in all | validation, torch | validation, fused | apart |"
    )
    print("|---|---|---|---|---|---|")
    for seed in SEEDS:
        torchs, fused, by_step = curves["torch", seed], curves["fused", seed], drift(curves, seed)
        print(
            f"| {seed} | {max(by_step[:COMPARED]):.1e} | {max(by_step):.1e} | {torchs.validation:.4f} "
            f"| {fused.validation:.4f} | {fused.validation - torchs.validation:+.4f} |"
        )
    means = [statistics.mean(curves[name, seed].validation for seed in SEEDS) for name in IMPLEMENTATIONS]
    print(
        f"means {means[0]:.4f} and {means[1]:.4f}; spread over the seeds {spread(curves, 'torch'):.4f} (torch), "
        f"{spread(curves, 'fused'):.4f} (fused)"
    )


def draw(curves: Curves, precision: str) -> Figure:
    """Draws the losses on the left, and the difference between the implementations on the right."""
    from matplotlib.figure import Figure

    from megads.tools.report.charts import smooth
    from megads.tools.report.style import BLUE, CYCLE, INK, MUTED, ORANGE, WIDE_INCHES

    steps = range(1, len(curves["torch", SEEDS[0]].losses) + 1)
    figure = Figure(figsize=WIDE_INCHES)
    figure.suptitle(f"{len(steps):,} steps in {precision}, ops.impl=fused against torch", x=0.01, ha="left", color=INK)
    left, right = figure.subplots(1, 2)
    for seed in SEEDS:
        for name, colour, width in (("torch", ORANGE, 2.2), ("fused", BLUE, 0.7)):
            label = f"ops.impl={name}" if seed == SEEDS[0] else None
            losses = smooth(np.array(curves[name, seed].losses), SMOOTHED)
            left.plot(steps, losses, color=colour, linewidth=width, label=label)
        # Equal losses cannot be drawn on a log scale.
        apart = [(step, value) for step, value in zip(steps, drift(curves, seed), strict=True) if value]
        right.plot(*zip(*apart, strict=True), ".", markersize=3, color=CYCLE[seed - 1], label=f"seed {seed}")
    if math.isfinite(bound := BOUND[precision]):
        right.plot([1, min(COMPARED, len(steps))], [bound, bound], color=MUTED, linestyle=(0, (5, 3)), label="bound")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(lambda value, _place: f"{value:.0e}")
    for axes, label in (
        (left, f"nats per token, mean of {SMOOTHED} steps"),
        (right, "relative difference of the losses"),
    ):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend()
    return figure


def save(curves: Curves, precision: str, path: Path, say: Callable[[str], None]) -> None:
    """Saves the figure."""
    from megads.tools.report.style import house_style, png

    with house_style():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(draw(curves, precision)))
    say(f"picture: {path}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/long_run"), help="folder for text and runs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precision", choices=BOUND, default="fp32")
    parser.add_argument("--megabytes", type=float, default=8.0, help="size of the text")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    add_results_option(parser)
    arguments = parser.parse_args()
    work = Comparison(arguments.folder.resolve(), arguments.steps, arguments.precision)
    prepare(work, arguments.megabytes)
    curves = train_all(work)
    show(curves)
    if arguments.picture:
        save(curves, work.precision, arguments.picture, print)
    wrong = verdict(curves, work.precision)
    print("\n".join(wrong) or "the same curve, and the same model at the end")
    figures = {"steps": work.steps, "precision": work.precision}
    runs = {f"{name}, seed {seed}": curve.validation for (name, seed), curve in curves.items()}
    record(arguments.append, "long_run", {**figures, "validation": runs, "faults": wrong})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
