#!/usr/bin/env python3
"""Validation loss after equal minutes on this machine: megads' recipes beside those of other trainers.

    python -m scripts.bench.small_machine [--seconds 15 60 300] [--ours demo dial] [--nanogpt nanoGPT]

All train on the demo's text with its tokenizer, at about its model's size, for the same time on the same cores, each
with a learning rate that decays until the end of that time:

- megads: `experiment=demo` and `experiment=dial dial.depth=4`, as they are or with --override; no rate is searched;
- nanochat, modded: the recipes of nanochat for a CPU and of modded-nanogpt, with Muon (scripts/bench/muon_peers.py);
- HF Trainer: transformers' GPT-2 with its Trainer and default settings (AdamW), where transformers is installed;
- nanoGPT: its train.py, unchanged, with its README's settings for a CPU, with --nanogpt and a checkout of it.

Peers compute in fp32 or bf16, whichever is faster here. They warm up for a twentieth of their steps, and are tried
with each learning rate (AdamW: --lr; Muon: --multiple of the recipe's rates) at the first of --batch, and with the
other batch sizes at the best rate; their best run is shown. A few steps first determine how many fit into the time,
with a batch-size ramp steps of its first and of its final size; starts and validations are not counted. Losses are
means over the same validation tokens. The demo alone, with a ramp:

    python -m scripts.bench.small_machine --seconds 15 --ours demo --peers --override train.micro_batch_size=2 \\
        'train.batch_ramp={start: 4, increment: 4, samples: 160}'

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

from megads.config.dial import INPUTS, derive_recipe
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, batch_size_schedule, open_run_data
from megads.config.train import DialConfig
from megads.data.config import HELD_OUT
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.datasets import open_dataset
from megads.data.sampling.runs import copy_tokens
from megads.data.sampling.samples import split_documents
from megads.evaluate.config import EvaluationConfig, loss_key
from megads.launch.run_length import StepTiming
from megads.ops.processor import torch_loops_over_bf16
from megads.runtime.environment import available_cores
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import CONFIG_FILE, METRICS_FILE
from megads.train.evaluation_hooks import validated
from scripts.bench.dial import processor_name
from scripts.bench.muon_peers import RECIPES
from scripts.bench.results import Verdict, add_results_option, record
from scripts.bench.small_machine_sides import NO_TOKEN, SideWork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
OURS = {"demo": "megads, demo", "dial": "megads, dial"}
"""Name of each recipe of ours, by its experiment."""
NANOGPT, TRAINER, NANOCHAT, MODDED = "nanoGPT", "HF Trainer", "nanochat", "modded"
PEERS = {NANOCHAT: "nanochat", MODDED: "modded", TRAINER: "trainer", NANOGPT: "nanogpt"}
"""Program of each peer, by its name."""
DIAL_DEPTH = 4
POINTS = 6
"""Validations per run, equally spaced."""
MARKS = (1 / 6, 1 / 3, 2 / 3, 1.0)
"""Columns of the table, as fractions of the time."""
OUR_TRIAL_STEPS, TRIAL_STEPS = 24, 12
SAME_SIZE = 0.02
"""Maximum difference of the number of parameters of AdamW's peers, relative to the demo's. Those of Muon, and the dial,
have an untied head or value embeddings, and are larger."""


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
        side: a value of OURS, or a key of PEERS.
        lr: peak learning rate, or multiple of the recipe's; None is the recipe's.
        batch: samples per step, after the ramp if there is one.
        trained_tokens: tokens of all steps.
        parameters: number of parameters.
        points: in order.
    """

    side: str
    lr: float | None
    batch: int
    trained_tokens: int
    parameters: int
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        rate = f"rates x {self.lr:g}" if self.side in RECIPES else f"lr {self.lr}"
        return self.side if self.lr is None else f"{self.side}, {rate}, batch {self.batch}"

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
    tokens: int = 40_960

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


