"""The verdict at the end of the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def verdict(run_dir: Path, *flags: str) -> int:
    script = REPOSITORY / "scripts" / "demo" / "verdict.py"
    return subprocess.run(
        [sys.executable, str(script), str(run_dir), *flags], env={"PYTHONPATH": str(REPOSITORY)}, check=False
    ).returncode


def write(path: Path, *records: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(("loss", "code"), [(5.6, 0), (5.8, 1)])
def test_the_last_validation_decides(tmp_path: Path, loss: float, code: int) -> None:
    """Catches a demo that counts a model close to the unigram loss as a success, or judges an early validation."""
    valid = {"tokens": 10, "valid/held_out/unigram_loss": 6.7}
    write(
        tmp_path / "metrics.jsonl",
        {"step": 5, **valid, "valid/held_out/loss": 6.69},
        {"step": 9, "loss": 1.0},
        {"step": 9, **valid, "valid/held_out/loss": loss},
    )
    assert verdict(tmp_path) == code


def test_an_unfinished_run_is_no_success(tmp_path: Path) -> None:
    """Catches an unfinished run taken for a finished demo: one killed after its steps were timed, or whose later
    start follows a finished one."""
    assert verdict(tmp_path) == 1
    timed = [{"event": "launch", "time": 1.0}, {"event": "exit", "exit_code": 0, "time": 2.0}]
    write(tmp_path / "events.jsonl", *timed)
    assert verdict(tmp_path, "--finished") == 1
    trained = [{"event": "launch", "time": 3.0}, {"event": "end", "stopped": "", "time": 4.0}]
    write(tmp_path / "events.jsonl", *timed, *trained)
    assert verdict(tmp_path, "--finished") == 1
    ended = [*timed, *trained, {"event": "exit", "exit_code": 0, "time": 5.0}]
    write(tmp_path / "events.jsonl", *ended)
    assert verdict(tmp_path, "--finished") == 0
    write(tmp_path / "events.jsonl", *ended, {"event": "launch", "time": 6.0}, {"event": "start", "time": 7.0})
    assert verdict(tmp_path, "--finished") == 1
