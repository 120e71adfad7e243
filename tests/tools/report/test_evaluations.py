"""Loss by position and needles in a report, from the result files of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from megads.runtime.metrics import MetricsWriter
from megads.tools.report.config import ReportConfig
from megads.tools.report.evaluations import losses_by_position, needle_grids
from megads.tools.report.history import read_history
from megads.tools.report.page import write_report
from tests.tools.report.test_page import assert_self_contained
from tests.tools.report.written_runs import BEGIN, write_config, write_events, write_start, write_steps

RANGES = [(0, 0, 5.0), (1, 1, 4.5), (2, 3, 4.25), (4, 7, 4.125)]
YARN = {"seq_len": 4096, "rope_scaling": {"kind": "yarn", "factor": 4.0}}


def evaluated(run_dir: Path, name: str, content: dict[str, Any], recorded: Path | None = None) -> None:
    """Writes a result file, and the event that names it, as in the folder `recorded`."""
    path = run_dir / "evaluation" / "step_00000003" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": 3, **content}))
    write_events(run_dir, ("evaluation", {"step": 3, "files": [str((recorded or path.parent) / name)], "results": {}}))


def positions(add: float = 0.0) -> list[dict[str, Any]]:
    return [{"first": first, "last": last, "loss": loss + add, "tokens": 8} for first, last, loss in RANGES]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_config(tmp_path, "long")
    write_start(tmp_path, 0, BEGIN)
    write_steps(tmp_path, 1, 3)
    return tmp_path


def test_losses_by_position_are_drawn_and_listed(run_dir: Path) -> None:
    """Catches results of other settings that replace each other, an older result beside a newer one of the same, losses
    beside the wrong position, files that are not found after a move, and a damaged file that hides the others."""
    metrics = MetricsWriter(run_dir, enabled=True)
    for step, loss in ((2, 9.0), (3, 3.0)):
        metrics.write({"step": step, "valid/a/loss": loss, "valid/a/position_0": loss, "valid/a/position_1": loss - 1})
    metrics.close()
    old = Path("/a/folder/of/another/machine/step_00000003")
    evaluated(run_dir, "perplexity_1.json", {"settings": {}, "sets": {"a": {"by_position": positions(0.5)}}}, old)
    evaluated(run_dir, "perplexity_2.json", {"settings": YARN, "sets": {"a": {"by_position": positions()}}})
    evaluated(run_dir, "perplexity_3.json", {"settings": {}, "sets": {"a": {"by_position": positions(1)}, "b": {}}})
    evaluated(run_dir, "perplexity_4.json", {"sets": {"a": {"by_position": [1, {"first": "x"}]}}})
    (run_dir / "evaluation" / "step_00000003" / "perplexity_4.json").write_text("{")
    curves = {curve.name: curve for curve in losses_by_position(read_history(run_dir))}
    assert list(curves) == ["a, validation at step 3", "a, 4,096 tokens, yarn x 4, step 3", "a, step 3"]
    assert curves["a, validation at step 3"].loss.tolist() == [3.0, 2.0]
    assert curves["a, step 3"].loss.tolist() == [6.0, 5.5, 5.25, 5.125]
    assert curves["a, step 3"].first.tolist() == [0, 1, 2, 4]
    written = write_report(ReportConfig(run=str(run_dir)))
    assert "loss_by_position.png" in [path.name for path in written.pictures]
    page = written.page.read_text()
    assert_self_contained(page)
    row = page[page.index('<td class="number">4 to 7</td>') :].partition("</tr>")[0]
    assert "4.1250" in row and "5.1250" in row and "2.0000" not in row


def grid(share: float) -> dict[str, Any]:
    cells = [
        {"length": length, "depth": depth, "accuracy": share * (depth == 1) + length / 10_000, "exact_match": depth / 4}
        for length in (2048, 1024)
        for depth in (1.0, 0.0, 0.5)
    ]
    return {"samples": 5, "distractors": 4, "cells": cells}


def test_needles_are_a_heat_map_and_a_table(run_dir: Path) -> None:
    """Catches lengths and depths that are exchanged or out of order, markup from a file, and a page without charts for
    a run without needles."""
    assert needle_grids(read_history(run_dir)) == []
    assert "needles.png" not in [path.name for path in write_report(ReportConfig(run=str(run_dir))).pictures]
    evaluated(run_dir, "needles_1.json", {"settings": {"rope_scaling": {"kind": "<b>"}}, "needles": grid(0.2)})
    evaluated(run_dir, "needles_2.json", {"settings": YARN, "needles": grid(0.5)})
    first, newest = needle_grids(read_history(run_dir))
    assert newest.name == "4,096 tokens, yarn x 4, step 3" and newest.chance == 0.2
    assert (newest.lengths, newest.depths) == ((1024, 2048), (0.0, 0.5, 1.0))
    assert newest.accuracy.tolist() == [[0.1024, 0.2048], [0.1024, 0.2048], [0.6024, 0.7048]]
    assert newest.exact_match[:, 0].tolist() == [0.0, 0.125, 0.25] and first.accuracy[2, 0] == 0.2 + 0.1024
    written = write_report(ReportConfig(run=str(run_dir)))
    assert "needles.png" in [path.name for path in written.pictures]
    page = written.page.read_text()
    assert_self_contained(page)
    assert "<b>" not in page and "70% (25%)" in page and "a guess is right in 20% of them" in page
