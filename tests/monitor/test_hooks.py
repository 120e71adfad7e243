"""Tests the step line of metrics.jsonl."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megads.monitor.hooks import MetricsHook, throughput
from megads.runtime.hooks import StepInfo
from megads.runtime.metrics import MetricsWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE


def test_throughput_and_mfu_are_per_device() -> None:
    """Catches tokens per device reported as tokens of the run, or MFU relative to the whole machine's peak."""
    speed = throughput(tokens=4000, seconds=2.0, world_size=4, flops_per_token=6e9, peak_tflops=12.0)
    assert speed.tokens_per_s == 2000.0
    assert speed.tflops_per_device == pytest.approx(3.0)
    assert speed.mfu == pytest.approx(0.25)
    slow = throughput(tokens=1, seconds=2.0, world_size=4, flops_per_token=2, peak_tflops=1e-12)
    assert (slow.tokens_per_s, slow.mfu) == (0.5, pytest.approx(0.25)), "nothing is rounded"


KEYS = (
    "step samples tokens loss grad_norm lr global_batch_size seq_len step_time_s data_time_s tokens_per_s "
    "tflops_per_device mfu peak_memory_bytes skipped batch_hash restarts time validate_time_s save_time_s "
    "effective_time"
)


def test_a_step_record_has_every_documented_key(tmp_path: Path) -> None:
    """Catches a key missing from the public contract, or a speed that leaves out masked tokens."""
    metrics = MetricsWriter(tmp_path, enabled=True)
    info = StepInfo(
        step=3, samples=24, tokens=2990, loss=4.5, grad_norm=1.25, lr=1e-3, global_batch_size=8, seq_len=128,
        step_time_s=0.5, data_time_s=0.1, skipped=False, culprit="", batch_hash="ab",
    )  # fmt: skip
    MetricsHook(metrics, flops_per_token=1e9, world_size=2, peak_tflops=4.0, restarts=2).on_step(info)
    [line] = read_json_lines(tmp_path / METRICS_FILE)
    assert list(line) == KEYS.split()
    assert line["tokens_per_s"] == 2048.0
    assert line["restarts"] == 2
    assert line["mfu"] == pytest.approx(0.256)
    assert line["peak_memory_bytes"] == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
