#!/usr/bin/env python3
"""Validation loss against training time on this machine: the demo's recipe, nanoGPT, Hugging Face's Trainer.

    git clone https://github.com/karpathy/nanoGPT
    python -m scripts.bench.small_machine --nanogpt nanoGPT --picture docs/notes/pictures/small_machine.png

All train on the demo's text with its tokenizer, at its model's size, for the same time on the same cores, each with its
own program and with a learning rate that decays until the end of that time: megads as `make demo` does; nanoGPT's
train.py, unchanged, with its README's settings for a CPU; transformers' GPT-2 with its Trainer and default settings, in
fp32 or with bf16=True, whichever is faster here. Both peers warm up for a twentieth of their steps, and are tried with
each of --lr at the first of --batch, and with the other batch sizes at the best learning rate; their best run is shown.
A few steps first determine how many fit into the time; starts and validations are not counted. Losses are means over
the same validation tokens.

On a machine that others use, --by processor gives each side the same CPU time instead of the same wall-clock time, and
the peers one thread, because threads that wait for each other count as busy.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, open_run_data
from megads.data.config import HELD_OUT
from megads.data.sampling.datasets import open_dataset
from megads.data.sampling.runs import copy_tokens
from megads.data.sampling.samples import split_documents
from megads.evaluate.config import loss_key
from megads.runtime.environment import available_cores
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, METRICS_FILE
from megads.train.evaluation_hooks import validated
from scripts.bench.results import Verdict, add_results_option, record
from scripts.bench.small_machine_sides import NO_TOKEN, SideWork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
OURS, NANOGPT, TRAINER = "megads", "nanoGPT", "HF Trainer"
POINTS = 6
"""Validations per run, equally spaced."""
MARKS = (1 / 6, 1 / 3, 2 / 3, 1.0)
"""Columns of the table, as fractions of the time."""
TRIAL_STEPS = {OURS: 40, NANOGPT: 12, TRAINER: 12}
VALIDATED_TOKENS, QUICK_TOKENS = 40_960, 8_192
SAME_SIZE = 0.02
"""Maximum difference of the numbers of parameters, relative to megads'."""


@dataclass(frozen=True)
class Point:
    """A validation: steps, wall-clock and CPU seconds of training before it, and its loss."""

    step: int
    clock_s: float
    processor_s: float
    loss: float

    def spent_s(self, by: str) -> float:
        return self.clock_s if by == "clock" else self.processor_s


@dataclass(frozen=True)
class Curve:
    """Losses of one run over time.

    Attributes:
        side: OURS, NANOGPT or TRAINER.
        lr: peak learning rate; None is the recipe's.
        batch: samples per step.
        tokens: tokens per step.
        parameters: number of parameters.
        points: in order.
    """

    side: str
    lr: float | None
    batch: int
    tokens: int
    parameters: int
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        return self.side if self.lr is None else f"{self.side}, lr {self.lr:g}, batch {self.batch}"

    @property
    def loss(self) -> float:
        return self.points[-1].loss

    def loss_at(self, spent_s: float, by: str) -> float:
        """Linear interpolation between validations; constant before the first and after the last."""
        return float(np.interp(spent_s, [point.spent_s(by) for point in self.points], [p.loss for p in self.points]))

    def reached_s(self, loss: float, by: str) -> float | None:
        """Seconds after which the loss was first at or below this value; None if never."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.loss <= loss:
                share = (before.loss - loss) / (before.loss - after.loss) if before.loss > loss else 0.0
                return before.spent_s(by) + share * (after.spent_s(by) - before.spent_s(by))
        return None


@dataclass(frozen=True)
class Bench:
    """Setup of the comparison.

    Attributes:
        folder: absolute path of the folder of data and runs.
        seconds: seconds of training.
        by: clock or processor.
        cores: number of cores, for CPU seconds.
        nanogpt: checkout of nanoGPT; None omits it.
        tokens: tokens per validation.
    """

    folder: Path
    seconds: float
    by: str
    cores: int
    nanogpt: Path | None
    tokens: int = VALIDATED_TOKENS

    @property
    def budget_s(self) -> float:
        """Seconds of training of each side, wall-clock or CPU."""
        return self.seconds * (self.cores if self.by == "processor" else 1)

    def threads(self) -> dict[str, str]:
        """Environment of the peers: torch's default of all cores, or one thread if CPU time is compared."""
        return dict(os.environ) | ({"OMP_NUM_THREADS": "1"} if self.by == "processor" else {})


