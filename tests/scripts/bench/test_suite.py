"""`make bench` runs its parts with options that exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megads.runtime.metrics import read_json_lines
from scripts.bench.ops import CASES
from scripts.bench.suite import PARTS, QUICK_OPERATORS, Part

ROOT = Path(__file__).parents[3]
SHARED = {"--append": "add_results_option", "--by": "add_judge_option"}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.module)
def test_every_option_of_the_suite_exists(part: Part) -> None:
    """Catches an option that a benchmark no longer has, found only after twenty minutes of benchmarks."""
    spec = importlib.util.find_spec(f"scripts.bench.{part.module}")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if "parse_options(__doc__)" in source:  # benchmarks of training steps share their options
        source += (ROOT / "scripts" / "bench" / "train_step.py").read_text()
    judged = "--threads --by" if part.judged else ""
    for option in re.findall(r"--[a-z-]+", f"{part.full} {part.quick} --append {judged}"):
        assert f'"{option}"' in source or f"{SHARED.get(option)}(parser)" in source, option


def test_a_quick_run_leaves_out_only_the_model() -> None:
    """Catches a new operator that quick runs do not time; the model is part of the training step."""
    assert set(CASES) - set(QUICK_OPERATORS) == {"model"} and set(QUICK_OPERATORS) < set(CASES)


@pytest.mark.slow
@pytest.mark.distributed
def test_every_part_runs_and_is_shown(tmp_path: Path) -> None:
    """Catches results missing from the table, a missing time, and a failure that is not reported."""
    results = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "scripts.bench.suite", "--quick", "--only", "blend", "--only", "loader"]
    command += ["--only", "preprocess", "--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {record["bench"] for record in read_json_lines(results)} == {"blend", "loader", "preprocess"}
    assert "| 6 | samples of 2048 tokens |" in done.stdout and re.search(r"altogether +\d+ s", done.stdout)
    command += ["--megatron", str(tmp_path)]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert failed.returncode == 1 and "FAILED with exit code 1" in failed.stdout
