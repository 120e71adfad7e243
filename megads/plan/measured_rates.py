"""Rates of operators between those that were measured: a sum of costs, corrected by the measurements nearby.

The time of a matrix product [m, k] x [k, n] is c0 + c1 mnk + c2 mk + c3 nk + c4 mn: a call, multiply-adds, and what is
read, packed and written of the three matrices. The coefficients are the least squares of relative errors, none
negative; what they leave of a measurement goes to the shapes around it, the nearer in octaves the more.
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
"""m, n, k, TFLOPs."""
_NEIGHBOURS = 6
_NEAR = 0.1
"""Octaves within which measurements count alike."""


def non_negative(features: np.ndarray, values: np.ndarray, scale_by: np.ndarray) -> list[float]:
    """Coefficients, none below zero, of the least squares of errors relative to something.

    Args:
        features: [measurements, coefficients].
        values: [measurements], that the features are to add up to.
        scale_by: [measurements], above zero: what an error is measured by.
    """
    import numpy as np

    count = features.shape[1]
    scale = features.max(axis=0)
    scaled, wanted = features / np.where(scale > 0, scale, 1.0) / scale_by[:, None], values / scale_by
    best = (float("inf"), [0.0] * count)
    # Few coefficients: the best of all subsets of which none comes out negative.
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


def _summed(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    return sum(c * term for c, term in zip(_coefficients(products), _terms(m, n, k), strict=True))


@lru_cache(maxsize=4096)
def product_seconds(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    """Seconds of a product.

    Args:
        products: measured ones; with fewer than there are coefficients only the nearest counts.
        m, n, k: its dimensions.
    """
    few = len(products) <= len(_terms(1, 1, 1))
    left = []
    for a, b, c, rate in products:
        seconds = 2 * a * b * c / rate / 1e12
        expected = 2 * a * b * c / 1e12 if few else _summed(products, a, b, c)
        left.append((abs(log2(m / a)) + abs(log2(n / b)) + abs(log2(k / c)), log(seconds / expected)))
    near = sorted(left)[: 1 if few else _NEIGHBOURS]
    shares = [(distance + _NEAR) ** -2 for distance, _ in near]
    correction = exp(sum(share * value for share, (_, value) in zip(shares, near, strict=True)) / sum(shares))
    return correction * (2 * m * n * k / 1e12 if few else _summed(products, m, n, k))


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """A value between measured ones, straight in logarithms; beyond them the last one.

    Args:
        points: places in order, and values, all above zero.
        place: above zero.
    """
    if place <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if place <= high:
            share = log(place / low) / log(high / low)
            return exp((1 - share) * log(first) + share * log(second))
    return points[-1][1]
