"""Stage bounds against published vectors and exhaustive search."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

import pytest

from megads.errors import ConfigError
from megads.parallel.partition import partition


def loads(weights: list[float], bounds: list[int]) -> list[float]:
    return [sum(weights[low:high]) for low, high in pairwise(bounds)]


def best_by_search(weights: list[float], num_stages: int) -> list[int]:
    """Tries every cut in front of a weighted layer's run of zeros."""
    weighted = [i for i, weight in enumerate(weights) if weight > 0]
    starts = [previous + 1 for previous in weighted[:-1]]
    choices = ([0, *cuts, len(weights)] for cuts in combinations(starts, num_stages - 1))

    def rank(bounds: list[int]) -> tuple[float, float, list[float]]:
        stage_loads = loads(weights, bounds)
        return max(stage_loads), sum(load**2 for load in stage_loads), stage_loads

    return min(choices, key=rank)


def test_bloom_layer_specs() -> None:
    """Catches bounds that differ from BLOOM's published ones (zero-weight layers on the wrong side of a cut)."""
    weights = [0, 1, 0, *[1] * 70, 0, 0, 1, 0]
    assert partition(weights, 12) == [0, 8, 14, 20, 26, 32, 38, 44, 50, 56, 62, 68, 77]


def test_own_stages() -> None:
    """Catches a final norm that is cut off from its head (a last stage with only the tied head crashes)."""
    assert partition([1, *[1] * 70, 0, 1], 12) == [*range(0, 67, 6), 73]


def test_equals_exhaustive_search() -> None:
    """Catches a wrong optimum or tie break, zero-weight layers and fractional weights included."""
    draw = random.Random(1)
    for _ in range(400):
        weights = [draw.choice([0, 0.0, 1, 1, 2, 2.5, 7]) for _ in range(draw.randint(1, 11))]
        weighted = sum(weight > 0 for weight in weights)
        if weighted:
            num_stages = draw.randint(1, weighted)
            assert partition(weights, num_stages) == best_by_search(weights, num_stages), (weights, num_stages)


def test_ties_between_inexact_sums() -> None:
    """Catches sums of tenths that differ by rounding and so break a tie at random."""
    assert partition([0.1] * 9, 4) == [0, 2, 4, 6, 9]


def test_earlier_stages_are_lighter() -> None:
    """Catches the spare layer on an early stage, which already holds the most activations."""
    assert partition([1] * 7, 3) == [0, 2, 4, 7]


def test_large_and_skewed_in_time() -> None:
    """Catches a cubic search: a thousand layers over 128 stages are planned at every start."""
    draw = random.Random(2)
    for weights in ([draw.random() for _ in range(1000)], [1000.0, *[1.0] * 999], [1.0] * 1000):
        start = time.perf_counter()
        bounds = partition(weights, 128)
        assert time.perf_counter() - start < 10
        assert len(bounds) == 129 and min(loads(weights, bounds)) > 0


def test_too_many_stages() -> None:
    """Catches a stage without a weighted layer."""
    with pytest.raises(ConfigError, match=r"has 3 stages but only 2 layers"):
        partition([0, 1, 0, 1, 0], 3)
