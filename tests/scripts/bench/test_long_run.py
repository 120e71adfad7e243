"""The comparison of runs of 1,000 steps, and the command with a few steps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.long_run import COMPARED, SEEDS, Curve, Curves, drift, verdict

ROOT = Path(__file__).parents[3]


def curves_of(ends: dict[str, list[float]]) -> Curves:
    """Returns curves with equal training losses, and with these validation losses by seed."""
    losses = [5.0 - 0.001 * step for step in range(COMPARED + 10)]
    return {(name, seed): Curve(losses, end) for name, of in ends.items() for seed, end in zip(SEEDS, of, strict=True)}


def test_verdict() -> None:
    """Catches a check that passes for any curves, and one that applies the rounding tolerance after step 200."""
    curves = curves_of({"torch": [3.0, 3.02, 3.01], "fused": [3.005, 3.02, 3.0]})
    assert verdict(curves, "fp32") == []
    ours = curves["fused", 2]
    late, early = list(ours.losses), list(ours.losses)
    late[COMPARED] *= 1.01
    early[COMPARED - 1] *= 1 + 2e-4
    assert verdict(curves | {("fused", 2): replace(ours, losses=late)}, "fp32") == []
    found = verdict(curves | {("fused", 2): replace(ours, losses=early)}, "fp32")
    assert len(found) == 1 and found[0].startswith("seed 2: a loss of the first 200 steps is off by 2.0e-04")
    found = verdict(curves | {("fused", 3): replace(ours, validation=3.05)}, "fp32")
    assert len(found) == 1 and found[0].startswith("seed 3: final losses 0.0400 apart")
    assert verdict(curves | {("fused", 1): replace(ours, validation=float("nan"))}, "fp32")
    assert verdict(curves | {("fused", 2): replace(ours, losses=early)}, "bf16") == []


def test_drift_wants_equal_lengths() -> None:
    """Catches a run that ended early and is compared only as far as it goes."""
    curves = curves_of({"torch": [3.0] * 3, "fused": [3.0] * 3})
    short = curves | {("fused", 1): Curve([5.0], 3.0)}
    with pytest.raises(ValueError, match="argument 2"):
        drift(short, 1)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
def test_the_command_runs(tmp_path: Path) -> None:
    """Catches a renamed key or metric, and a second start that trains again."""
    command = [sys.executable, "-m", "scripts.bench.long_run", "--folder", str(tmp_path / "runs"), "--steps", "3"]
    command += ["--megabytes", "1", "--picture", str(tmp_path / "long_run.png")]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| 3 |") == 1 and "the same model at the end" in done.stdout
    assert (tmp_path / "long_run.png").exists()
    assert len(list((tmp_path / "runs").glob("fp32_*_*/metrics.jsonl"))) == 6
