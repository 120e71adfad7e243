#!/usr/bin/env python3
"""Hundreds of asynchronous checkpoints of one run: memory and file descriptors must not grow.

    python -m scripts.bench.checkpoint_soak [--saves 200] [--megabytes 100] [--folder runs/bench]

The real command trains and saves as often as its writer can. After every save the resident memory of rank and writer,
the shared memory that they map (memfd and /dev/shm) and their open descriptors are measured from outside. The second
half is compared with saves ten to twenty. Exits with code 1 if memory grew by more than 1%, or the number of
descriptors at all.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from megads.model.config import ModelConfig
from megads.model.model_size import parameter_count
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from scripts.bench.results import add_results_option, record
from scripts.bench.synthetic_dataset import write

MODEL = ModelConfig(num_layers=1, hidden_size=256, num_heads=4, vocab_size=1024, max_seq_len=64)
SETTLED, COMPARED = 10, 20
"""One-time allocations are done after SETTLED saves; later saves may use what saves up to COMPARED used."""
MOST_GROWTH = 0.01
_BYTES_A_PARAMETER = 12
"""Size of a checkpoint: fp32 master weight and two moments."""
_SHARED = ("/memfd:megads", "/dev/shm/")
_POLL_S = 0.01
_LONGEST_S = 3600.0
_END_S = 120.0


@dataclass(frozen=True)
class Held:
    """Resources of a process after a save.

    Attributes:
        resident_bytes: resident memory.
        shared_bytes: resident memory of memfd and /dev/shm, included above.
        descriptors: number of open file descriptors.
    """

    resident_bytes: int
    shared_bytes: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """Growth of one quantity in one process.

    Attributes:
        before: maximum from the tenth to the twentieth save; minimum for descriptors, because files come and go.
        after: the same for the second half.
    """

    before: int
    after: int

    @property
    def relative(self) -> float:
        return self.after / self.before - 1 if self.before else self.after


def shape_of(megabytes: float) -> ModelConfig:
    """Returns a model whose optimizer state has about this many megabytes."""
    one, two = (parameter_count(replace(MODEL, num_layers=layers)) for layers in (1, 2))
    layers = 1 + round((1e6 * megabytes / _BYTES_A_PARAMETER - one) / (two - one))
    return replace(MODEL, num_layers=max(1, layers))


def overrides(run_dir: Path, corpus: Path, model: ModelConfig) -> list[str]:
    """Returns the overrides of an endless run that saves after every step for which its writer is ready."""
    values = {
        **{f"model.{key}": getattr(model, key) for key in ("num_layers", "hidden_size", "num_heads", "vocab_size")},
        "model.max_seq_len": model.max_seq_len, "data.train": f"[{{path: {corpus}, max_epochs: 1000000}}]",
        "data.split": "[0.9,0.1]", "train.seq_len": 16, "train.global_batch_size": 2, "train.micro_batch_size": 2,
        "train.precision": "fp32", "train.steps": 1_000_000, "optim.lr": 1e-4, "optim.min_lr": 0,
        "schedule.warmup_samples": 0, "checkpoint.every_steps": 1, "checkpoint.keep": 2, "checkpoint.async_save": True,
        "cluster.threads_per_rank": 1, "cluster.peak_tflops": 1, "logging.console": "quiet",
        "logging.wandb.mode": "disabled", "run.dir": run_dir,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


@contextmanager
def training(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs the real command; on exit asks it to stop, and requires it to end by itself."""
    command = [sys.executable, "-m", "megads.cli.main", "train", *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=_END_S)
        if process.returncode != 5:
            raise RuntimeError(f"the run ended with exit code {process.returncode}:\n{out}")
    finally:
        process.kill()
        process.wait()


def shared_bytes(pid: int) -> int:
    """Resident bytes of memfd and /dev/shm."""
    total, counted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counted = len(words) > 5 and words[5].startswith(_SHARED)
        elif counted and words[0] == "Rss:":
            total += 1024 * int(words[1])
    return total


