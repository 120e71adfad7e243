"""Tests the benchmark of the dial: its tables, and the command itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.dial import DATA, DialRun, best_multiples, depth_table, rate_table, transfer_verdict

ROOT = Path(__file__).parents[3]


def finished(depth: int, multiple: float, loss: float) -> DialRun:
    return DialRun(depth, multiple, 0.012 * multiple, 100, 204_800, 8, 5_000_000, 60.0, loss)


def test_the_best_multiple_of_each_depth() -> None:
    """Catches a sweep whose best rate is that of another depth, or not marked in its own row."""
    rates = [finished(2, 1.0, 6.0), finished(2, 2.0, 5.9), finished(4, 1.0, 5.5), finished(4, 2.0, 5.6)]
    assert best_multiples(rates) == {2: 2.0, 4: 1.0}
    assert rate_table(rates).splitlines()[2:] == ["| 2 | 6.000 | 5.900* |", "| 4 | 5.500* | 5.600 |"]
    assert "| 4 | 5,000,000 | 8 | 100 | 204,800 | 60 | 5.500 |" in depth_table(rates)


@pytest.mark.parametrize(
    ("best", "verdict"),
    [
        ({2: 1.0, 4: 1.0}, "the best multiple is the same at all depths: x 1"),
        ({2: 1.0, 4: 2.0}, "the best multiples differ: x 1, x 2"),
        ({2: 4.0, 4: 4.0}, "not known: x 4 is best"),
        ({2: 0.5, 4: 1.0}, "not known: x 0.5 is best"),
    ],
)
def test_a_best_multiple_at_the_edge_shows_nothing(best: dict[int, float], verdict: str) -> None:
    """Catches a transfer that is claimed although a larger or smaller rate may be better."""
    rates = [
        finished(depth, multiple, 5.0 if multiple == best[depth] else 6.0)
        for depth in best
        for multiple in (0.5, 1.0, 2.0, 4.0)
    ]
    assert transfer_verdict(rates).startswith(verdict)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(not DATA.with_suffix(".idx").exists(), reason="scripts/demo/run.sh data has not been run")
def test_the_command_runs(tmp_path: Path) -> None:
    """Catches a renamed key, event or metric."""
    command = [sys.executable, "-m", "scripts.bench.dial", "--folder", str(tmp_path / "runs"), "--depths", "1", "2"]
    command += ["--minutes", "0.02", "--rate-depths", "1", "--multiples", "1", "2", "--append", str(tmp_path / "lines")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| depth | x 1 | x 2 |" in done.stdout and (tmp_path / "lines").exists()
