#!/usr/bin/env python3
"""1,000 steps on real text with ops.impl=fused against torch: the same curve, and the same model at the end.

    python -m scripts.bench.long_run --folder runs/long_run --picture docs/pictures/long_run.png

Trains a small model on the demo's text by the real command, in fp32, from three seeds with each implementation. Over
the first 200 steps every loss must be within 1e-4 of the other implementation's, relative; rounding grows from step to
step, so at the end validation losses are held to what chance does: their difference must be within the spread (largest
minus smallest) of the seeds. The same command again continues runs that were stopped, and shows those that are done.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megads.runtime.environment import available_cores
from megads.runtime.metrics import read_json_lines
from scripts.bench.results import add_results_option, record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = (1, 2, 3)
IMPLEMENTATIONS = ("torch", "fused")
COMPARED = 200
BOUND = 1e-4
SMOOTHED = 20
SMALLEST = 1e-9
"""Drawn, of a difference."""
SHAPE = {
    "model.num_layers": 2,
    "model.hidden_size": 128,
    "model.num_heads": 4,
    "model.max_seq_len": 128,
    "tokenizer.vocab_size": 2048,
    "train.seq_len": 128,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 8,
    "train.precision": "fp32",
    "optim.lr": 2e-3,
    "optim.min_lr": 2e-4,
    "schedule.warmup_samples": 400,
    "data.split": "[0.97, 0.03]",
    "cluster.threads_per_rank": 1,
    "cluster.peak_tflops": 1,
    "logging.console": "quiet",
    "logging.wandb.mode": "disabled",
}
"""Overrides of every run: 0.66 M parameters, 1,024 tokens a step."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        losses: of every step.
        validation: token mean over the validation set after the last step.
    """

    losses: list[float]
    validation: float

    @classmethod
    def read(cls, run_dir: Path) -> Curve:
        """From metrics.jsonl of a finished run."""
        lines = list(read_json_lines(run_dir / "metrics.jsonl"))
        ended = next(line for line in reversed(lines) if "loss" not in line)
        return cls(
            [line["loss"] for line in lines if "loss" in line],
            next(value for key, value in ended.items() if key.endswith("/loss") and key.startswith("valid/")),
        )


Curves = dict[tuple[str, int], Curve]
"""By implementation and seed."""


def command(*words: str) -> None:
    """Runs a command of this Python; ends the program with what it said where it fails."""
    done = subprocess.run(
        [sys.executable, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def overrides(folder: Path, steps: int) -> list[str]:
    """What all runs share."""
    shape = [f"{key}={value}" for key, value in SHAPE.items()]
    return [*shape, f"data.raw={folder / 'text.jsonl'}", f"data.cache_dir={folder / 'cache'}", f"train.steps={steps}"]


def prepare(folder: Path, steps: int, megabytes: float) -> None:
    """Text, tokenizer and index maps, once."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    if not text.exists():
        sizes = ("--min-megabytes", str(megabytes / 2), "--max-megabytes", str(megabytes))
        command("scripts/demo/collect_corpus.py", "--output", str(text), *sizes)
    first = f"run.dir={folder / 'prepared'}"
    command("-m", "megads.cli.main", "train", *overrides(folder, steps), first, "run.prepare_only=true")


def train(folder: Path, steps: int, implementation: str, seed: int) -> Curve:
    """One run, continued where it was stopped."""
    run_dir = folder / f"{implementation}_{seed}"
    own = (f"ops.impl={implementation}", f"train.seed={seed}", f"run.dir={run_dir}")
    command("-m", "megads.cli.main", "train", *overrides(folder, steps), *own)
    return Curve.read(run_dir)


def train_all(folder: Path, steps: int) -> Curves:
    """Every implementation from every seed, as many at a time as there are cores."""
    runs = [(implementation, seed) for seed in SEEDS for implementation in IMPLEMENTATIONS]
    with ThreadPoolExecutor(available_cores()) as pool:
        curves = pool.map(lambda run: train(folder, steps, *run), runs)
        return dict(zip(runs, curves, strict=True))


def drift(curves: Curves, seed: int) -> list[float]:
    """Relative difference of the two implementations' losses, step by step."""
    return [
        abs(fused / torchs - 1)
        for fused, torchs in zip(curves["fused", seed].losses, curves["torch", seed].losses, strict=True)
    ]


def spread(curves: Curves, implementation: str) -> float:
    """Largest minus smallest validation loss over the seeds."""
    ends = [curves[implementation, seed].validation for seed in SEEDS]
    return max(ends) - min(ends)


def verdict(curves: Curves) -> list[str]:
    """What does not hold."""
    wrong = []
    allowed = spread(curves, "torch")
    for seed in SEEDS:
        largest = max(drift(curves, seed)[:COMPARED])
        apart = abs(curves["fused", seed].validation - curves["torch", seed].validation)
        if not largest <= BOUND:
            wrong.append(
                f"seed {seed}: a loss of the first {COMPARED} steps is off by {largest:.1e}, bound {BOUND:.0e}"
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
        f"{spread(curves, 'fused'):.4f} (fused); bound of the first steps {BOUND:.0e}"
    )


def draw(curves: Curves) -> Figure:
    """Left the losses, right how far the implementations are apart."""
    from matplotlib.figure import Figure

    from megads.report.series import smooth
    from megads.report.style import BLUE, CYCLE, INK, MUTED, ORANGE, WIDE_INCHES

    steps = range(1, len(curves["torch", SEEDS[0]].losses) + 1)
    figure = Figure(figsize=WIDE_INCHES)
    figure.suptitle(
        f"{len(steps):,} steps, ops.impl=fused against torch, {len(SEEDS)} seeds", x=0.01, ha="left", color=INK
    )
    left, right = figure.subplots(1, 2)
    for seed in SEEDS:
        for name, colour, width in (("torch", ORANGE, 2.2), ("fused", BLUE, 0.7)):
            label = f"ops.impl={name}" if seed == SEEDS[0] else None
            losses = smooth(np.array(curves[name, seed].losses), SMOOTHED)
            left.plot(steps, losses, color=colour, linewidth=width, label=label)
        # Where the losses are equal there is no difference to draw on a log scale.
        apart = np.maximum(drift(curves, seed), SMALLEST)
        right.plot(steps, apart, linewidth=0.8, color=CYCLE[seed - 1], label=f"seed {seed}")
    right.plot([1, min(COMPARED, len(steps))], [BOUND, BOUND], color=MUTED, linestyle=(0, (5, 3)), label="bound")
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


def save(curves: Curves, path: Path, say: Callable[[str], None]) -> None:
    """Draws into a file."""
    from megads.report.style import house_style, png

    with house_style():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(draw(curves)))
    say(f"picture: {path}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/long_run"), help="text and runs")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of text")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    add_results_option(parser)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    prepare(folder, arguments.steps, arguments.megabytes)
    curves = train_all(folder, arguments.steps)
    show(curves)
    if arguments.picture:
        save(curves, arguments.picture, print)
    wrong = verdict(curves)
    print("\n".join(wrong) or "the same curve, and the same model at the end")
    runs = {f"{name}, seed {seed}": curve.validation for (name, seed), curve in curves.items()}
    record(arguments.append, "long_run", {"steps": arguments.steps, "validation": runs, "faults": wrong})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
