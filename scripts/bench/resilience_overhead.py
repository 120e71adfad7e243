"""Overhead of monitoring a healthy run: the same run with and without it, alternating.

    python -m scripts.bench.resilience_overhead [--pairs 5] [--steps 150] [--layout parallel.dp=2] [--hidden 512]

`watched` has the defaults: heartbeats that the launcher checks for hangs, torch's flight recorder, timed forward and
backward passes for straggler detection, loss spike detection. `checked` also compares replicas every 100 steps. `plain`
has only the heartbeat, a thread that increments a counter in a file twice a second. Ratios are taken pair by pair, of
the median step and of the CPU time of all processes of the run, which is more reliable on a shared machine.

    python -m scripts.bench.resilience_overhead --parts

Runs of minutes differ by more than the overhead, so this times each part of the monitoring separately, on two ranks:
the work that it adds to a rank's step, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megads.runtime.metrics import read_json_lines
from scripts.bench.synthetic_dataset import write

REPOSITORY = Path(__file__).parents[2]
_VOCABULARY = 8000
_PLAIN = (
    "cluster.hang_action=ignore",
    "cluster.heartbeat_timeout_s=null",
    "logging.straggler_every_steps=null",
    "resilience.spikes.action=off",
)
_SIDES = {"plain": _PLAIN, "watched": (), "checked": ("resilience.check_replicas_every_steps=100",)}
_WARM_UP_STEPS = 10
_PHASES, _SPANS = 11, 16
"""Per step: heartbeat phases of a rank, and spans that the engine times."""


def train(side: str, folder: Path, steps: int, hidden: int, layout: list[str]) -> tuple[float, float]:
    """Trains one run; returns milliseconds of its median step, and CPU milliseconds per step."""
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = (
        *("model.num_layers=4", f"model.hidden_size={hidden}", "model.num_heads=8", f"model.vocab_size={_VOCABULARY}"),
        *("train.seq_len=256", "model.max_seq_len=256", "train.global_batch_size=8", "train.micro_batch_size=2"),
        *("train.precision=fp32", f"train.steps={steps}", f"data.train=[{{path: {folder / 'data'}}}]"),
        *("cluster.threads_per_rank=1", "cluster.peak_tflops=1", "checkpoint.every_steps=1000000"),
        *("logging.console=quiet", "logging.wandb.mode=disabled", f"run.dir={run_dir}"),
    )
    environment = os.environ | ({"TORCH_FR_BUFFER_SIZE": "0"} if side == "plain" else {})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "megads.cli.main", "train", *overrides, *layout, *_SIDES[side]]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = read_json_lines(run_dir / "metrics.jsonl")
    times = [1e3 * float(line["step_time_s"]) for line in lines if "step_time_s" in line]
    return statistics.median(times[_WARM_UP_STEPS:]), 1e3 * processor_s / steps


def microseconds(work: Callable[[], object], repeats: int) -> float:
    """Mean of many calls, in microseconds."""
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e6 * (time.perf_counter() - begin) / repeats


def time_parts(result: str) -> None:
    """Runs one of two ranks: times the parts of its monitoring; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    from megads.engine.stragglers import StragglerHook
    from megads.parallel.config import ParallelConfig
    from megads.parallel.grid import build_grid
    from megads.resilience.config import SpikeConfig
    from megads.resilience.spikes import SpikeDetector, StepLoss
    from megads.runtime.config import LoggingConfig
    from megads.runtime.heartbeat import _RECORD, Heartbeat
    from megads.runtime.hooks import Span, StepInfo, TrainState
    from megads.runtime.metrics import EventWriter

    folder, rank = Path(result).parent, dist.get_rank()
    found = {}
    beats = Heartbeat(mmap.mmap(-1, _RECORD.size))
    found["phases of the heartbeat"] = _PHASES * microseconds(lambda: beats.enter("engine step", 1), 100_000)
    detector, draw = SpikeDetector(SpikeConfig()), random.Random(1)
    losses = iter([StepLoss(step, step, 3.0 + draw.gauss(0, 0.05), draw.gauss(1, 0.1)) for step in range(20_001)])
    found["loss spikes"] = microseconds(lambda: detector.observe(next(losses)), 20_000)

    grid = build_grid(ParallelConfig(dp=2), rank, 2)
    watched: list[Callable[[list[Span]], None]] = []
    hook = StragglerHook(watched.append, folder, 1, grid, EventWriter(folder, rank == 0))
    hook.on_start(TrainState())
    info = StepInfo(1, 8, 2048, 3.0, 1.0, 1e-3, 8, 256, 0.4, 0.0, skipped=False, culprit="", batch_hash="")
    every_steps = LoggingConfig().straggler_every_steps
    assert every_steps is not None

    def compare() -> None:
        begin = time.perf_counter()
        spans = [Span("forward", n, 0, begin, time.perf_counter()) for n in range(_SPANS)]
        watched.pop()(spans)
        hook.on_step(info)

    found["stragglers"] = microseconds(compare, 2000) / every_steps
    number = torch.zeros(1)
    found["a collective"] = microseconds(lambda: dist.all_reduce(number), 5000)
    if rank == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")


def print_parts(rounds: int = 5) -> None:
    """Prints medians of some rounds, each with the flight recorder and without it."""
    from megads.runtime.environment import child_environment
    from megads.tools.plan.calibrate.measure import run_on_ranks

    times: dict[str, list[float]] = {}
    for number in range(2 * rounds):
        recorded = number % 2
        with (
            tempfile.TemporaryDirectory() as folder,
            child_environment({"TORCH_FR_BUFFER_SIZE": "500" if recorded else "0"}),
        ):
            run_on_ranks(2, 1, time_parts, f"{folder}/parts.json")
            found = json.loads((Path(folder) / "parts.json").read_text(encoding="utf-8"))
        found[f"a collective, {'recorded' if recorded else 'not recorded'}"] = found.pop("a collective")
        for name, microseconds_ in found.items():
            times.setdefault(name, []).append(microseconds_)
    for name, of_rounds in times.items():
        shown = f"{statistics.median(of_rounds):.1f} us (from {min(of_rounds):.1f} to {max(of_rounds):.1f})"
        print(f"{name}: {shown}")


def main() -> int:
    """Prints every pair, and the medians of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layout", default="parallel.dp=2", help="overrides, separated by commas")
    parser.add_argument("--parts", action="store_true", help="time the parts of the monitoring, without training")
    arguments = parser.parse_args()
    if arguments.parts:
        print_parts()
        return 0
    ratios: dict[str, list[tuple[float, float]]] = {"watched": [], "checked": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "data", 2_000_000, _VOCABULARY)
        for number in range(arguments.pairs):
            found = {
                side: train(side, folder, arguments.steps, arguments.hidden, arguments.layout.split(","))
                for side in _SIDES
            }
            for side, pairs in ratios.items():
                pairs.append((found[side][0] / found["plain"][0], found[side][1] / found["plain"][1]))
            shown = ", ".join(f"{side} {step:.1f} / {cpu:.1f}" for side, (step, cpu) in found.items())
            print(f"{number + 1}: ms of the median step / of CPU time per step: {shown}", flush=True)
    for side, pairs in ratios.items():
        steps, processor = ([pair[of] - 1 for pair in pairs] for of in (0, 1))
        print(
            f"{side}: median step {statistics.median(steps):+.2%} (from {min(steps):+.2%} to {max(steps):+.2%}), "
            f"processor {statistics.median(processor):+.2%} (from {min(processor):+.2%} to {max(processor):+.2%})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
