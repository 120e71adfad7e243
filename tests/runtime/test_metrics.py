"""The run's ledger: exact, whole lines, and cut back on a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_json_lines(run_dir / "metrics.jsonl")]


def test_floats_keep_every_digit(tmp_path: Path) -> None:
    """Catches rounding: resumed runs are compared bit for bit through this file."""
    writer = MetricsWriter(tmp_path, enabled=True)
    values = [0.1 + 0.2, 1 / 3, 5e-324, math.inf]
    writer.write({"step": 1, "values": values})
    assert next(read_json_lines(tmp_path / "metrics.jsonl"))["values"] == values


def test_lines_are_on_disk_at_once_and_only_when_enabled(tmp_path: Path) -> None:
    """Catches buffered lines lost with a kill -9, and every rank writing the file."""
    writer = MetricsWriter(tmp_path, enabled=True)
    MetricsWriter(tmp_path, enabled=False).write({"step": 7})
    writer.write({"step": 1})
    assert steps(tmp_path) == [1]


def test_resume_drops_later_lines(tmp_path: Path) -> None:
    """Catches steps that are there twice after a resume from an older checkpoint."""
    writer = MetricsWriter(tmp_path, enabled=True)
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0})
        if step % 2 == 0:
            writer.write({"step": step, "valid/x/loss": 1.0})
    writer.close()
    resumed = MetricsWriter(tmp_path, enabled=True)
    resumed.drop_after(4)
    resumed.write({"step": 5, "loss": 2.0})
    assert steps(tmp_path) == [1, 2, 2, 3, 4, 4, 5]
    assert list(read_json_lines(tmp_path / "metrics.jsonl"))[-1]["loss"] == 2.0
    resumed.drop_after(0)
    assert steps(tmp_path) == []


def test_half_a_line_swallows_nothing(tmp_path: Path) -> None:
    """Catches a kill in the middle of a write that spoils the next line too."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    writer = MetricsWriter(tmp_path, enabled=True)
    writer.write({"step": 2})
    assert steps(tmp_path) == [1, 2]
    writer.drop_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_two_writers_of_events(tmp_path: Path) -> None:
    """Catches launcher and rank 0 overwriting each other's events."""
    one, two = EventWriter(tmp_path), EventWriter(tmp_path)
    one.write("launch", ranks=2)
    two.write("start", step=0)
    one.write("exit", exit_code=0)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["launch", "start", "exit"]
    assert all(line["time"] > 1.7e9 for line in lines)