def train_ours(bench: Bench, experiment: str, name: str, steps: int, points: int, overrides: Sequence[str]) -> Curve:
    """Trains a recipe of ours with the real command; `points` validations, the last one at the end."""
    run_dir = bench.folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    if experiment == "dial":
        data = ROOT / "runs" / "demo-data" / "corpus"
        # The recipe of this time, trained for the steps that fit into it.
        recipe = [f"{key}={value}" for key, value in dial_values(bench).items()]
        overrides = ["data.raw=null", f"data.train=[{{path: {data}}}]", "train.seq_len=256", *recipe, *overrides]
    call([
        sys.executable, "-m", "megads", "train", f"experiment={experiment}", f"run.dir={run_dir}", f"run.id={name}",
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
    batches, points_found = batch_size_schedule(config), tuple(points_of_ranks(ranks, losses))
    tokens = batches.samples_after(steps) * config.train.seq_len
    return Curve(OURS[experiment], None, batches.global_batch_size, tokens, parameters, points_found)


def try_ours(bench: Bench, experiment: str, overrides: Sequence[str]) -> tuple[Curve, int]:
    """Trains a few steps of a recipe of ours; returns them, and the number of steps that fit.

    With a ramp, its first and final batch sizes are trained for as many steps, too.
    """
    name = f"trial_{experiment}"
    trial = train_ours(bench, experiment, name, OUR_TRIAL_STEPS, 2, overrides)
    batches, trials = batch_size_schedule(load_frozen(bench.folder / name / CONFIG_FILE)), [trial]
    if batches.at(0) < batches.global_batch_size:
        trials = [
            train_ours(
                bench, experiment, f"{name}_{size}", OUR_TRIAL_STEPS, 2,
                [*overrides, "train.batch_ramp.start=0", f"train.global_batch_size={size}"],
            )
            for size in (batches.at(0), batches.global_batch_size)
        ]  # fmt: skip
    return trial, steps_within(trials, batches, bench.budget_s, bench.by)


def dial_values(bench: Bench) -> dict[str, Any]:
    """Values of experiment=dial, at four layers, that follow from the time."""
    given = {"train.seq_len": 256}
    inputs = dict.fromkeys(INPUTS) | {
        "dial.depth": DIAL_DEPTH, "dial.aspect_ratio": 64, "dial.tokens_per_parameter": 20.0,
        "dial.minutes": bench.seconds / 60, "dial.tflops": DialConfig().tflops, "model.mlp": "gelu",
        "parallel.dp": 1, "parallel.pp": 1,
    }  # fmt: skip
    found = derive_recipe(inputs, given)
    # Weight decay and warmup follow from the number of steps that fit.
    return {"dial.depth": DIAL_DEPTH} | {key: found[key].value for key in ("train.global_batch_size", "optim.lr")}


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
        side: a key of PEERS.
        batch: samples per step.
        steps: steps that fit into the time.
        bf16: use autocast; nanoGPT has none on CPUs.
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
        PEERS[side], str(bench.folder), str(output), model.num_layers,
        model.hidden_size, model.num_heads, model.vocabulary, config.train.seq_len, steps, steps // points, lr,
        peer.batch, peer.bf16, str(bench.nanogpt or ""),
    )  # fmt: skip
    call([sys.executable, "-m", "scripts.bench.small_machine_sides", work.json], bench.threads())
    lines = list(read_json_lines(output))
    found = tuple(Point(**line) for line in lines if "loss" in line and line["step"])
    tokens = steps * peer.batch * config.train.seq_len
    return Curve(side, lr, peer.batch, tokens, lines[0]["parameters"], found)


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


def steps_within(trials: Sequence[Curve], batches: BatchSizeSchedule, budget_s: float, by: str) -> int:
    """Number of steps that fit, from the second halves of trials; a multiple of POINTS.

    Args:
        trials: one, or with a ramp those of its first and final batch sizes.
        batches: batch size of each step.
        budget_s: seconds of training.
        by: clock or processor.
    """
    times_s = {}
    for trial in trials:
        first, last = trial.points[-2:]
        times_s[trial.batch] = (last.spent_s(by) - first.spent_s(by)) / (last.step - first.step)
    fitting = StepTiming.from_sizes(times_s).steps_within(budget_s, batches, EvaluationConfig(at_end=False))
    return max(round(fitting / POINTS), 1) * POINTS


def try_peer(bench: Bench, config: RootConfig, side: str, batch: int, parameters: int) -> Peer:
    """Trains a few steps of a peer in each precision it has on CPUs; returns the steps that fit in the faster one."""
    found = []
    # PyTorch takes minutes for a step in bf16 on processors without units for it.
    has_bf16 = side != NANOGPT and not torch_loops_over_bf16()
    for bf16 in (False, True) if has_bf16 else (False,):
        trial = train_peer(bench, config, Peer(side, batch, TRIAL_STEPS, bf16), 1e-3, "trial", 2)
        if side not in RECIPES and abs(trial.parameters / parameters - 1) > SAME_SIZE:
            raise SystemExit(f"{side} has {trial.parameters:,} parameters, megads {parameters:,}")
        steps = steps_within([trial], BatchSizeSchedule(batch), bench.budget_s, bench.by)
        found.append(Peer(side, batch, steps, bf16))
    peer = max(found, key=lambda peer: peer.steps)
    print(f"{side}, batch {batch}: {peer.steps} steps fit{' in bf16' if peer.bf16 else ''}", flush=True)
    return peer


def say(curve: Curve) -> Curve:
    """Prints the result of a run."""
    last = curve.points[-1]
    print(
        f"{curve.name}: loss {curve.loss:.4f} after {last.step} steps, {curve.trained_tokens:,} tokens, "
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


@dataclass(frozen=True)
class Search:
    """What is tried.

    Attributes:
        ours: experiments of ours.
        peers: keys of PEERS.
        rates: learning rates of AdamW's peers.
        multiples: multiples of the rates of Muon's peers.
        batches: batch sizes of the peers.
        rounds: runs of each side with its best learning rate.
        overrides: overrides of our config.
    """

    ours: Sequence[str]
    peers: Sequence[str]
    rates: Sequence[float]
    multiples: Sequence[float]
    batches: Sequence[int]
    rounds: int
    overrides: Sequence[str]


def run_all(bench: Bench, search: Search) -> list[Curve]:
    """Runs every side: the peers are searched in the first round; later rounds repeat the best run of each."""
    steps, parameters = dict[str, int](), 0
    for experiment in ("demo", *(name for name in search.ours if name != "demo")):
        trial, steps[experiment] = try_ours(bench, experiment, search.overrides)
        parameters = parameters or trial.parameters
    config = load_frozen(bench.folder / "trial_demo" / CONFIG_FILE)
    write_data(bench, config)
    curves = list[Curve]()
    peers = []
    for number in range(search.rounds):
        for experiment in search.ours:
            name = f"{experiment}_{number}"
            curves.append(say(train_ours(bench, experiment, name, steps[experiment], POINTS, search.overrides)))
        if not number:
            for side in search.peers:
                rates = search.multiples if side in RECIPES else search.rates
                found, peer = search_peer(bench, config, side, parameters, rates, search.batches)
                curves += found
                peers.append(peer)
            continue
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
        lines.append([curve.name, *losses, f"{step:,}", f"{curve.trained_tokens:,}", f"{curve.parameters:,}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(curves: Sequence[Curve], bench: Bench) -> list[Verdict]:
    """How much sooner the better of our recipes reaches the final loss of a peer; prints which peers end lower."""
    sides = shown(curves)
    ours = min((curve for curve in sides if curve.side in OURS.values()), key=lambda curve: curve.loss)
    found = []
    for peer in (curve for curve in sides if curve.side in PEERS):
        ahead = "behind" if ours.loss < peer.loss else "AHEAD of"
        print(f"{peer.name} ends at {peer.loss:.3f}, {abs(peer.loss - ours.loss):.3f} nats {ahead} {ours.name}")
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

    from megads.tools.report.style import BLUE, GREEN, INK, MUTED, ORANGE, RED, REGULAR_INCHES

    figure = Figure(figsize=REGULAR_INCHES)
    axes = figure.subplots()
    for curve, colour, marker in zip(shown(curves), (BLUE, ORANGE, GREEN, RED, MUTED, INK), "osD^vP", strict=False):
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
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0], help="seconds of training per run")
    parser.add_argument("--ours", nargs="+", choices=OURS, default=list(OURS), help="recipes of megads")
    parser.add_argument(
        "--peers", nargs="*", choices=(NANOCHAT, MODDED, TRAINER), default=[NANOCHAT, MODDED], help="none: ours alone"
    )
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT, which is then a peer")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="rates of AdamW's peers")
    parser.add_argument("--multiple", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0], help="of Muon's rates")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 4], help="batch sizes of the peers, in samples")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side with its best learning rate")
    parser.add_argument(
        "--by", choices=("clock", "processor"), default="clock", help="time that is the same for all sides"
    )
    parser.add_argument("--tokens", type=int, default=40_960, help="tokens per validation")
    parser.add_argument("--override", nargs="+", action="extend", default=[], help="overrides of megads' config")
    parser.add_argument("--picture", type=Path, help="PNG to write, of the longest time")
    add_results_option(parser)
    arguments = parser.parse_args()
    nanogpt = arguments.nanogpt.resolve() if arguments.nanogpt else None
    if nanogpt is not None and not (nanogpt / "train.py").is_file():
        parser.error(f"--nanogpt {nanogpt}: has no train.py; git clone https://github.com/karpathy/nanoGPT")
    call(["scripts/demo/run.sh", "data"], os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    search = Search(
        arguments.ours, [*arguments.peers, *([NANOGPT] if nanogpt else [])], arguments.lr, arguments.multiple,
        arguments.batch, arguments.rounds, arguments.override,
    )  # fmt: skip
    print(processor_name(), flush=True)
    for seconds in sorted(arguments.seconds):
        folder = arguments.folder.resolve() / f"{seconds:g}_s"
        bench = Bench(folder, seconds, arguments.by, available_cores(), nanogpt, arguments.tokens)
        bench.folder.mkdir(parents=True, exist_ok=True)
        print(f"\n=== {seconds:g} s", flush=True)
        curves = run_all(bench, search)
        print(f"\n{table(curves, bench)}\n")
        figures: dict[str, Any] = {"seconds": seconds, "processor": processor_name()}
        figures["by"] = "fastest_ms" if bench.by == "clock" else "processor_ms"
        figures["curves"] = [asdict(curve) for curve in curves]
        record(arguments.append, f"small_machine_{seconds:g}", figures, verdicts(curves, bench))
        if arguments.picture and seconds == max(arguments.seconds):
            save(lambda curves=curves, bench=bench: draw(curves, bench), arguments.picture)  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(main())
