"""The benchmark of experts compares equal trainings, and models of the same active size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megads.model.model_size import parameter_count
from megads.runtime.metrics import read_json_lines
from scripts.bench.experts import AUTOCAST, COMPILED, DENSE, EAGER, OURS, sides_of, verdicts_of, works

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("small", [False, True])
def test_the_dense_model_is_as_large_as_what_a_token_uses(small: bool) -> None:
    """Catches a dense model that computes more or less than the mixture, whose speed would be compared with it."""
    mixture, dense = works("fp32", small)
    router = mixture.model.num_layers * mixture.model.moe.num_experts * mixture.model.hidden_size
    assert mixture.flops - dense.flops == 6 * mixture.tokens * router
    assert parameter_count(mixture.model) > 1.5 * parameter_count(dense.model)


def test_rates_and_times_are_judged_the_right_way_round() -> None:
    """Catches a share of the dense model's rate that is its inverse, and a peer that is not judged."""
    sides = {
        OURS: {"processor_ms": 100.0, "gflops_per_s": 45.0},
        DENSE: {"processor_ms": 80.0, "gflops_per_s": 50.0},
        EAGER: {"processor_ms": 150.0, "gflops_per_s": 30.0},
        COMPILED: {"processor_ms": 90.0, "gflops_per_s": 50.0},
    }
    found = {verdict.against: verdict for verdict in verdicts_of("fp32", sides, "processor_ms")}
    assert {name: (round(one.times, 3), one.reached) for name, one in found.items()} == {
        DENSE: (0.9, True), EAGER: (1.5, True), COMPILED: (0.9, False),
    }  # fmt: skip
    assert set(sides_of(*works("bf16", small=True), True)) == {OURS, DENSE, EAGER, AUTOCAST, COMPILED}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_command_trains_all_sides_alike(precision: str, tmp_path: Path) -> None:
    """Catches a peer that trains something else: other weights of experts, or other weights of a token's choices."""
    pytest.importorskip("transformers")
    results = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "scripts.bench.experts", "--small", "--eager-only", "--rounds", "2"]
    command += ["--threads", "1", "--precision", precision, "--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_json_lines(results)
    assert record["faults"] == {} and len(record["losses"][OURS]) == 4
    assert DENSE not in record["losses"] and record["losses"][OURS][-1] < record["losses"][OURS][0]
    assert len(record["verdicts"]) == (3 if precision == "bf16" else 2)
