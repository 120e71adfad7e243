"""The parts of scripts/bench/gpu.sh that a CPU can run."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megads.data.indexed.dataset import IndexedDataset
from megads.runtime.metrics import MetricsWriter, read_json_lines
from scripts.bench.gpu_judges import speed
from scripts.bench.gpu_runs import CASES
from scripts.bench.gpu_stages import ALWAYS, NCCL, STAGES

BENCH = Path(__file__).parents[3] / "scripts/bench"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, env=variables)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_gpu_script_checks_itself_on_a_cpu(tmp_path: Path) -> None:
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
    runs = {line["name"]: line["verdict"] for line in lines if line["bench"] == "gpu_runs" and line["good"]}
    assert all(runs[name].startswith("5 steps") for name in ("one device", "parallel.dp=2")), "the override is lost"
    assert "first loss off by" in runs["parallel.dp=2"] and "bit-equal" in runs["resumed, ops.impl=fused"]
    shown = run_.stdout[run_.stdout.index("1 x CPU") :]
    for wanted in (
        "RMSNorm",
        "resumed, ops.impl=fused",
        "parallel.dp=2",
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
    cases = [case for case in CASES if case.stage == NCCL]
    assert {line["name"] for line in lines if line["bench"] == "gpu_runs" and line["good"]} == {c.name for c in cases}
    shown = run_.stdout[run_.stdout.index("1 x CPU") :]
    assert all(case.name in shown for case in cases) and "NO: " not in shown
    assert "SIGKILL noticed" in shown and "SIGSTOP noticed" in shown
    assert not list(tmp_path.glob("case_*")), "folders of cases are left"


def test_a_missing_gpu_is_reported(tmp_path: Path) -> None:
    """Catches a benchmark that silently runs on the CPU, or a traceback instead of a message."""
    result = run(BENCH / "gpu.sh", WORK=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "no CUDA device found" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_layouts_speed_is_judged(tmp_path: Path) -> None:
    """Catches slow warm-up steps in the speed of a layout, and a speed of a layout that trains another model."""
    metrics = MetricsWriter(tmp_path, enabled=True)
    for step, rate in enumerate([1.0, 2.0, 100.0, 300.0, 200.0], start=1):
        times = {"tokens_per_s": rate, "mfu": 0.4, "step_time_s": 1.0, "peak_memory_bytes": 2**30}
        metrics.write({"step": step, "loss": 12.0 - step} | times)
    metrics.write({"step": 5, "valid/held_out/loss": 3.0})
    said, good = speed(tmp_path, 2, None)
    assert said.startswith("3 steps, 1000 ms, 200 tokens/s, MFU 40.0%, 1.0 GiB") and good
    assert speed(tmp_path, 2, 11.001)[1]
    said, good = speed(tmp_path, 2, 11.01)
    assert said.endswith("first loss off by 9.1e-04: NOT THE SAME") and not good
