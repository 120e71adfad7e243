"""Console output of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from megads.monitor.console import Console, render_event, render_step, render_validation
from megads.runtime.progress import render_duration


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_step_line_has_loss_speed_and_remaining_time() -> None:
    """Catches a step line without loss, speed or remaining time."""
    record = {
        "step": 120,
        "loss": 5.84213,
        "grad_norm": 0.931,
        "lr": 2.9e-4,
        "tokens_per_s": 2612.4,
        "mfu": 0.314,
        "skipped": False,
    }
    assert render_step(record, 800, 192.0) == (
        "step 120/800 | loss 5.8421 | grad 0.93 | lr 2.9e-04 | 2,612 tok/s | MFU 31% | ETA 3m12s | skipped 0"
    )


def test_a_validation_line_has_the_unigram_loss() -> None:
    """Catches a validation line without the unigram loss to compare with."""
    record = {"step": 4, "valid/a/loss": 5.0, "valid/a/ppl": 148.41, "valid/a/unigram_loss": 6.72}
    assert render_validation(record) == "validation at step 4 | a: loss 5.0000 | ppl 148.4 | unigram loss 6.7200"
    averaged = render_validation(record | {"valid/a/average_loss": 4.9})
    assert averaged.endswith("| unigram loss 6.7200 | running average 4.9000")


def test_unknown_events_are_shown() -> None:
    """Catches an event with fields unknown to the console that breaks it."""
    assert render_event({"time": 1.0, "event": "checkpoint", "step": 5, "seconds": 0.123456}) == (
        "checkpoint: step 5, seconds 0.1235"
    )
    assert render_event({"event": "stop", "message": "kill switch"}) == "stop: kill switch"


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42s"), (192, "3m12s"), (7500, "2h05m"), (273600, "3d04h")])
def test_durations_are_shown_in_readable_units(seconds: float, text: str) -> None:
    """Catches an ETA in raw seconds."""
    assert render_duration(seconds) == text


def test_only_new_lines_are_shown_every_logging_every_steps(tmp_path: Path) -> None:
    """Catches a resumed run that replays its history, and a console that ignores logging.every_steps."""
    metrics = tmp_path / "metrics.jsonl"
    append(metrics, {"step": 1, "loss": 9.0})
    out = io.StringIO()
    console = Console(tmp_path, out, every_steps=2, total_steps=5)
    append(metrics, *({"step": step, "loss": 1.0, "step_time_s": 1.0} for step in range(2, 6)))
    with metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    console.poll()
    console.poll()
    shown = [line.split(" |")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step 2/5", "step 4/5", "step 5/5"]


def test_a_metrics_file_truncated_by_a_resume_is_followed(tmp_path: Path) -> None:
    """Catches a console that waits until a truncated file grows beyond its old length."""
    metrics = tmp_path / "metrics.jsonl"
    append(metrics, *({"step": step, "loss": 9.0} for step in range(50)))
    out = io.StringIO()
    console = Console(tmp_path, out)
    metrics.write_text("")
    console.poll()
    append(metrics, {"step": 1, "loss": 1.0})
    console.poll()
    assert out.getvalue() == "step 1 | loss 1.0000\n"


def test_events_are_ordered_among_steps_and_validations(tmp_path: Path) -> None:
    """Catches 'end' before the last validation, 'start' after the first step, and layer metrics as a validation."""
    out = io.StringIO()
    console = Console(tmp_path, out)
    append(tmp_path / "metrics.jsonl", {"step": 2, "layers/embedding/grad_norm": 1.0})
    append(tmp_path / "events.jsonl", {"event": "start", "total_steps": 3}, {"event": "end", "step": 3})
    append(tmp_path / "metrics.jsonl", {"step": 3, "loss": 1.0}, {"step": 3, "valid/a/loss": 1.0})
    console.poll()
    assert [line.split()[0].rstrip(":") for line in out.getvalue().splitlines()] == [
        "start",
        "step",
        "validation",
        "end",
    ]


def test_logging_level_selects_what_is_shown(tmp_path: Path) -> None:
    """Catches logging.level=warning that hides warnings or shows steps."""
    out = io.StringIO()
    console = Console(tmp_path, out, level="warning")
    append(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0})
    append(tmp_path / "events.jsonl", {"event": "skip", "level": "warning", "step": 1}, {"event": "start"})
    console.poll()
    assert out.getvalue() == "skip: step 1\n"
