"""Curves are reduced and smoothed without hiding or inventing anything."""

from __future__ import annotations

import numpy as np
import pytest

from megads.report.series import axis_top, envelope, smooth, smoothing_width


def test_a_short_curve_is_drawn_as_it_is() -> None:
    """Catches buckets where there is room for every step."""
    step, values = np.arange(1.0, 6.0), np.array([3.0, np.nan, np.inf, 1.0, 2.0])
    curve = envelope(step, values)
    assert curve.steps_per_point == 1
    np.testing.assert_array_equal(curve.step, step)
    np.testing.assert_array_equal(curve.mean, [3, np.nan, np.nan, 1, 2])


def test_an_envelope_keeps_the_extremes_of_100_000_steps() -> None:
    """Catches downsampling by taking every hundredth step, which loses a spike of one step."""
    step = np.arange(100_000.0)
    values = np.sin(step)
    values[77_777], values[33_333], values[50_000:50_300] = 50.0, -50.0, np.nan
    curve = envelope(step, values)
    assert len(curve.step) == 1000 and curve.steps_per_point == 100
    assert (np.nanmax(curve.high), np.nanmin(curve.low)) == (50.0, -50.0)
    assert np.isnan(curve.mean[500:503]).all() and np.isfinite(curve.mean[503])
    assert np.nanmean(curve.mean) == pytest.approx(np.nanmean(values), abs=1e-6)


def test_the_last_bucket_may_be_smaller() -> None:
    """Catches a mean over a full bucket's length."""
    curve = envelope(np.arange(1001.0), np.full(1001, 2.0), most_points=500)
    assert curve.steps_per_point == 3
    np.testing.assert_allclose(curve.mean, 2.0)
    assert curve.step[-1] == 999.5


def test_smoothing_keeps_a_line_a_line() -> None:
    """Catches windows that are cut on one side only, which bend the ends of a falling loss."""
    line = np.linspace(9, 3, 50)
    np.testing.assert_allclose(smooth(line, 11), line)


def test_smoothing_averages_what_is_finite() -> None:
    """Catches a NaN that spreads over its window."""
    values = np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    np.testing.assert_allclose(smooth(values, 3), [1, 2, 3, 4, 5])
    assert np.isnan(smooth(np.full(5, np.nan), 3)).all()


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (9, 1), (10, 3), (400, 11), (100_000, 2501)])
def test_smoothing_width(steps: int, width: int) -> None:
    """Catches an even width, which shifts the curve by half a step."""
    assert smoothing_width(steps) == width


def test_only_outliers_are_cut() -> None:
    """Catches an axis that hides the start of a training, and one that a spike flattens."""
    loss = 4 + 6 * np.exp(-np.arange(300) / 30)
    assert axis_top(loss) is None
    spiked = loss.copy()
    spiked[200] = 900.0
    top = axis_top(spiked)
    assert top is not None and loss.max() < top < 20
    assert axis_top(np.array([1.0, 1000.0])) is None
    assert axis_top(np.full(100, np.nan)) is None
