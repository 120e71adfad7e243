"""The peak TFLOP/s of a device: configured, measured or from its data sheet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megads.model import peak
from megads.model.peak import data_sheet_tflops, device_peak_tflops
from megads.ops.linear import linear_into

CPU = torch.device("cpu")


def test_configured_figure_wins(tmp_path: Path) -> None:
    """Catches a measurement although cluster.peak_tflops is set."""
    assert device_peak_tflops(CPU, torch.float32, 1, configured=7.5, cache_dir=tmp_path) == 7.5
    assert not list(tmp_path.iterdir())


@pytest.fixture
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_MEASURE_S", 0.1)


@pytest.mark.usefixtures("quick_measurement")
def test_measured_once_and_cached(tmp_path: Path) -> None:
    """Catches a new measurement at every start, a changed thread count, or a cache shared between dtypes."""
    threads = torch.get_num_threads()
    start = time.process_time()
    first = device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path)
    assert 0 < time.process_time() - start < 5 and 1e-4 < first < 100
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path) == first
    assert torch.get_num_threads() == threads
    [path] = tmp_path.iterdir()
    device_peak_tflops(CPU, torch.bfloat16, 1, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    path.write_text('{"tflops": 1')
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path) > 0
    assert path.read_text().endswith("}"), "the damaged entry was not replaced"


@pytest.mark.slow
def test_a_busy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a peak that is too low, and cached, because other programs used the processor during the measurement: MFU
    would exceed 1."""
    quiet = device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path / "quiet")

    def waits(*arguments: object) -> None:
        linear_into(*arguments)  # type: ignore[arg-type]
        time.sleep(0.2)

    monkeypatch.setattr(peak, "linear_into", waits)
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path / "busy") > 0.4 * quiet


@pytest.mark.usefixtures("quick_measurement")
def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a run that fails because its cache cannot be written."""
    (tmp_path / "file").touch()
    assert device_peak_tflops(CPU, torch.float32, 1, cache_dir=tmp_path / "file" / "cache") > 0


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L4", 121.0), ("NVIDIA L40", 181.0), ("NVIDIA L40S", 362.0), ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A40", 149.7), ("NVIDIA H20", 148.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H200", 989.0), ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0), ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA RTX A4000", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_data_sheet(name: str, tflops: float | None) -> None:
    """Catches a GPU taken for another whose name is a part of its own, which halves or doubles the MFU of every run."""
    assert data_sheet_tflops(name) == tflops
