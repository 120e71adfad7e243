"""The benchmark of the operators runs and says what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megads.runtime.metrics import read_json_lines

ROOT = Path(__file__).parents[3]


@pytest.mark.usefixtures("kernels")
def test_every_case_is_timed_and_recorded(tmp_path: Path) -> None:
    """Catches a case that broke when an operator changed, and a result that is shown and not kept."""
    results = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "scripts.bench.ops", "--small", "--rounds", "1", "--threads", "1"]
    command += ["--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records = list(read_json_lines(results))
    assert {(record["case"].split()[0], record["dtype"]) for record in records} == {
        (case, dtype) for case in ("attention", "cross", "GELU", "LayerNorm", "model") for dtype in ("fp32", "bf16")
    }
    for record in records:
        assert any("limit" in side for side in record["fastest_ms"]) and record["case"] in done.stdout
        assert all(0 < record["fastest_ms"][side] <= median for side, median in record["median_ms"].items())
