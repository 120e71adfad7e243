"""The benchmark of the operators runs and reports its results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megads.runtime.metrics import read_json_lines
from scripts.bench.operators import DTYPES, SMALL
from scripts.bench.ops import CASES, INDUCTOR, LIMIT, OURS, verdicts_of

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_every_case_is_timed_and_recorded(tmp_path: Path) -> None:
    """Catches a case that broke when an operator changed, and a result that is printed but not recorded."""
    results = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "scripts.bench.ops", "--small", "--rounds", "1", "--threads", "1"]
    command += ["--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records = list(read_json_lines(results))
    wanted = {(make(SMALL, torch.float32).name, dtype) for make in CASES.values() for dtype in DTYPES}
    assert {(record["case"], record["dtype"]) for record in records} == wanted
    for record in records:
        assert LIMIT in record["sides"] and record["case"] in done.stdout
        assert all(0 < side["fastest_ms"] <= side["median_ms"] for side in record["sides"].values())
        assert any(verdict["limit"] for verdict in record["verdicts"])


def test_targets_go_the_right_way_round() -> None:
    """Catches an inverted ratio, and a target applied to a dtype that has none."""
    case = CASES["softmax"](SMALL, torch.float32)
    sides = {side: {"fastest_ms": ms} for side, ms in ((OURS, 5.0), ("eager", 20.0), (LIMIT, 4.0))}
    found = {verdict.against: verdict for verdict in verdicts_of(case, "fp32", sides, "fastest_ms")}
    assert found["eager"].times == 4.0 and found["eager"].reached
    assert found["copy of its bytes"].times == 0.8 and found["copy of its bytes"].reached
    sides[OURS]["fastest_ms"] = 6.1
    assert [v.reached for v in verdicts_of(case, "fp32", sides, "fastest_ms") if v.limit] == [False]
    assert [v.target for v in verdicts_of(case, "bf16", sides, "fastest_ms") if v.limit] == [None]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("model", "adamw")])
def test_sides_compute_the_same(name: str) -> None:
    """Catches a peer that computes something else than ours: another mask, bias, scale or reduction."""
    results = []
    for side, call in CASES[name](SMALL, torch.float32).sides.items():
        if side != INDUCTOR:
            found = call()
            assert isinstance(found, list | torch.Tensor)
            results.append(torch.cat([part.flatten() for part in found]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)