def call(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Runs a command; if it fails, prints its output and exits."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def train_ours(bench: Bench, name: str, steps: int, points: int, overrides: Sequence[str] = ()) -> Curve:
    """Trains the demo's recipe with the real command; `points` validations, the last one at the end."""
    run_dir = bench.folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    call([
        sys.executable, "-m", "megads.cli.main", "train", "experiment=demo", f"run.dir={run_dir}", f"run.id={name}",
        f"train.steps={steps}", f"evaluation.every_steps={steps // points}",
        f"evaluation.max_tokens={bench.tokens}", f"checkpoint.every_steps={steps}", "logging.wandb.mode=disabled",
        "plugins=[scripts.bench.small_machine_sides]", "hooks.training_clock={}", *overrides,
    ])  # fmt: skip
    config = load_frozen(run_dir / CONFIG_FILE)
    losses = {
        line["step"]: line[loss_key(HELD_OUT)]
        for line in read_json_lines(run_dir / METRICS_FILE)
        if loss_key(HELD_OUT) in line
    }
    events = read_json_lines(run_dir / "events.jsonl")
    parameters = next(event["parameters"] for event in events if event["event"] == "start")
    ranks = [list(read_json_lines(path)) for path in sorted(run_dir.glob("clock_*.jsonl"))]
    batch = config.train.global_batch_size
    points_found = tuple(points_of_ranks(ranks, losses))
    return Curve(OURS, None, batch, batch * config.train.seq_len, parameters, points_found)


def points_of_ranks(ranks: Sequence[Sequence[dict[str, float]]], losses: dict[int, float]) -> list[Point]:
    """Computes the points of a run from the clocks of its ranks.

    Args:
        ranks: lines of `TrainingClock`, a list a rank; the clock of the first one counts, and processors of all.
        losses: of validations, by step. In the time of such a step the validation lies; it counts as the step alone,
            and as the median of the other steps' processor time.
    """
    clock_s = processor_s = 0.0
    usual_s = sum(float(np.median([line["processor_s"] for line in lines])) for lines in ranks)
    found = []
    for together in zip(*ranks, strict=True):
        step = int(together[0]["step"])
        if step in losses:
            clock_s, processor_s = clock_s + together[0]["step_time_s"], processor_s + usual_s
            found.append(Point(step, clock_s, processor_s, losses[step]))
        else:
            clock_s += together[0]["clock_s"]
            processor_s += sum(line["processor_s"] for line in together)
    return found


@dataclass(frozen=True)
class Peer:
    """How a peer trains.

    Attributes:
        side: NANOGPT or TRAINER.
        batch: samples per step.
        steps: steps that fit into the time.
        bf16: use autocast, in the Trainer.
    """

    side: str
    batch: int
    steps: int
    bf16: bool = False


def train_peer(bench: Bench, config: RootConfig, peer: Peer, lr: float, name: str, points: int) -> Curve:
    """Trains a peer in a separate process, at the size of the config's model."""
    output, model, side, steps = bench.folder / f"{name}.jsonl", config.model, peer.side, peer.steps
    output.unlink(missing_ok=True)
    work = SideWork(
        {NANOGPT: "nanogpt", TRAINER: "trainer"}[side], str(bench.folder), str(output), model.num_layers,
        model.hidden_size, model.num_heads, model.vocabulary, config.train.seq_len, steps, steps // points, lr,
        peer.batch, peer.bf16, str(bench.nanogpt or ""),
    )  # fmt: skip
    call([sys.executable, "-m", "scripts.bench.small_machine_sides", work.json], bench.threads())
    lines = list(read_json_lines(output))
    found = tuple(Point(**line) for line in lines if "loss" in line and line["step"])
    return Curve(side, lr, peer.batch, peer.batch * config.train.seq_len, lines[0]["parameters"], found)


def write_data(bench: Bench, config: RootConfig) -> None:
    """Writes the tokens of megads' training and validation in the format of the peers."""
    [item] = config.data.train
    dataset = open_dataset(config.data, item.path)
    shares = zip(("train", "val"), split_documents(dataset, config.data.split), strict=True)
    for share, documents in shares:
        dataset.stream(documents).astype(np.uint16).tofile(bench.folder / f"{share}.bin")
    (bench.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": config.model.vocabulary}))
    windows = validated(config, open_run_data(config)[1][HELD_OUT])
    tokens_bt = np.full((len(windows), windows.seq_len + 1), NO_TOKEN, np.int32)
    copy_tokens(windows.runs(np.arange(len(windows))), tokens_bt)
    np.save(bench.folder / "windows.npy", tokens_bt)


def steps_within(trial: Curve, budget_s: float, by: str) -> int:
    """Number of steps that fit, from the second half of a trial; a multiple of POINTS."""
    first, last = trial.points[-2:]
    step_s = (last.spent_s(by) - first.spent_s(by)) / (last.step - first.step)
    return max(round(budget_s / step_s / POINTS), 1) * POINTS


def try_peer(bench: Bench, config: RootConfig, side: str, batch: int, parameters: int) -> Peer:
    """Trains a few steps of a peer in each precision it has on CPUs; returns the steps that fit in the faster one."""
    found = []
    for bf16 in (False, True) if side == TRAINER else (False,):
        trial = train_peer(bench, config, Peer(side, batch, TRIAL_STEPS[side], bf16), 1e-3, "trial", 2)
        if abs(trial.parameters / parameters - 1) > SAME_SIZE:
            raise SystemExit(f"{side} has {trial.parameters:,} parameters, megads {parameters:,}")
        found.append(Peer(side, batch, steps_within(trial, bench.budget_s, bench.by), bf16))
    peer = max(found, key=lambda peer: peer.steps)
    print(f"{side}, batch {batch}: {peer.steps} steps fit{' in bf16' if peer.bf16 else ''}", flush=True)
    return peer


def say(curve: Curve) -> Curve:
    """Prints the result of a run."""
    last = curve.points[-1]
    print(
        f"{curve.name}: loss {curve.loss:.4f} after {last.step} steps, {last.step * curve.tokens:,} tokens, "
        f"{last.clock_s:.1f} s, {last.processor_s:.1f} s of processors",
        flush=True,
    )
    return curve


def search_peer(
    bench: Bench, config: RootConfig, side: str, parameters: int, rates: Sequence[float], batches: Sequence[int]
) -> tuple[list[Curve], Peer]:
    """Trains a peer with each learning rate at the first batch size, then with the other batch sizes at the best rate.

    Returns:
        The runs, and how the best one trained.
    """
    curves: list[Curve] = []
    peers: dict[int, Peer] = {}
    for batch in batches:
        peers[batch] = try_peer(bench, config, side, batch, parameters)
        for lr in [best(curves, side).lr] if curves else rates:
            assert lr is not None
            name = f"{side.replace(' ', '_')}_{lr:g}_{batch}"
            curves.append(say(train_peer(bench, config, peers[batch], lr, name, POINTS)))
    return curves, peers[best(curves, side).batch]


def run_all(
    bench: Bench, rates: Sequence[float], batches: Sequence[int], rounds: int, overrides: Sequence[str]
) -> list[Curve]:
    """Runs every side: the peers are searched in the first round; later rounds repeat the best run of each."""
    trial = train_ours(bench, "trial", TRIAL_STEPS[OURS], 2, overrides)
    steps = steps_within(trial, bench.budget_s, bench.by)
    config = load_frozen(bench.folder / "trial" / CONFIG_FILE)
    write_data(bench, config)
    curves = [say(train_ours(bench, "megads_0", steps, POINTS, overrides))]
    peers = []
    for side in (NANOGPT, TRAINER):
        if side == TRAINER or bench.nanogpt is not None:
            found, peer = search_peer(bench, config, side, trial.parameters, rates, batches)
            curves += found
            peers.append(peer)
    for number in range(1, rounds):
        curves.append(say(train_ours(bench, f"megads_{number}", steps, POINTS, overrides)))
        for peer in peers:
            lr = best(curves, peer.side).lr
            assert lr is not None
            name = f"{peer.side.replace(' ', '_')}_round_{number}"
            curves.append(say(train_peer(bench, config, peer, lr, name, POINTS)))
    return curves


def best(curves: Sequence[Curve], side: str) -> Curve:
    """The run of a side with the lowest final loss."""
    return min((curve for curve in curves if curve.side == side), key=lambda curve: curve.loss)


def shown(curves: Sequence[Curve]) -> list[Curve]:
    """The best run of each side."""
    return [best(curves, side) for side in dict.fromkeys(curve.side for curve in curves)]


def table(curves: Sequence[Curve], bench: Bench) -> str:
    """Formats a Markdown table: losses after fractions of the time, one row per side."""
    unit = "s" if bench.by == "clock" else "s of processors"
    heads = ["", *(f"{share * bench.budget_s:.0f} {unit}" for share in MARKS), "steps", "tokens", "parameters"]
    lines = [heads, ["---"] * len(heads)]
    for curve in shown(curves):
        losses = [f"{curve.loss_at(share * bench.budget_s, bench.by):.3f}" for share in MARKS]
        step = curve.points[-1].step
        lines.append([curve.name, *losses, f"{step:,}", f"{step * curve.tokens:,}", f"{curve.parameters:,}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(curves: Sequence[Curve], bench: Bench) -> list[Verdict]:
    """How much sooner megads reaches the final loss of a peer."""
    ours, *peers = shown(curves)
    found = []
    for peer in peers:
        needed_s, took_s = ours.reached_s(peer.loss, bench.by), peer.points[-1].spent_s(bench.by)
        if needed_s is not None:
            work = f"validation loss {peer.loss:.3f} on a small machine"
            found.append(
                Verdict(0, work, f"{needed_s:.0f} s", peer.name, f"{took_s:.0f} s", took_s / max(needed_s, 1e-9))
            )
    return found


def draw(curves: Sequence[Curve], bench: Bench) -> Figure:
    """Draws loss over time, a line per side."""
    from matplotlib.figure import Figure

    from megads.tools.report.style import BLUE, GREEN, INK, ORANGE, REGULAR_INCHES

    figure = Figure(figsize=REGULAR_INCHES)
    axes = figure.subplots()
    for curve, colour, marker in zip(shown(curves), (BLUE, ORANGE, GREEN), "osD", strict=False):
        times = [point.spent_s(bench.by) for point in curve.points]
        losses = [point.loss for point in curve.points]
        axes.plot(times, losses, color=colour, marker=marker, markersize=4, label=curve.name)
    spent = "seconds of training" if bench.by == "clock" else "processor seconds of training"
    axes.set_xlabel(f"{spent}, {bench.cores} cores")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_xlim(left=0)
    axes.legend()
    figure.suptitle("The same text, tokenizer, model size and time", x=0.01, ha="left", color=INK)
    return figure


def save(figure: Callable[[], Figure], path: Path) -> None:
    """Saves the figure."""
    from megads.tools.report.style import house_style, png

    with house_style():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(figure()))
    print(f"picture: {path}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "small-machine", help="folder for data and runs")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT; without it this side is omitted")
    parser.add_argument("--minutes", type=float, default=1.5, help="minutes of training per run")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="learning rates of the peers")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 4], help="batch sizes of the peers, in samples")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side with its best learning rate")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, one try, less validation data")
    parser.add_argument(
        "--by", choices=("clock", "processor"), default="clock", help="time that is the same for all sides"
    )
    parser.add_argument("--override", action="append", default=[], help="override of megads' config")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    add_results_option(parser)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes / (10 if arguments.quick else 1)
    nanogpt = arguments.nanogpt.resolve() if arguments.nanogpt else None
    if nanogpt is not None and not (nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt {nanogpt}: has no train.py; git clone https://github.com/karpathy/nanoGPT")
    tokens = QUICK_TOKENS if arguments.quick else VALIDATED_TOKENS
    bench = Bench(arguments.folder.resolve(), seconds, arguments.by, available_cores(), nanogpt, tokens)
    bench.folder.mkdir(parents=True, exist_ok=True)
    call(["scripts/demo/run.sh", "data"], os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    rates, batches = (given[: 1 if arguments.quick else None] for given in (arguments.lr, arguments.batch))
    curves = run_all(bench, rates, batches, arguments.rounds, arguments.override)
    print(f"\n{table(curves, bench)}\n")
    if nanogpt is None:
        print("nanoGPT was left out: git clone https://github.com/karpathy/nanoGPT, and give --nanogpt nanoGPT")
    if arguments.picture:
        save(lambda: draw(curves, bench), arguments.picture)
    figures: dict[str, Any] = {"seconds": seconds, "by": "fastest_ms" if bench.by == "clock" else "processor_ms"}
    record(
        arguments.append, "small_machine", figures | {"curves": [asdict(c) for c in curves]}, verdicts(curves, bench)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
