"""Where the peak of a device comes from."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from megads.plan.peak import device_peak_tflops

CPU = torch.device("cpu")


def test_configured_figure_wins(tmp_path: Path) -> None:
    """Catches a measurement although cluster.peak_tflops is set."""
    assert device_peak_tflops(CPU, torch.float32, 1, configured=7.5, cache_dir=tmp_path) == 7.5
    assert not list(tmp_path.iterdir())


def test_measured_once_and_cached(tmp_path: Path) -> None:
    """Catches a new measurement at every start, a changed thread count, or a cache shared between dtypes."""
    threads = torch.get_num_threads()
    start = time.perf_counter()
    first = device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path)
    assert 0 < time.perf_counter() - start < 5 and 1e-4 < first < 100
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path) == first
    assert torch.get_num_threads() == threads
    [path] = tmp_path.iterdir()
    device_peak_tflops(CPU, torch.bfloat16, 1, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    path.write_text('{"tflops": 1')
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path) > 0
    assert path.read_text().endswith("}"), "the damaged entry was not replaced"


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a run that fails because a cache does."""
    (tmp_path / "file").touch()
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path / "file" / "cache") > 0
