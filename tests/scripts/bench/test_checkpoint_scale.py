"""The simulation of checkpoints of many ranks, on few ranks of a small model."""

from __future__ import annotations

from pathlib import Path

from megads.model.config import ModelConfig
from megads.model.model_size import parameter_shapes
from scripts.bench.checkpoint_scale import simulate


def test_a_rank_reads_what_concerns_it(tmp_path: Path) -> None:
    """Catches a simulated layout that a commit rejects, and a start that reads more headers than its own."""
    shapes = parameter_shapes(ModelConfig(num_layers=12, hidden_size=32, num_heads=8, vocab_size=64))
    lines = {what: said for what, _, said in simulate(tmp_path, shapes, dp=2)}
    assert lines["the newest of 20"] == "number 1"
    assert lines["a rank starts, same layout"] == "1 headers read, 1 files needed"
    other = lines["a rank starts, tp 8 pp 6"].split()
    assert 1 <= int(other[3]) <= int(other[0]) < 96
    assert list(tmp_path.iterdir()) == []
