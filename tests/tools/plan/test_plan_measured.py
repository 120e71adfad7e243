"""Tests plans from a machine's calibration alone against steps that were measured on it; both are stored."""

from __future__ import annotations

from statistics import fmean, quantiles

import pytest

from megads.tools.plan.step_estimate import CALIBRATED_SPREAD
from tests.tools.plan.measured_steps import ROWS, ComparedStep, compared_steps, half_of, read_stored

LEAST_ROWS = 38
"""Rows of the stored run, which is complete."""
LEAST_WITHIN = 0.73
"""Share of a half whose plans are within 10% of what was measured."""
MEAN = 0.07


def stored_steps() -> list[ComparedStep]:
    return compared_steps(read_stored())


def test_measured_steps_are_planned() -> None:
    """Catches a change that moves the plan away from the measured steps."""
    found = stored_steps()
    assert len(found) >= LEAST_ROWS
    for half in ("fit", "judge"):
        errors = {step.row.name: step.error for step in found if half_of(step.row) == half}
        assert sum(abs(error) <= 0.1 for error in errors.values()) >= LEAST_WITHIN * len(errors), errors
        assert fmean(map(abs, errors.values())) <= MEAN, errors


def test_the_range_is_that_of_rows_that_were_not_fitted() -> None:
    """Catches a range beside planned times that is narrower than the errors of the judge rows."""
    ratios = [1 / (1 + step.error) for step in stored_steps() if half_of(step.row) == "judge"]
    deciles = quantiles(ratios, n=10, method="inclusive")
    assert (deciles[0], deciles[-1]) == pytest.approx(CALIBRATED_SPREAD, abs=0.01)


def test_every_kind_of_layout_and_shape_is_measured() -> None:
    """Catches a table of measurements without the layouts that are hard to plan."""
    assert len({row.name for row in ROWS}) == len(ROWS) >= 30
    layouts = [row.layout for row in ROWS]
    assert {layout.get("zero_stage") for layout in layouts} >= {0, 2, 3}
    assert {layout.get("schedule") for layout in layouts} >= {"interleaved", "zb_h1", "zb_v"}
    assert {axis for layout in layouts for axis in ("tp", "cp", "pp", "dp") if axis in layout} == {
        "tp",
        "cp",
        "pp",
        "dp",
    }
    assert {layout.get("recompute") for layout in layouts} >= {"selective", "full"}
    assert {row.like for row in ROWS} == {"bloom", "llama"} and {row.precision for row in ROWS} == {"bf16", "fp32"}
    for row in ROWS:
        row.parallel.check()
