"""The benchmark of fp32 and bf16 steps on this processor and limited to AVX2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.runtime.metrics import read_json_lines
from scripts.bench import processors


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a machine that is left out, a limit that the child does not get, and an exit code that hides a slow
    bf16 step."""
    results = tmp_path / "bench.jsonl"
    command = ["processors", "--only", "tiny", "--seconds", "0.5", "--append", str(results)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(processors, "LIMIT", 0.0)
    assert processors.main() == 1
    shown = capsys.readouterr().out
    found = list(read_json_lines(results))
    assert [line["machine"] for line in found] == list(processors.MACHINES)
    assert all(line["fp32"] > 0 and line["bf16"] > 0 and line["busy_ms"] > 0 for line in found)
    assert shown.count("times the fp32 step, limit 0.0") == len(found)
