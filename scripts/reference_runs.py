#!/usr/bin/env python3
"""Makes the reference runs of docs/runs: trains them, measures what another machine may differ by, and records both.

    python -m scripts.reference_runs speeches           the conversations of reference_sft, from the plays
    python -m scripts.reference_runs train [bloom ...]  each run and its variants in runs/reference/<name>/<variant>
    python -m scripts.reference_runs record [bloom ...] docs/runs/<name> and the tables of docs/runs.md, from these

A variant computes the same with other rounding. The tolerance of a step is FACTOR times the largest relative difference
that any of MEASURED showed up to then, because differences grow with the steps. CHECKED were not used for it: the page
says how much of the tolerance they took.

With experts, rounding decides between two experts whose scores are equal but for rounding, sooner or later, and the
losses jump apart. On another machine this may happen at any step, also at the first one: the differences from this
step on are taken as if they began at step 1.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from megads.errors import ConfigError
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, DATA_FILE, METRICS_FILE
from megads.tools.compare.comparison import REFERENCE_FILE, REFERENCES, Tolerance
from megads.tools.report.history import FloatArray, RunHistory, read_history
from megads.tools.report.style import BLUE, GREEN, ORANGE, PINK, RED
from scripts.demo.time_limit import processor

NAMES = ("bloom", "llama", "muon", "moe", "sft")
MEASURED: Mapping[str, tuple[str, ...]] = {
    "one_thread": ("cluster.threads_per_rank=1",),
    "torch": ("ops.impl=torch", "cluster.threads_per_rank=1"),
    "dp2": ("parallel.dp=2",),
}
"""Variants from which tolerances are computed, with their overrides."""
CHECKED: Mapping[str, tuple[str, ...]] = {"tp2": ("parallel.tp=2",)}
"""Variants that only check them."""
FACTOR = 10.0
FLOOR = {"loss": 1e-6, "grad_norm": 1e-5}
"""Least tolerance: fp32 sums in another order differ by this much in the first step."""
OTHER_EXPERT = 1e-6
"""Relative difference of a loss above which a token went to another expert: rounding alone gave 1e-7."""
KNOTS = (1, 2, 5, 10, 20, 30, 40, 50, 75, 100, 125, 150, 175, 200, 225, 250, 275, 300)
KEPT = ("step", "loss", "grad_norm", "lr", "batch_hash")
RUNS = Path("runs") / "reference"
TEXT = REFERENCES / "text"
PAGE = Path("docs") / "runs.md"
CONVERSATIONS, LONGEST_SPEECH = 2000, 600
"""Number of conversations, and the most characters of a speech that becomes one."""


def speeches(plays: str) -> list[dict[str, Any]]:
    """Returns conversations: the user gives speaker and first line of a speech, and the answer is its other lines.

    Args:
        plays: speeches separated by empty lines; the first line of each is `SPEAKER:`.
    """
    found = []
    for speech in plays.split("\n\n"):
        lines = speech.strip().split("\n")
        if len(lines) < 3 or len(speech) > LONGEST_SPEECH:
            continue
        question = f"Continue the speech of {lines[0].removesuffix(':')}: {lines[1]}"
        answer = "\n".join(lines[2:])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found[:CONVERSATIONS]


def write_speeches(folder: Path) -> Path:
    """Writes the conversations into a folder; the same text gives the same bytes with the same zlib."""
    with gzip.open(TEXT / "tinyshakespeare.txt.gz", "rt", encoding="utf-8") as file:
        records = speeches(file.read())
    path = folder / "speeches.jsonl.gz"
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content, mtime=0))
    return path


def train(name: str) -> None:
    """Trains a reference and its variants; those that finished are left as they are."""
    for variant, overrides in {"reference": (), **MEASURED, **CHECKED}.items():
        folder = RUNS / name / variant
        words = [f"experiment=reference_{name}", f"run.dir={folder}", f"run.id={variant}", "logging.every_steps=100"]
        command = [sys.executable, "-m", "megads", "train", *words, *overrides]
        print(f"{folder}: {' '.join(command[2:])}", flush=True)
        subprocess.run(command, check=True)


@dataclass(frozen=True)
class Differences:
    """Relative differences between a variant and the reference.

    Attributes:
        loss: of each step, the validation losses of the same step included.
        grad_norm: of each step.
    """

    loss: FloatArray
    grad_norm: FloatArray


def differences(variant: RunHistory, reference: RunHistory) -> Differences:
    """Returns the relative differences of each step of two runs; raises ConfigError if one is longer."""
    if not np.array_equal(variant.step, reference.step):
        raise ConfigError(f"{variant.run_dir} is not as long as its reference: train it to its end")

    def relative(found: FloatArray, wanted: FloatArray) -> FloatArray:
        return np.abs(found - wanted) / np.abs(wanted)

    loss = relative(variant.columns["loss"], reference.columns["loss"])
    for found, wanted in zip(variant.validations, reference.validations, strict=True):
        places = np.searchsorted(reference.step, wanted.step)
        loss[places] = np.maximum(loss[places], relative(found.loss, wanted.loss))
    return Differences(loss, relative(variant.columns["grad_norm"], reference.columns["grad_norm"]))


def from_other_expert(measured: Differences) -> Differences:
    """Returns the differences from the step on at which a token first went to another expert, as if it were step 1.

    The steps added at the end repeat the largest differences. A variant without such a step is returned as it is.
    """
    outside = np.flatnonzero(measured.loss > OTHER_EXPERT)
    first = int(outside[0]) if len(outside) else 0

    def shifted(values: FloatArray) -> FloatArray:
        return np.concatenate([values[first:], np.full(first, values.max())])

    return Differences(shifted(measured.loss), shifted(measured.grad_norm))


def tolerance(steps: FloatArray, measured: Iterable[FloatArray], floor: float) -> list[tuple[int, float]]:
    """Returns (step, relative difference), each valid from its step on: FACTOR times the largest difference so far.

    Args:
        steps: steps of the reference, 1, 2, ...
        measured: relative differences of each variant, by step.
        floor: least value.
    """
    largest = np.maximum.accumulate(np.max(list(measured), axis=0))
    knots = [knot for knot in KNOTS if knot <= steps[-1]]
    values = list[tuple[int, float]]()
    for knot, following in zip(knots, [*knots[1:], int(steps[-1]) + 1], strict=True):
        # A value holds until the next knot, so that it covers the difference of the last step before that.
        value = float(f"{max(FACTOR * float(largest[following - 2]), floor):.2g}")
        if not values or value > values[-1][1]:
            values.append((knot, value))
    return values


def record(name: str) -> str:
    """Writes docs/runs/<name> from the runs, and returns its row of the page's table."""
    reference = read_history(RUNS / name / "reference")
    variants = {path.name: path for path in sorted((RUNS / name).iterdir()) if path.name in (*MEASURED, *CHECKED)}
    found = {variant: differences(read_history(path), reference) for variant, path in variants.items()}
    fitted = [found[variant] for variant in MEASURED if variant in found]
    if reference.setting("model.moe.num_experts"):
        fitted = list(map(from_other_expert, fitted))
    if not fitted:
        raise ConfigError(f"{RUNS / name} has no variant: python -m scripts.reference_runs train {name}")
    tolerances = {
        quantity: tolerance(reference.step, [getattr(each, quantity) for each in fitted], floor)
        for quantity, floor in FLOOR.items()
    }
    folder = REFERENCES / name
    folder.mkdir(exist_ok=True)
    with (folder / METRICS_FILE).open("w", encoding="utf-8") as ledger:
        for line in read_json_lines(reference.run_dir / METRICS_FILE):
            kept = {key: line[key] for key in KEPT if "loss" in line and key in line}
            kept |= {key: value for key, value in line.items() if key.startswith("valid/") and key.endswith("/loss")}
            if kept:
                ledger.write(json.dumps({"step": line["step"], **kept}) + "\n")
    for file in (CONFIG_FILE, DATA_FILE):
        shutil.copyfile(reference.run_dir / file, folder / file)
    largest = {
        variant: {quantity: float(f"{getattr(each, quantity).max():.2g}") for quantity in FLOOR}
        for variant, each in found.items()
    }
    instructions = "AVX-512" if "avx512f" in processor()[1] else "AVX2" if "avx2" in processor()[1] else "no AVX2"
    content = {
        "command": f"megads train experiment=reference_{name}",
        "machine": f"{processor()[0]} ({instructions}, {os.cpu_count()} cores), torch {torch.__version__}",
        "factor": FACTOR,
        "tolerance": tolerances,
        "largest_differences": largest,
    }
    (folder / REFERENCE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(reference, found, tolerances, folder / "loss.png")
    return _row(name, reference, found, tolerances)


def _row(
    name: str,
    reference: RunHistory,
    found: Mapping[str, Differences],
    tolerances: Mapping[str, list[tuple[int, float]]],
) -> str:
    """The row of docs/runs.md: final losses, largest differences, tolerance at the end, share that CHECKED took."""
    valid = reference.validations[0]
    largest = [found[variant].loss.max() if variant in found else None for variant in (*MEASURED, *CHECKED)]
    shown = ["-" if value is None else f"{value:.1e}" if value else "0" for value in largest]
    shares = [
        float((getattr(found[variant], quantity) / _by_step(tolerances[quantity], reference.step)).max())
        for variant in CHECKED
        if variant in found
        for quantity in FLOOR
    ]
    share = f"{max(shares):.0%}" if shares else "-"
    return (
        f"| [{name}](runs/{name}/loss.png) | {reference.step[-1]:.0f} | {reference.columns['loss'][-1]:.4f} | "
        f"{valid.loss[-1]:.4f} | {' | '.join(shown)} | {tolerances['loss'][0][1]:.1e}, {tolerances['loss'][-1][1]:.1e} "
        f"| {share} |"
    )


def _by_step(knots: list[tuple[int, float]], steps: FloatArray) -> FloatArray:
    places, values = zip(*knots, strict=True)
    return Tolerance(places, values).at(steps)


def draw(
    reference: RunHistory,
    found: Mapping[str, Differences],
    tolerances: Mapping[str, list[tuple[int, float]]],
    path: Path,
) -> None:
    """Draws the losses of a reference, and beside them the differences of its variants below the tolerance."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(reference.step, reference.columns["loss"], color=BLUE, linewidth=0.8, label="training")
    for validation in reference.validations:
        left.plot(validation.step, validation.loss, "o-", color=ORANGE, markersize=3, label="validation")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    right.step(reference.step, _by_step(tolerances["loss"], reference.step), color=RED, label="tolerance")
    for colour, (variant, each) in zip((GREEN, BLUE, ORANGE, PINK), found.items(), strict=False):
        if each.loss.any():
            right.plot(reference.step, np.where(each.loss > 0, each.loss, np.nan), color=colour, lw=0.6, label=variant)
    right.set(xlabel="step", ylabel="relative difference of the loss", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    # A fifth of the size: a chart has few colours.
    Image.open(drawn).convert("RGB").quantize(96).save(path, optimize=True)


BEGIN, END = "<!-- table: python -m scripts.reference_runs record -->", "<!-- end of the table -->"


def write_rows(rows: Mapping[str, str]) -> None:
    """Replaces the rows of these runs in the table of the page."""
    before, table, after = _parts(PAGE.read_text(encoding="utf-8"))
    lines = table.strip().split("\n")
    kept = {name: line for name in NAMES for line in lines if line.startswith(f"| [{name}]")} | dict(rows)
    rebuilt = [*lines[:2], *(kept[name] for name in NAMES if name in kept)]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *rebuilt, "", f"{END}{after}"]), encoding="utf-8")


def _parts(page: str) -> tuple[str, str, str]:
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


def main() -> int:
    """Runs the command and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("speeches", "train", "record"))
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NAMES)}; default: all")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no reference run is called {', '.join(sorted(unknown))}: they are {', '.join(NAMES)}")
    if arguments.action == "speeches":
        print(write_speeches(TEXT))
    elif arguments.action == "train":
        for name in names:
            train(name)
    else:
        write_rows({name: record(name) for name in names})
    return 0


if __name__ == "__main__":
    sys.exit(main())
