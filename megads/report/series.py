"""Arithmetic of curves: a smoothed line, an envelope of many steps, the part of an axis worth showing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megads.report.history import FloatArray

MOST_POINTS = 1000
"""Points a curve is drawn with; a longer one becomes an envelope."""


@dataclass(frozen=True)
class Envelope:
    """A curve in buckets of equally many steps; nothing that it reached is lost.

    Attributes:
        steps_per_point: steps in a bucket; 1 when the curve is drawn as it is.
        step: middle of each bucket.
        low: least finite value of each bucket; NaN where there is none.
        high: greatest finite value.
        mean: of the finite values.
    """

    steps_per_point: int
    step: FloatArray
    low: FloatArray
    high: FloatArray
    mean: FloatArray


def finite(values: FloatArray) -> FloatArray:
    """The same with NaN for infinities."""
    return np.where(np.isfinite(values), values, np.nan)


def envelope(step: FloatArray, values: FloatArray, most_points: int = MOST_POINTS) -> Envelope:
    """Puts a curve into at most `most_points` buckets."""
    size = max(1, -(-len(step) // most_points))
    starts = np.arange(0, len(step), size)
    values = finite(values)
    valid = np.isfinite(values)
    count = np.add.reduceat(valid.astype(np.float64), starts)
    total = np.add.reduceat(np.where(valid, values, 0.0), starts)
    steps = np.add.reduceat(step, starts) / np.diff(np.append(starts, len(step)))
    mean = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    return Envelope(size, steps, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), mean)


def smoothing_width(num_steps: int) -> int:
    """Steps to average over: a fortieth of the run, odd; 1 for a run too short to be smoothed."""
    width = num_steps // 40
    return 1 if num_steps < 10 else max(3, width + 1 - width % 2)


def smooth(values: FloatArray, width: int) -> FloatArray:
    """Mean of the finite values in a window of `width` steps around each.

    The window shrinks on both sides alike near the ends, so that a falling curve is not bent there.
    """
    values = finite(values)
    valid = np.isfinite(values)
    totals = np.append(0.0, np.cumsum(np.where(valid, values, 0.0)))
    counts = np.append(0.0, np.cumsum(valid))
    index = np.arange(len(values))
    reach = np.minimum(np.minimum(index, len(values) - 1 - index), width // 2)
    low, high = index - reach, index + reach + 1
    count = counts[high] - counts[low]
    return np.divide(totals[high] - totals[low], count, out=np.full(len(values), np.nan), where=count > 0)


def axis_top(values: FloatArray) -> float | None:
    """Where to cut an axis that a few outliers would flatten the rest of; None when there is nothing to cut.

    Cuts only above twice the range of 99% of the values, and only where that halves the axis at least.
    """
    values = values[np.isfinite(values)]
    if len(values) < 10:
        return None
    low, usual = np.percentile(values, [0, 99])
    top = float(usual + (usual - low))
    return top if top > low and values.max() - low > 2 * (top - low) else None
