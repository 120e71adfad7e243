#!/usr/bin/env python3
"""Validation loss of experiment=dial over depths at equal minutes, and whether its learning rate suits each depth.

    python -m scripts.bench.dial [--depths 2 4 6 8] [--minutes 5 | --steps 200] [--rate-depths 2 4 8]
        [--multiples 0.25 0.5 1 2 4]

Each depth trains with `megads train experiment=dial dial.depth=<depth> dial.minutes=<minutes>` on the demo's text, with
sequences of --seq-len tokens at every depth, so that losses compare. Then the depths of --rate-depths train again for
as many steps, with multiples of the recipe's learning rate. The rate transfers if the best multiple is the same at all
depths. Starts, the timing of steps, and saving are not counted.

With --steps all depths train as many steps instead, so that no loss depends on the speed of the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megads.config.frozen import load_frozen
from megads.config.root import RootConfig
from megads.data.config import HELD_OUT
from megads.evaluate.config import loss_key
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from scripts.bench.results import add_results_option, record

ROOT = Path(__file__).parents[2]
DATA = ROOT / "runs" / "demo-data" / "corpus"


@dataclass(frozen=True)
class DialRun:
    """A finished run.

    Attributes:
        depth: value of dial.depth.
        multiple: multiple of the recipe's learning rate.
        lr: peak learning rate.
        steps, tokens: length.
        batch: samples per step.
        parameters: number of parameters, embeddings included.
        training_s: seconds of all steps.
        loss: last validation loss, nats per token.
    """

    depth: int
    multiple: float
    lr: float
    steps: int
    tokens: int
    batch: int
    parameters: int
    training_s: float
    loss: float


def train(folder: Path, overrides: Sequence[str]) -> Path:
    """Trains with the real command; returns the run directory. Exits with its output if it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable, "-m", "megads", "train", "experiment=dial", "data.raw=null", f"data.train=[{{path: {DATA}}}]",
        f"run.dir={folder}", f"run.id={folder.name}", "checkpoint.every_minutes=0", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return folder


def result(run_dir: Path, multiple: float) -> tuple[DialRun, RootConfig]:
    """Reads a finished run, and its frozen config."""
    config = load_frozen(run_dir / CONFIG_FILE)
    lines = list(read_json_lines(run_dir / METRICS_FILE))
    steps = [line for line in lines if "step_time_s" in line]
    losses = [line[loss_key(HELD_OUT)] for line in lines if loss_key(HELD_OUT) in line]
    parameters = next(
        event["parameters"] for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] == "start"
    )
    assert config.dial.depth is not None
    found = DialRun(
        config.dial.depth, multiple, config.optim.lr, int(steps[-1]["step"]), int(steps[-1]["tokens"]),
        config.train.global_batch_size, parameters, sum(line["step_time_s"] for line in steps), losses[-1],
    )  # fmt: skip
    return found, config


def at_depth(folder: Path, depth: int, length: str, overrides: Sequence[str]) -> tuple[DialRun, RootConfig]:
    """Trains one depth with its recipe; `length` is an override."""
    own = [f"dial.depth={depth}", length, *overrides]
    return result(train(folder / f"depth_{depth}", own), 1.0)


def at_rate(folder: Path, base: DialRun, config: RootConfig, multiple: float, overrides: Sequence[str]) -> DialRun:
    """Trains as many steps as another run of the depth, at a multiple of its learning rate."""
    own = [
        f"dial.depth={base.depth}", f"train.steps={base.steps}", f"train.global_batch_size={base.batch}",
        f"optim.lr={config.optim.lr * multiple}", f"optim.weight_decay={config.optim.weight_decay}",
        f"schedule.warmup_samples={config.schedule.warmup_samples}", *overrides,
    ]  # fmt: skip
    return result(train(folder / f"depth_{base.depth}_rate_{multiple:g}", own), multiple)[0]


def best_multiples(rates: Sequence[DialRun]) -> Mapping[int, float]:
    """The multiple of the recipe's rate with the lowest loss, by depth."""
    return {
        depth: min((run for run in rates if run.depth == depth), key=lambda run: run.loss).multiple
        for depth in dict.fromkeys(run.depth for run in rates)
    }


