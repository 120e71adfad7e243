"""Interpolation of measured operator rates: a linear cost model, corrected by nearby measurements.

The time of a GEMM [m, k] x [k, n] is c0 + c1 mnk + c2 mk + c3 nk + c4 mn: call overhead, multiply-adds, and reading,
packing and writing of the three matrices. The coefficients are a non-negative least-squares fit of the relative errors.
The residuals of nearby measurements correct the prediction, weighted by their distance in octaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import exp, log, log2
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MeasuredProduct = tuple[int, int, int, float]
"""(m, n, k, TFLOPs)."""
_NEIGHBOURS = 6
_NEAR = 0.1
"""Distance in octaves below which measurements have nearly the same weight."""


def non_negative(features: np.ndarray, values: np.ndarray, scale_by: np.ndarray) -> list[float]:
    """Non-negative least squares with scaled errors; returns the coefficients.

    Args:
        features: design matrix, [measurements, coefficients].
        values: target values, [measurements].
        scale_by: positive divisors of the errors, [measurements].
    """
    import numpy as np

    count = features.shape[1]
    scale = features.max(axis=0)
    scaled, wanted = features / np.where(scale > 0, scale, 1.0) / scale_by[:, None], values / scale_by
    best = (float("inf"), [0.0] * count)
    # There are few coefficients, so all subsets are tried; the best one without a negative coefficient is used.
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            solution = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < best[0]:
                found = [0.0] * count
                for place, value in zip(chosen, solution, strict=True):
                    found[place] = float(value / scale[place]) if scale[place] > 0 else 0.0
                best = (error, found)
    return best[1]


def _terms(m: float, n: float, k: float) -> tuple[float, float, float, float, float]:
    return 1.0, m * n * k, m * k, n * k, m * n


@lru_cache(maxsize=64)
def _coefficients(products: tuple[MeasuredProduct, ...]) -> tuple[float, ...]:
    import numpy as np

    times = np.array([2 * m * n * k / rate / 1e12 for m, n, k, rate in products])
    return tuple(non_negative(np.array([_terms(m, n, k) for m, n, k, _ in products]), times, times))


def _predicted(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    return sum(c * term for c, term in zip(_coefficients(products), _terms(m, n, k), strict=True))


@lru_cache(maxsize=4096)
def product_seconds(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    """Seconds of a GEMM.

    Args:
        products: measured GEMMs; if there are no more than coefficients, only the nearest one is used.
        m, n, k: dimensions of the GEMM.
    """
    few = len(products) <= len(_terms(1, 1, 1))
    left = []
    for a, b, c, rate in products:
        seconds = 2 * a * b * c / rate / 1e12
        expected = 2 * a * b * c / 1e12 if few else _predicted(products, a, b, c)
        left.append((abs(log2(m / a)) + abs(log2(n / b)) + abs(log2(k / c)), log(seconds / expected)))
    near = sorted(left)[: 1 if few else _NEIGHBOURS]
    shares = [(distance + _NEAR) ** -2 for distance, _ in near]
    correction = exp(sum(share * value for share, (_, value) in zip(shares, near, strict=True)) / sum(shares))
    return correction * (2 * m * n * k / 1e12 if few else _predicted(products, m, n, k))


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """Log-log linear interpolation between measured points; constant outside their range.

    Args:
        points: (x, value) pairs in ascending order of x, all positive.
        place: x at which to interpolate, positive.
    """
    if place <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if place <= high:
            share = log(place / low) / log(high / low)
            return exp((1 - share) * log(first) + share * log(second))
    return points[-1][1]
