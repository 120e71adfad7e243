"""scripts/bench/gpu_plan.py, which compares plans with measured steps of a GPU, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.model_size import parameter_count
from megads.runtime.environment import child_environment
from megads.tools.plan.calibrate.passes import GPU_TRIALS
from megads.tools.plan.devices import DEVICES
from scripts.bench.gpu_plan import BUSY_OR_NOT, ROWS, line_of, measured_s, rows_for, summary
from scripts.bench.processes import ONE_RANK, SideProcess, Turn


def test_plans_are_evaluated_on_rows_that_were_not_fitted() -> None:
    """Catches plans evaluated on the shapes they were calibrated with, and omitted model sizes or settings."""
    shapes = {(trial.like, trial.layers, trial.hidden, trial.seq_len) for trial in GPU_TRIALS}
    assert not shapes & {(row.like, row.layers, row.hidden, row.seq_len) for row in ROWS}
    sizes = [parameter_count(row.model) for row in ROWS]
    assert min(sizes) < 1.3e8 and 1.3e9 < max(sizes) < 1.6e9
    assert {row.recompute for row in ROWS} == {"none", "selective", "full"}
    assert len(BUSY_OR_NOT) == 8 and {replace(row, cuda_graphs=False) for row in ROWS} == set(BUSY_OR_NOT)
    assert not any(row.cuda_graphs for row in rows_for("cpu"))
    assert {row.like for row in rows_for("cpu")} == {row.like for row in ROWS}


def test_errors_have_the_plans_sign_and_device() -> None:
    """Catches a plan called too slow that is too fast, and a shipped device used in place of the calibrated one."""
    row, h200 = ROWS[2], DEVICES["h200"]
    slower = replace(h200, matmul_efficiency=h200.matmul_efficiency / 2)
    planned = row.planned(h200).step_time_s
    line = line_of(row, planned / 1.05, slower, h200)
    assert line["verdict"].endswith("h200 +5.0%") and line["calibrated_s"] > 1.3 * planned
    unknown = line_of(row, planned, h200, None)
    assert unknown["verdict"].endswith("calibrated +0.0%")
    assert summary([line, unknown]).startswith("calibrated: 1 of 2 within 10%")
    assert "shipped: 1 of 1 within 10%, mean 5.0%" in summary([line, unknown])


def _side() -> Turn:
    with child_environment(ONE_RANK):
        seconds = [measured_s(row, "cpu") for row in rows_for("cpu")]
    return lambda: dict(zip("abcd", seconds, strict=True))


@pytest.mark.distributed
def test_every_row_is_a_valid_config() -> None:
    """Catches a row whose config no engine accepts."""
    side = SideProcess("rows", _side, ())
    try:
        side.wait_until_ready()
        found = side.take_turn().found
    finally:
        side.close()
    assert all(0 < seconds < 60 for seconds in found.values()) and len(found) == 4
