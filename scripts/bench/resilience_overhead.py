"""What watching a healthy run costs: the same run with and without it, in turns.

    python -m scripts.bench.resilience_overhead [--pairs 5] [--steps 150] [--layout parallel.dp=2] [--hidden 512]

`watched` has the defaults: heartbeats that the launcher looks at for hangs, torch's flight recorder, timed passes for
stragglers, loss spikes. `checked` compares replicas every 100 steps as well. `plain` has nothing of it but the
heartbeat, a thread that counts twice a second in a file. Ratios are taken pair by pair, of the median step and
of the processor time of all processes of the run, which says more where other work takes a part of the machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
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


def train(side: str, folder: Path, steps: int, hidden: int, layout: list[str]) -> tuple[float, float]:
    """Trains one run; returns milliseconds of its median step, and of processor time a step."""
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


def main() -> int:
    """Prints every pair, and the medians of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layout", default="parallel.dp=2", help="overrides, separated by commas")
    arguments = parser.parse_args()
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
            print(f"{number + 1}: ms of the median step / of processor time a step: {shown}", flush=True)
    for side, pairs in ratios.items():
        steps, processor = ([pair[of] - 1 for pair in pairs] for of in (0, 1))
        print(
            f"{side}: median step {statistics.median(steps):+.2%} (from {min(steps):+.2%} to {max(steps):+.2%}), "
            f"processor {statistics.median(processor):+.2%} (from {min(processor):+.2%} to {max(processor):+.2%})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
