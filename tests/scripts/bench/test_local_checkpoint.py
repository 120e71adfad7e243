"""The benchmark of local checkpoints measures real ones."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.local_checkpoint import measure


def test_the_benchmark_measures_save_and_load(tmp_path: Path) -> None:
    """Catches a start that finds no checkpoint, and memory that the benchmark does not free."""
    (tmp_path / "run").mkdir()
    (tmp_path / "memory").mkdir()
    found = measure(tmp_path / "run", tmp_path / "memory", megabytes=8, rounds=3)
    assert min(found.values()) > 0 and {"copy", "load", "plain copy", "from disk"} <= found.keys()
    assert list((tmp_path / "memory").iterdir()) == []
