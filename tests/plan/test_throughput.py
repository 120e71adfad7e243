"""Speed arithmetic in round numbers."""

from __future__ import annotations

import pytest

from megads.plan.throughput import throughput


def test_throughput() -> None:
    """Catches tokens a device reported as tokens of the run, or MFU against the whole machine's peak."""
    speed = throughput(tokens=4000, seconds=2.0, world_size=4, flops_per_token=6e9, peak_tflops=12.0)
    assert speed.tokens_per_s == 2000.0
    assert speed.tflops_per_device == pytest.approx(3.0)
    assert speed.mfu == pytest.approx(0.25)
