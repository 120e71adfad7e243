"""Recovery time from the kill of a rank to the next step, by phase.

    python scripts/bench/recovery.py [--kills 3] [--layout parallel.dp=2] [--data PREFIX]

Starts a small run whose state is kept in memory after every step (checkpoint.local_every_steps=1), kills one of its
ranks with SIGKILL repeatedly, and prints the time between the kill, the launcher's verdict, the restart of the ranks,
their first heartbeat, the loaded state and the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_MODEL = (
    *("model.num_layers=2", "model.hidden_size=48", "model.num_heads=6", "train.seq_len=16", "train.precision=fp32"),
    *("train.global_batch_size=12", "train.micro_batch_size=2", "train.steps=100000", "cluster.threads_per_rank=1"),
    *("cluster.peak_tflops=1", "checkpoint.every_steps=1000000", "checkpoint.local_every_steps=1"),
    *("logging.console=quiet", "logging.wandb.mode=disabled", "cluster.max_restarts=100"),
)
_STAGES = ("failure", "restart", "rank", "resume", "start", "step")
_NAMES = ("verdict", "decision", "fork", "load", "record", "first step")
_TIMEOUT_S = 120.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a JSON lines file."""
    return [json.loads(line) for line in _text(path).split("\n")[:-1] if line]


def pids_of(log: Path) -> list[int]:
    """Returns the pids of a rank's starts."""
    return [int(pid) for pid in re.findall(r"^--- rank .* pid (\d+),", _text(log), re.MULTILINE)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(what: str, condition: Any, process: subprocess.Popen[bytes]) -> Any:
    """Waits until the condition is true, and returns its value."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (found := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{what} did not come: the run ended with {process.poll()}")
        time.sleep(0.01)
    return found


def recover(run_dir: Path, number: int, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Kills a rank and returns the seconds from then to each stage."""
    log, events, metrics = run_dir / "logs" / "rank_00001.log", run_dir / "events.jsonl", run_dir / "metrics.jsonl"
    begun = wait_for("the start", lambda: [e for e in lines_of(events) if e["event"] == "start"][number:], process)
    first = begun[0]["step"]
    wait_for("a step", lambda: any(line["step"] > first + 5 for line in lines_of(metrics)), process)
    starts = pids_of(log)
    os.kill(starts[-1], signal.SIGKILL)
    killed = time.time()
    wait_for("a new rank", lambda: len(pids_of(log)) > len(starts), process)
    rank_at = time.time()
    again = wait_for("a resume", lambda: [e for e in lines_of(events) if e["event"] == "start"][number + 1 :], process)
    resumed_from = again[0]["step"]
    wait_for("a step", lambda: any(line["step"] > resumed_from for line in lines_of(metrics)), process)
    stepped = time.time()
    times = {event["event"]: event["time"] for event in lines_of(events) if event["time"] >= killed - 0.01}
    times |= {"rank": rank_at, "step": stepped}
    return {stage: times[stage] - killed for stage in _STAGES}


def main() -> int:
    """Prints one line per kill, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--layout", default="parallel.dp=2", help="overrides, separated by commas")
    parser.add_argument("--data", required=True, help="prefix of a prepared dataset")
    parser.add_argument(
        "--vocab-size", type=int, help="vocabulary size of its tokenizer, if there is no tokenizer beside it"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        vocabulary = [f"model.vocab_size={arguments.vocab_size}"] if arguments.vocab_size else []
        data = [f"data.train=[{{path: {arguments.data}}}]", f"run.dir={run_dir}"]
        command = [sys.executable, "-m", "megads.cli.main", "train", *_MODEL, *arguments.layout.split(","), *vocabulary]
        process = subprocess.Popen([*command, *data], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        found = []
        try:
            for number in range(arguments.kills):
                found.append(recover(run_dir, number, process))
                print_row(f"kill {number + 1}", found[-1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        print_row("median", {stage: statistics.median(one[stage] for one in found) for stage in _STAGES})
    return 0


def print_row(name: str, at: dict[str, float]) -> None:
    """Prints the time from each stage to the next, and the total."""
    before, parts = 0.0, []
    for stage, title in zip(_STAGES, _NAMES, strict=True):
        parts.append(f"{title} {at[stage] - before:5.2f}")
        before = at[stage]
    print(f"{name:8s} {'  '.join(parts)}  = {before:5.2f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
