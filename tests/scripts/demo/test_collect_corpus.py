from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/demo/collect_corpus.py"


def run(output: Path, smallest: str, largest: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--output", str(output), "--min-megabytes", smallest, "--max-megabytes", largest]
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_corpus_is_repeatable_and_has_no_machine_paths(tmp_path: Path) -> None:
    """Catches paths of the machine in the corpus, duplicates, too much text, and an order that changes between runs."""
    first, second = tmp_path / "new" / "a.jsonl", tmp_path / "b.jsonl"
    result = run(first, "1", "2")
    assert result.returncode == 0, result.stderr
    assert run(second, "1", "2").returncode == 0
    assert first.read_bytes() == second.read_bytes()
    records = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert {tuple(record) for record in records} == {("text", "source", "bytes")}
    assert all(record["source"].startswith(("stdlib/", "site-packages/")) for record in records)
    sizes = [record["bytes"] for record in records]
    assert sizes == [len(record["text"].encode()) for record in records]
    assert min(sizes) >= 200 and max(sizes) <= 200_000
    assert 1e6 <= sum(sizes) <= 2e6
    assert len({record["text"] for record in records}) == len(records)
    assert f"{len(records)} documents" in result.stdout


@pytest.mark.slow
def test_too_little_text_is_refused(tmp_path: Path) -> None:
    """Catches a demo that trains on almost no text on a machine with few packages."""
    result = run(tmp_path / "a.jsonl", "1000000", "2000000")
    assert result.returncode == 1
    assert "found only" in result.stderr and "want at least" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_contradicting_limits_are_refused(tmp_path: Path) -> None:
    """Catches limits that contradict each other and are tried anyway."""
    result = run(tmp_path / "a.jsonl", "5", "2")
    assert result.returncode == 2 and "is below" in result.stderr
