"""Young's and Daly's intervals against the cost that they approximate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megads.tools.plan.life import daly_first_order, daly_interval, expected_share, young_interval

HOUR_S = 3600.0


def best_interval(stall_s: float, write_s: float, restart_s: float, mean_s: float) -> tuple[float, float]:
    """The interval with the largest expected share, and that share, by search."""
    tried = np.geomspace(stall_s / 20, 20 * mean_s, 40_000)
    shares = [expected_share(every, stall_s, write_s, restart_s, mean_s) for every in tried.tolist()]
    best = int(np.argmax(shares))
    return float(tried[best]), shares[best]


def test_young() -> None:
    """Catches a wrong factor: 5 minutes per save and a failure per day give sqrt(2 * 300 * 86,400) s, two hours."""
    assert young_interval(300, 24 * HOUR_S) == pytest.approx(7200.0)
    assert daly_first_order(300, 24 * HOUR_S, 600) == pytest.approx(math.sqrt(2 * 300 * 87_000) - 300)


@pytest.mark.parametrize("stall_over_mean", [0.001, 0.01, 0.1, 0.5])
def test_dalys_interval_is_as_good_as_the_best(stall_over_mean: float) -> None:
    """Catches a wrong term of the series: Daly states an error of the cost below 0.2% for saves up to half the MTBF."""
    mean, restart = 10 * HOUR_S, 600.0
    stall = stall_over_mean * mean
    every, share = best_interval(stall, 0.0, restart, mean)
    assert expected_share(daly_interval(stall, mean), stall, 0.0, restart, mean) == pytest.approx(share, rel=2e-3)
    assert daly_interval(stall, mean) == pytest.approx(every, rel=0.01)
    assert daly_interval(3 * mean, mean) == mean, "a save takes longer than machines live: the interval is their life"


def test_a_write_beside_the_training_costs_its_time_and_does_not_move_the_optimum() -> None:
    """Catches an interval for asynchronous saves that depends on the write time, and a share that ignores it."""
    stall, write, mean = 1.0, 300.0, 3 * HOUR_S
    without, with_write = best_interval(stall, 0.0, 120, mean), best_interval(stall, write, 120, mean)
    assert with_write[0] == pytest.approx(without[0])
    assert with_write[1] == pytest.approx(without[1] * math.exp(-write / mean))


def test_daly_published_cost() -> None:
    """Catches a share that is not the inverse of Daly's complete cost, M e^(R/M) (e^((t + d)/M) - 1) / t."""
    mean, every, stall, restart = 86_400.0, 7_000.0, 300.0, 600.0
    cost = mean * math.exp(restart / mean) * (math.exp((every + stall) / mean) - 1) / every
    assert expected_share(every, stall, 0.0, restart, mean) == pytest.approx(1 / cost)
    assert expected_share(100, 1, 5, 60, math.inf) == pytest.approx(100 / 101)
