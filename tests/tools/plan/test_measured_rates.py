"""Tests GEMM times between and beyond measured shapes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megads.tools.plan.devices import MeasuredProduct, between, gemm_seconds, non_negative


def seconds(m: int, n: int, k: int) -> float:
    """GEMM time of a machine: 5 us a call, 1 TFLOP/s, 2 ns per element of the weight, 0.5 ns per one of the result."""
    return 5e-6 + 2e-12 * m * n * k + 2e-9 * n * k + 5e-10 * m * n


def products() -> tuple[MeasuredProduct, ...]:
    shapes = itertools.product((128, 512, 2048), (128, 1024), (256, 2048))
    return tuple((m, n, k, 2 * m * n * k / seconds(m, n, k) / 1e12) for m, n, k in shapes)


def test_a_sum_of_costs_is_found_again() -> None:
    """Catches shapes between and beyond the measured ones that get the rate of a neighbouring shape."""
    for m, n, k in ((128, 1024, 256), (300, 700, 900), (4096, 4096, 512), (64, 32768, 512)):
        assert gemm_seconds(products(), m, n, k) == pytest.approx(seconds(m, n, k), rel=0.02)


def test_what_the_costs_leave_goes_to_the_shapes_nearby() -> None:
    """Catches a slow shape that is planned at the others' rate, and one that slows down all others."""
    slow = tuple((m, n, k, rate / (1.5 if (m, n, k) == (512, 1024, 2048) else 1.0)) for m, n, k, rate in products())
    assert gemm_seconds(slow, 512, 1024, 2048) > 1.35 * seconds(512, 1024, 2048)
    assert gemm_seconds(slow, 128, 128, 256) == pytest.approx(seconds(128, 128, 256), rel=0.15)
    one = ((512, 512, 512, 2.0),)
    assert gemm_seconds(one, 1024, 512, 512) == pytest.approx(2 * 1024 * 512 * 512 / 2e12)


def test_coefficients_are_never_negative() -> None:
    """Catches a negative cost coefficient, with which a shape may take no time."""
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = np.array([3.0, 2.0, 1.0])
    each, slope = non_negative(features, falling, falling)
    assert slope == 0.0 and 1.0 < each < 3.0
    assert non_negative(features, 1 + 2 * features[:, 1], falling) == pytest.approx([1.0, 2.0])


def test_values_between_points() -> None:
    """Catches extrapolation beyond the points, and wrong interpolation between them."""
    points = [(128.0, 1.0), (512.0, 4.0)]
    assert [between(points, place) for place in (64, 128, 256, 512, 4096)] == pytest.approx([1.0, 1.0, 2.0, 4.0, 4.0])
