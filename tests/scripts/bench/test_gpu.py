"""The parts of scripts/bench/gpu.sh that a CPU can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megads.data.indexed.dataset import IndexedDataset
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from scripts.bench.gpu_items import ALWAYS, STAGES
from scripts.bench.gpu_nccl import CASES

BENCH = Path(__file__).parents[3] / "scripts/bench"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=variables)


@pytest.mark.slow
@pytest.mark.distributed
def test_check_passes_on_a_cpu(tmp_path: Path) -> None:
    """Catches a script that breaks while no GPU is available: a stage that fails, results missing from the table, and
    lost data, config keys or overrides."""
    pytest.importorskip("transformers")
    results = tmp_path / "results" / "bench.jsonl"
    run_ = run(BENCH / "gpu.sh", "--check", "train.steps=6", WORK=str(tmp_path), RESULTS=str(results.parent))
    assert run_.returncode == 0, run_.stdout + run_.stderr
    assert f"torch {torch.__version__}" in run_.stdout
    lines = list(read_json_lines(results))
    items = [line for line in lines if line["bench"] == "gpu_item"]
    assert {line["stage"] for line in items} == {ALWAYS, *STAGES}
    assert {line["outcome"] for line in items} == {"done"}
    assert [line["steps"] for line in lines if line["bench"] == "gpu_layouts"] == [5, 5], "the override is lost"
    shown = run_.stdout[run_.stdout.index("1 x CPU") :]
    for wanted in (
        "RMSNorm",
        "fused_softmax",
        "resume, ops.impl=fused: equal",
        "train, parallel.dp=2",
        "kernels compiled",
        "sanitizer, memcheck",
        "nondeterm.",
        "beside tensors, 2 ranks",
    ):
        assert wanted in shown
    (peer,) = [line for line in shown.splitlines() if line.startswith("bloom_1b1 Hugging Face")]
    assert peer.endswith("yes")
    with tarfile.open(tmp_path / "results/logs.tar.gz") as logs:
        assert sum(name.endswith(".txt") for name in logs.getnames()) == len(items)
    assert (tmp_path / "results/output.txt").read_text() in run_.stdout
    data = IndexedDataset(tmp_path / "synthetic_small")
    tokens = data.stream(range(10))
    assert data.num_tokens == 100_000
    assert tokens.min() >= 0 and tokens.max() < 512
    assert np.bincount(tokens).argmax() == 0, "the lowest id is the most frequent one"


@pytest.mark.slow
@pytest.mark.distributed
def test_several_ranks_are_checked_on_a_cpu(tmp_path: Path) -> None:
    """Catches a case over NCCL that breaks while no GPU is available, and one without a row in the table."""
    run_ = run(BENCH / "gpu.sh", "--check", "--stage", "nccl", WORK=str(tmp_path), BENCH=str(tmp_path / "bench.jsonl"))
    assert run_.returncode == 0, run_.stdout + run_.stderr
    lines = list(read_json_lines(tmp_path / "bench.jsonl"))
    assert {line["name"] for line in lines if line["bench"] == "gpu_nccl" and line["good"]} == {c.name for c in CASES}
    shown = run_.stdout[run_.stdout.index("1 x CPU") :]
    assert all(case.name in shown for case in CASES) and "NO: " not in shown
    assert "SIGKILL noticed" in shown and "SIGSTOP noticed" in shown
    assert not list(tmp_path.glob("nccl_??????*/run")), "folders of cases are left"


def test_no_gpu_is_said_plainly(tmp_path: Path) -> None:
    """Catches a benchmark that silently runs on the CPU, or a traceback instead of a message."""
    result = run(BENCH / "gpu.sh", WORK=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "no CUDA device found" in result.stderr
    assert "Traceback" not in result.stderr


def test_speed_is_the_median_after_the_warm_up(tmp_path: Path) -> None:
    """Catches slow warm-up steps in the result, and a result without the device's name."""
    EventWriter(tmp_path).write("start", device="A GPU", parameters=5, precision="bf16", layout="tp1 pp1 dp1")
    metrics = MetricsWriter(tmp_path, enabled=True)
    for step, speed in enumerate([1.0, 2.0, 100.0, 300.0, 200.0], start=1):
        metrics.write(
            {
                "step": step,
                "loss": 9.0 - step,
                "tokens_per_s": speed,
                "tflops_per_device": speed,
                "mfu": 0.4,
                "step_time_s": 1.0,
                "data_time_s": 0.0,
                "seq_len": 8,
                "global_batch_size": 2,
                "peak_memory_bytes": 2**30,
            }
        )
    metrics.write({"step": 5, "valid/held_out/loss": 3.0})
    out = tmp_path / "bench.jsonl"
    for _ in range(2):
        result = run(sys.executable, BENCH / "training_speed.py", tmp_path, "--skip", "2", "--append", out)
        assert result.returncode == 0, result.stderr
    assert "A GPU: 200 tokens/s" in result.stdout and "MFU 40.0%" in result.stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2
    assert (lines[0]["device"], lines[0]["tokens_per_s"], lines[0]["steps"]) == ("A GPU", 200.0, 3)
    assert run(sys.executable, BENCH / "training_speed.py", tmp_path, "--append", out).returncode != 0


def test_layouts_must_have_the_same_first_loss(tmp_path: Path) -> None:
    """Catches a speed reported for a layout that trains another model."""
    for name, loss in (("one", 11.0), ("same", 11.001), ("other", 11.01)):
        EventWriter(tmp_path / name).write("start", device="A GPU", parameters=5, precision="bf16", layout="tp1")
        metrics = MetricsWriter(tmp_path / name, enabled=True)
        speeds = dict.fromkeys(["tokens_per_s", "tflops_per_device", "mfu", "step_time_s", "data_time_s"], 1.0)
        sizes = {"seq_len": 8, "global_batch_size": 2, "peak_memory_bytes": 1}
        metrics.write({"step": 1, "loss": loss} | speeds | sizes)
    command = [sys.executable, BENCH / "training_speed.py", "--skip", "0", "--append", tmp_path / "out.jsonl"]
    same, other = (run(*command, tmp_path / name, "--same-as", tmp_path / "one") for name in ("same", "other"))
    assert same.returncode == 0 and "first loss off by 9.1e-05" in same.stdout
    assert other.returncode == 1 and "first loss off by 9.1e-04" in other.stdout
