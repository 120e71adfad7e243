"""The table of the benchmarks shows the last verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from scripts.bench.results import Verdict, against_rate, against_time, latest_verdicts, page, record, summary, table

ROOT = Path(__file__).parents[3]
STEP = against_time(1, "train step, bf16", 2000.0, "Hugging Face, eager", 3000.0, 1.5)
SHARE = against_time(1, "train step, fp32", 4000.0, "GEMM peak", 3000.0, 0.85, limit=True)
LOADER = against_rate(6, "samples", 50.0, "torch DataLoader", 10.0, "samples/s", 10.0)
EXTRA = Verdict(0, "rotary", "1 ms", "eager", "2 ms", 2.0)


def test_ratios_are_compared_with_their_targets() -> None:
    """Catches an inverted ratio, a target that is compared in the wrong direction, and a target where there is none."""
    assert (STEP.times, STEP.reached) == (1.5, True)
    assert (SHARE.times, SHARE.reached) == (0.75, False)
    assert (LOADER.times, LOADER.reached, LOADER.ours) == (5.0, False, "50 samples/s")
    assert EXTRA.reached is None
    lines = table([STEP, SHARE, LOADER, EXTRA]).splitlines()
    assert lines[2] == "| 1 | train step, bf16 | 2,000 ms | Hugging Face, eager | 3,000 ms | 1.50 | 1.50 | yes |"
    assert lines[3].endswith("| 0.75 of the limit | 0.85 | NO |") and lines[5].endswith("| 2.00 |  |  |")
    assert summary([STEP, SHARE, LOADER, EXTRA]).startswith("1 of 3 targets reached; not: train step, fp32 (GEMM peak)")


def test_results_show_the_last_verdict(tmp_path: Path) -> None:
    """Catches old results next to new ones, or for a step that now trains something else, and rows out of order."""
    results = tmp_path / "bench.jsonl"
    record(results, "ops", {"case": "rotary"}, [EXTRA])
    record(results, "loader", {}, [against_rate(6, "samples", 1.0, "torch DataLoader", 10.0, "samples/s", 10.0)])
    record(results, "train_step", {"threads": 2}, [STEP, SHARE])
    record(results, "loader", {}, [LOADER])
    with results.open("a") as file:
        file.write(json.dumps({"bench": "training_speed"}) + '\n{"bench": "cut sho')
    assert latest_verdicts(results) == [STEP, SHARE, LOADER, EXTRA]
    record(results, "train_step", {}, [], unjudged=STEP.work)
    assert latest_verdicts(results) == [SHARE, LOADER, EXTRA]
    first = json.loads(results.read_text().splitlines()[2])
    assert first["threads"] == 2 and first["cores"] >= 1 and first["verdicts"][0] == asdict(STEP)


def test_the_page_states_the_conditions(tmp_path: Path) -> None:
    """Catches results without their conditions."""
    results = tmp_path / "bench.jsonl"
    record(results, "train_step", {"threads": 1, "by": "processor_ms"}, [STEP])
    record(results, "loader", {}, [LOADER])
    page(results, tmp_path / "benchmarks.md")
    text = (tmp_path / "benchmarks.md").read_text()
    assert "1 threads, judged by processor time" in text and text.count("UTC, load") == 2
    assert "| 6 | samples |" in text


def test_missing_results_are_reported(tmp_path: Path) -> None:
    """Catches an empty table without a message."""
    command = [sys.executable, "-m", "scripts.bench.suite", "--show", "--append", str(tmp_path / "bench.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "run `make bench` first" in done.stderr and "Traceback" not in done.stderr
