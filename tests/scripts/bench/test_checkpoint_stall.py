"""The benchmark of checkpoint stalls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megads.model.model_size import parameter_count
from megads.runtime.metrics import read_json_lines
from scripts.bench.checkpoint_stall import BYTES_A_PARAMETER, COPY, OURS, PEERS, WRITE, delays, scenario_of, verdicts_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("megabytes", [200, 1000])
def test_the_state_has_the_size_asked_for(megabytes: int) -> None:
    """Catches a benchmark whose state does not have the requested size."""
    state = BYTES_A_PARAMETER * parameter_count(scenario_of(megabytes).model)
    assert state == pytest.approx(1e6 * megabytes, rel=0.1)


def test_a_slower_next_step_counts_as_stall() -> None:
    """Catches an asynchronous save that looks free although it slows down the next step, and a step time subtracted
    from a limit that does not include a step."""
    times = {"save": [10.0, 12.0, 11.0], "both": [150.0, 130.0, 140.0], "step": [90.0, 100.0, 500.0]}
    sides = dict.fromkeys((OURS, COPY, WRITE, *PEERS), times)
    found = {"state_bytes": 10**9, "num_steps": 1, "step_ms": times["step"], "sides": sides}
    assert delays(found) == {name: 11.0 if name in (COPY, WRITE) else 40.0 for name in sides}
    verdicts = {verdict.against: verdict for verdict in verdicts_of(found)}
    assert verdicts[COPY].times == pytest.approx(1.0) and verdicts[COPY].reached and verdicts[COPY].limit
    steps = verdicts["the steps alone"]
    assert steps.times == pytest.approx(100 / 140) and not steps.reached and steps.limit
    assert verdicts["torch.save"].reached and verdicts["DCP async_save"].reached
    assert {verdict.row for verdict in verdicts.values()} == {9}


@pytest.mark.slow
@pytest.mark.distributed
def test_the_benchmark_runs_and_leaves_no_files(tmp_path: Path) -> None:
    """Catches a side that no longer saves, results that are not recorded, and gigabytes left on the disk."""
    results, folder = tmp_path / "bench.jsonl", tmp_path / "disk"
    command = [sys.executable, "-m", "scripts.bench.checkpoint_stall", "--megabytes", "80", "--rounds", "1"]
    command += ["--steps", "2", "--folder", str(folder), "--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = read_json_lines(results)
    assert set(line["sides"]) == {OURS, COPY, WRITE, *PEERS}
    assert all(time > 0 for side in line["sides"].values() for time in side["save"])
    assert list(folder.iterdir()) == []