def held(process: psutil.Process) -> Held:
    """Returns the current resources of a process."""
    return Held(process.memory_info().rss, shared_bytes(process.pid), process.num_fds())


def rank_and_writer(launcher: int) -> dict[str, psutil.Process]:
    """Returns the processes that have a copy mapped: the writer is a child of the rank."""
    having = [process for process in psutil.Process(launcher).children(recursive=True) if shared_bytes(process.pid)]
    pids = {process.pid for process in having}
    return {"writer" if process.ppid() in pids else "rank": process for process in having}


def saves_of(run_dir: Path) -> int:
    """Number of checkpoints saved asynchronously so far."""
    if not (run_dir / EVENTS_FILE).exists():
        return 0
    lines = read_json_lines(run_dir / EVENTS_FILE)
    return sum(line["event"] == "checkpoint_saved" and "write_s" in line for line in lines)


def soak(folder: Path, saves: int, megabytes: float, say: Callable[[str], object] = print) -> dict[str, list[Held]]:
    """Trains until this many checkpoints are saved; returns the resources of rank and writer after each.

    Args:
        folder: an empty folder on the disk to measure.
        saves: more than 2 COMPARED.
        megabytes: approximate size of a checkpoint.
        say: called with a progress message from time to time.
    """
    corpus, run_dir = folder / "corpus", folder / "run"
    model = shape_of(megabytes)
    write(corpus, 20_000, model.vocabulary)
    found: dict[str, list[Held]] = {"rank": [], "writer": []}
    with training(overrides(run_dir, corpus, model)) as launcher:
        deadline, processes, seen = time.monotonic() + _LONGEST_S, dict[str, psutil.Process](), 0
        while seen < saves:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended or hangs after {seen} saves")
            now = saves_of(run_dir)
            if now == seen:
                time.sleep(_POLL_S)
                continue
            processes = processes or rank_and_writer(launcher.pid)
            for name, process in processes.items():
                # There may be several saves between two polls: each gets a figure.
                found[name] += [held(process)] * (now - seen)
            if now // 50 > seen // 50:
                say(f"{now} saves")
            seen = now
    return {name: values[:saves] for name, values in found.items()}


def growth(values: list[Held]) -> dict[str, Growth]:
    """Returns the growth by quantity."""
    early, late = values[SETTLED:COMPARED], values[len(values) // 2 :]
    of = {name: [[getattr(each, name) for each in part] for part in (early, late)] for name in Held.__annotations__}
    return {name: Growth(*map(min if name == "descriptors" else max, parts)) for name, parts in of.items()}


def faults(found: dict[str, list[Held]]) -> list[str]:
    """Returns the quantities that grew by more than the limit."""
    told = []
    for process, values in found.items():
        for name, grown in growth(values).items():
            if grown.relative > (0 if name == "descriptors" else MOST_GROWTH):
                told.append(f"{name} of the {process}: {grown.before:,.0f}, later {grown.after:,.0f}")
    return told


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=100, help="size of a checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="folder on the disk to measure")
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.saves <= 2 * COMPARED:
        parser.error(f"--saves {arguments.saves}: must be above {2 * COMPARED}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="soak-") as folder:
        found = soak(Path(folder).absolute(), arguments.saves, arguments.megabytes)
    print("| process | of | save 10 to 20 | second half | growth |\n|---|---|---|---|---|")
    for process, values in found.items():
        for name, grown in growth(values).items():
            print(f"| {process} | {name} | {grown.before:,.0f} | {grown.after:,.0f} | {grown.relative:+.2%} |")
    wrong = faults(found)
    for text in wrong:
        print(f"grew: {text}")
    figures = {process: [asdict(value) for value in values] for process, values in found.items()}
    record(arguments.append, "checkpoint_soak", {"saves": arguments.saves, "held": figures})
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