def transfer_verdict(rates: Sequence[DialRun]) -> str:
    """Says whether the best multiple is the same at all depths; unknown if it is the smallest or largest one tried."""
    best, multiples = set(best_multiples(rates).values()), {run.multiple for run in rates}
    if edges := sorted(best & {min(multiples), max(multiples)}):
        tried = ", ".join(f"x {multiple:g}" for multiple in edges)
        return f"not known: {tried} is best and at the edge of --multiples, so that one beyond it may be better"
    if len(best) > 1:
        return f"the best multiples differ: {', '.join(f'x {multiple:g}' for multiple in sorted(best))}"
    return f"the best multiple is the same at all depths: x {best.pop():g}"


def depth_table(runs: Sequence[DialRun]) -> str:
    """Formats a Markdown table, a row per depth."""
    lines = ["| depth | parameters | batch | steps | tokens | seconds | loss |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {run.depth} | {run.parameters:,} | {run.batch} | {run.steps:,} | {run.tokens:,} | {run.training_s:.0f} | "
        f"{run.loss:.3f} |"
        for run in runs
    ]
    return "\n".join(lines)


def rate_table(rates: Sequence[DialRun]) -> str:
    """Formats a Markdown table of losses, a row per depth and a column per multiple; * marks the best."""
    multiples, best = sorted({run.multiple for run in rates}), best_multiples(rates)
    losses = {(run.depth, run.multiple): run.loss for run in rates}
    lines = [
        f"| depth | {' | '.join(f'x {multiple:g}' for multiple in multiples)} |",
        "|---" * (1 + len(multiples)) + "|",
    ]
    for depth, chosen in best.items():
        cells = (
            f"{losses[depth, m]:.3f}{'*' if m == chosen else ''}" if (depth, m) in losses else "" for m in multiples
        )
        lines.append(f"| {depth} | {' | '.join(cells)} |")
    return "\n".join(lines)


def processor_name() -> str:
    """Name of this machine's processor and its number of usable cores."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{len(os.sched_getaffinity(0))} cores of {next(named, platform.machine())}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "dial", help="folder of the runs")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 6, 8])
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--minutes", type=float, default=5.0, help="minutes of training per run")
    lengths.add_argument("--steps", type=int, help="steps of each run, instead")
    parser.add_argument(
        "--rate-depths", type=int, nargs="*", default=[2, 4, 8], help="depths of the sweep; of --depths"
    )
    parser.add_argument("--multiples", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence at every depth")
    parser.add_argument("--override", action="append", default=[], help="override of megads' config, for all runs")
    add_results_option(parser)
    arguments = parser.parse_args()
    if not set(arguments.rate_depths) <= set(arguments.depths):
        parser.error(f"--rate-depths {arguments.rate_depths} must be among --depths {arguments.depths}")
    if not DATA.with_suffix(".idx").exists():
        parser.error(f"{DATA}.idx does not exist: scripts/demo/run.sh data prepares it")
    folder = arguments.folder.resolve()
    common = [
        f"train.seq_len={arguments.seq_len}", "train.min_steps=10", "evaluation.max_tokens=40960", *arguments.override
    ]  # fmt: skip
    runs, rates = list[DialRun](), list[DialRun]()
    length = f"train.steps={arguments.steps}" if arguments.steps else f"dial.minutes={arguments.minutes:g}"
    print(f"{processor_name()}, {length}", flush=True)
    for depth in arguments.depths:
        run, config = at_depth(folder, depth, length, common)
        print(f"depth {depth}: loss {run.loss:.4f} after {run.steps} steps, {run.tokens:,} tokens", flush=True)
        runs.append(run)
        if depth in arguments.rate_depths:
            rates.append(run)
            for multiple in arguments.multiples:
                if multiple != 1.0:
                    rates.append(at_rate(folder, run, config, multiple, common))
                    print(f"depth {depth}, rate x {multiple:g}: loss {rates[-1].loss:.4f}", flush=True)
    print(f"\n{depth_table(runs)}\n")
    if rates:
        print(f"{rate_table(rates)}\n")
        print(transfer_verdict(rates))
    figures = {"length": length, "processor": processor_name()}
    record(arguments.append, "dial", figures | {"runs": [asdict(run) for run in (*runs, *rates)]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
