"""The benchmark of the operators runs and reports its results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megads.runtime.metrics import read_json_lines
from scripts.bench.operators import DTYPES, SMALL
from scripts.bench.ops import CASES, EAGER, INDUCTOR, OURS

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
    assert {record["case"] for record in records} == {
        make(SMALL, dtype).work for make in CASES.values() for dtype in DTYPES.values()
    }
    for record in records:
        assert record["case"] in done.stdout
        assert all(0 < side["fastest_ms"] <= side["median_ms"] for side in record["sides"].values())
        assert any(verdict["limit"] for verdict in record["verdicts"])


@pytest.mark.usefixtures("kernels")
def test_targets_compare_ours_with_the_peer() -> None:
    """Catches an inverted ratio, and a target applied to a dtype that has none."""
    fp32, bf16 = (CASES["softmax"](SMALL, dtype) for dtype in (torch.float32, torch.bfloat16))
    sides = {side: {"fastest_ms": ms} for side, ms in ((OURS, 5.0), (EAGER, 20.0), (fp32.limit, 4.0))}
    found = {verdict.against: verdict for verdict in fp32.verdicts(sides, "fastest_ms")}
    assert found[EAGER].times == 4.0 and found[EAGER].reached
    assert found["copy of its bytes"].times == 0.8 and found["copy of its bytes"].reached
    sides[OURS]["fastest_ms"] = 6.1
    assert [v.reached for v in fp32.verdicts(sides, "fastest_ms") if v.limit] == [False]
    assert [v.target for v in bf16.verdicts(sides, "fastest_ms") if v.limit] == [None]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("model", "adamw")])
def test_peers_compute_what_we_compute(name: str) -> None:
    """Catches a peer that computes something else than ours: another mask, bias, scale or reduction."""
    results = []
    case = CASES[name](SMALL, torch.float32)
    for side, call in case.sides.items():
        if side not in (INDUCTOR, case.limit):
            found = call()
            assert isinstance(found, list | torch.Tensor)
            results.append(torch.cat([part.flatten() for part in found]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)
