"""`megads calibrate` measures this machine, and `megads plan` uses its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megads.cli.main import run
from megads.errors import ConfigError
from megads.ops.config import TORCH
from megads.tools.plan.calibrate.config import CalibrateConfig
from megads.tools.plan.calibrate.measure import warn_of_drift
from megads.tools.plan.calibrate.operators import CPU_SHAPES, Bench, RepeatedBench
from megads.tools.plan.devices import read_device
from megads.tools.plan.gemm_time import matmul_seconds


@pytest.mark.slow
@pytest.mark.distributed
def test_a_measured_device_is_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches attributes that plan does not accept, and values off by an order of magnitude."""
    path = tmp_path / "here.yaml"
    assert run(["calibrate", f"out={path}", "ranks=2", "threads=1", "fp32=true", "seconds=0.02"]) == 0
    device = read_device(path)
    # One core of a machine made after 2010, with or without AVX-512.
    assert 0.002 < device.peak_tflops < 2.0 and device.on_cpu
    assert 0.5 < device.memory_gigabytes_per_s < 1000 and 0.01 < device.node_gigabytes_per_s < 100
    assert 1 < device.node_latency_us < 1e5 and 0 < device.attention_efficiency < 1.5
    assert device.forward_costs is not None and 1 < device.forward_costs.block_us < 1e6
    assert {costs.layout for costs in device.layout_costs} >= {"zero_2", "zero_3", "tp", "cp", "pp", "recompute_full"}
    for m, n, k, rate in device.products:
        assert matmul_seconds(device, m, n, k) == pytest.approx(2 * m * n * k / rate / 1e12, rel=0.5)
    capsys.readouterr()
    small = ["plan", "model=demo", "model.vocab_size=2048", "train.precision=fp32", "parallel.tp=2", "json=true"]
    assert run([*small, f"device={path}"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 1e-4 < plan["step_time_s"] < 100 and plan["parts"]["tp"] > 0


@pytest.mark.always
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches invalid values that reach the ranks."""
    for override, named in (("out=x.txt", "out"), ("ranks=0", "ranks"), ("threads=0", "threads"), ("seconds=0", "sec")):
        assert run(["calibrate", override]) == 2
        assert named in capsys.readouterr().err


def test_the_file_is_tried_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a measurement of minutes whose file cannot be written, and a check that leaves a file behind."""
    (tmp_path / "folder.yaml").mkdir()
    for out in (tmp_path / "missing" / "x.yaml", tmp_path / "folder.yaml"):
        with pytest.raises(ConfigError, match=r"out = .*: choose another file"):
            CalibrateConfig(out=str(out)).check()
    CalibrateConfig(out=str(tmp_path / "new.yaml")).check()
    assert [path.name for path in tmp_path.iterdir()] == ["folder.yaml"]
    assert run(["calibrate", f"out={tmp_path}/missing/x.yaml"]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_of_several_moments_the_quickest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a temporary slowdown recorded as the machine's speed, and times of two measurements mixed up."""
    taken = iter([3.0, 5.0, 4.0, 2.0, 6.0, 1.0])
    monkeypatch.setattr(Bench, "time_s", lambda *_: next(taken))
    first = RepeatedBench(torch.device("cpu"), torch.bfloat16, TORCH, 0.0, CPU_SHAPES)
    assert [first.time_s(print) for _ in range(2)] == [3.0, 5.0]
    second = first.again()
    assert [second.time_s(print) for _ in range(2)] == [3.0, 2.0]
    assert second.slower == [pytest.approx(1 / 3), 1.5] and not first.slower
    third = second.again()
    assert [third.time_s(print) for _ in range(2)] == [3.0, 1.0]


@pytest.mark.parametrize(("slower", "told"), [((0.02, 0.24, 0.3), True), ((0.01, 0.04, 0.9), False)])
def test_a_machine_that_changes_its_speed_is_told(
    slower: tuple[float, ...], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches measurements of a busy machine without a warning, and a warning for one slow operator."""
    warn_of_drift(slower)
    assert ("took 24% longer at one moment than at another" in capsys.readouterr().err) is told
