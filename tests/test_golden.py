"""The loss curve, which a change without an effect on numerics must reproduce.

One process, fp32, one thread, dropout on, on a corpus from integer arithmetic. Losses and norms are compared to 1e-6
and 1e-5 relative, not bitwise: the order of accumulation in a GEMM depends on the CPU. A change that is meant to
alter the curve records it again and says why in its commit:

    python -m tests.test_golden --write
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.command import StartCommand, commands_in, small_model, steps_of
from tests.corpus import write_corpus

CURVE = Path(__file__).parent / "golden" / "small_fp32.json"
COMPARED = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "batch_hash")


def train_curve(corpus: Path, megads: StartCommand) -> list[dict]:
    """Trains and returns the compared values, one entry per step."""
    overrides = small_model(
        corpus, train__steps=30, optim__lr=3e-3, schedule__warmup_samples=48, model__hidden_dropout=0.1,
        model__attention_dropout=0.1, evaluation__at_end="false", run__dir="run",
    )  # fmt: skip
    ended = megads("train", *overrides).end()
    assert ended.code == 0, ended.err
    return [{key: line[key] for key in COMPARED} for line in steps_of(megads.folder / "run")]


def test_the_curve_is_the_recorded_one(corpus: Path, megads: StartCommand) -> None:
    """Catches a refactoring that changes initial weights, data order, dropout, learning rate, clipping or AdamW."""
    recorded, found = json.loads(CURVE.read_text()), train_curve(corpus, megads)
    assert len(found) == len(recorded) == 30
    for ours, theirs in zip(found, recorded, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), ours["step"]
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-12), ours["step"]
        for key in ("step", "samples", "tokens", "batch_hash"):
            assert ours[key] == theirs[key]


def test_the_recorded_curve_learns() -> None:
    """Catches a recorded curve that would hide a regression: one that does not fall, or is never clipped."""
    recorded = json.loads(CURVE.read_text())
    assert recorded[-1]["loss"] < recorded[0]["loss"] - 0.5
    assert any(step["grad_norm"] > 1.0 for step in recorded)


def write() -> None:
    """Records the curve on this machine."""
    with tempfile.TemporaryDirectory() as folder, commands_in(Path(folder)) as megads:
        curve = train_curve(write_corpus(Path(folder) / "corpus"), megads)
    lines = ",\n".join(json.dumps(step) for step in curve)
    CURVE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.test_golden --write")
    write()
