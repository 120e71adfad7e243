#!/usr/bin/env python3
"""Does a killed run continue bit for bit on this device? Uses the real command and a real kill -9.

    python -m scripts.bench.gpu_resume --impl torch|fused --work runs/bench [--device cuda] [key=value ...]

Two runs of the same command start, in bf16 with dropout; the second starts once the first has finished the autotuning
of a first start. It is killed, launcher and rank, a few steps after a checkpoint, and started again. Then every step's
loss, gradient norm, samples, learning rate and batch hash, and every tensor's checksum in the last checkpoint, must
equal the other run's bit for bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megads.runtime.metrics import read_json_lines
from scripts.bench.gpu_lines import add_line_options, appender
from scripts.bench.synthetic_dataset import write
from tests.command import COMPUTED, StartCommand, checkpoint_of, checksums, commands_in, events_of, steps_of

EQUAL = "equal"


@dataclass(frozen=True)
class Training:
    """The run that is killed and resumed.

    Attributes:
        overrides: overrides of `megads train`.
        vocabulary: vocabulary size of the data.
        steps: steps of the whole run.
        every: steps between checkpoints.
        killed_after: the step after which one run is killed, if it is caught in time.
    """

    overrides: tuple[str, ...]
    vocabulary: int
    steps: int
    every: int
    killed_after: int


SHARED = (
    "train.precision=bf16", "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "evaluation.at_end=false",
    "run.check_memory=false",
)  # fmt: skip
ON_GPU = Training(
    (
        *("model.num_layers=8", "model.hidden_size=512", "model.num_heads=8", "model.vocab_size=50304"),
        *("train.seq_len=1024", "train.global_batch_size=16", "train.micro_batch_size=4"),
    ),
    vocabulary=50304, steps=60, every=20, killed_after=23,
)  # fmt: skip
ON_CPU = Training(
    (
        *("model.num_layers=2", "model.hidden_size=48", "model.num_heads=6", "model.vocab_size=512"),
        *("train.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=2"),
        *("cluster.peak_tflops=1", "cluster.threads_per_rank=1"),
    ),
    vocabulary=512, steps=30, every=10, killed_after=13,
)  # fmt: skip


def last_step(run_dir: Path) -> int:
    """Returns the last step in a run's metrics.jsonl; 0 for none."""
    path = run_dir / "metrics.jsonl"
    steps = [line["step"] for line in read_json_lines(path) if "loss" in line] if path.exists() else []
    return steps[-1] if steps else 0


def verdict(reference: Path, killed: Path, training: Training, ledger_at_kill: int) -> str:
    """Returns EQUAL, or where the two runs differ.

    Args:
        reference: folder of the undisturbed run.
        killed: folder of the killed and resumed run.
        training: what both trained.
        ledger_at_kill: last step in the killed run's metrics.jsonl at its death.
    """
    ours, theirs = steps_of(killed), steps_of(reference)
    if [line["step"] for line in theirs] != list(range(1, training.steps + 1)):
        return f"NOT JUDGED: the undisturbed run has {len(theirs)} of {training.steps} steps"
    resumed = [event["step"] for event in events_of(killed, "resume")]
    if len(resumed) != 1:
        return f"NOT JUDGED: resumed {len(resumed)} times instead of once"
    for mine, other in zip(ours, theirs, strict=False):
        differing = [key for key in COMPUTED if mine[key] != other[key]]
        if differing:
            where = "before the kill: a step is not deterministic" if mine["step"] <= resumed[0] else "after the resume"
            return f"NOT EQUAL from step {mine['step']} ({where}): {', '.join(differing)}"
    if len(ours) != len(theirs):
        return f"NOT EQUAL: {len(ours)} steps instead of {len(theirs)}"
    last = (checksums(checkpoint_of(run, training.steps)) for run in (killed, reference))
    if next(last) != next(last):
        return "NOT EQUAL: the same losses, but other tensors in the last checkpoint"
    return f"{EQUAL}: {training.steps} steps and all tensors; killed after {ledger_at_kill}, resumed from {resumed[0]}"


def trained(megads: StartCommand, training: Training, overrides: tuple[str, ...]) -> str:
    """Trains both runs and returns the verdict."""
    reference, killed = megads.folder / "reference", megads.folder / "killed"
    # Packages may be in a separate folder.
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    undisturbed = megads("train", *overrides, f"run.dir={reference}", variables=variables)
    undisturbed.wait_for(lambda: last_step(reference) > 0)
    victim = megads("train", *overrides, f"run.dir={killed}", variables=variables)
    committed = checkpoint_of(killed, training.every) / "manifest.json"
    victim.wait_for(lambda: last_step(killed) >= training.killed_after and committed.exists())
    victim.kill_everything()
    ledger_at_kill = last_step(killed)
    if ledger_at_kill == training.steps:
        return "NOT JUDGED: the run ended before it could be killed"
    for name, command in (
        ("undisturbed", undisturbed),
        ("resumed", megads("train", *overrides, f"run.dir={killed}", variables=variables)),
    ):
        ended = command.end()
        if ended.code:
            print(ended.out[-2000:], ended.err[-4000:])
            return f"NOT JUDGED: the {name} run ended with exit code {ended.code}"
    return verdict(reference, killed, training, ledger_at_kill)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=("torch", "fused"), required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("overrides", nargs="*", help="overrides of megads train, in addition to ops.impl")
    add_line_options(parser)
    arguments = parser.parse_args()
    training = ON_GPU if arguments.device == "cuda" else ON_CPU
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"resume_{arguments.impl}_", dir=arguments.work.resolve()))
    write(folder / "data", 2 * 10**6 if arguments.device == "cuda" else 10**5, training.vocabulary)
    asked = (f"ops.impl={arguments.impl}", *arguments.overrides)
    overrides = (
        *training.overrides, *SHARED, *asked, f"data.train=[{{path: {folder / 'data'}}}]",
        f"train.steps={training.steps}", f"checkpoint.every_steps={training.every}",
    )  # fmt: skip
    try:
        with commands_in(folder) as megads:
            found = trained(megads, training, overrides)
    finally:
        shutil.rmtree(folder)
    appender(arguments, "gpu_resume")({"name": f"resume, {' '.join(asked)}", "verdict": found})
    print(found)
    return 0 if found.startswith(EQUAL) else 1


if __name__ == "__main__":
    raise SystemExit(main())
