"""How often to save: Young's and Daly's intervals, and the share of the time that then trains.

An interval is seconds of training between two saves; M is the mean time between failures, and the steps wait
`stall` for a save. A synchronous save stalls for as long as it writes. An asynchronous one stalls for a copy, and the
state is safe `write` seconds later: a failure loses that time, too, which costs the same at every interval and moves no
optimum.
"""

from __future__ import annotations

import math


def young(stall_s: float, mean_time_between_s: float) -> float:
    """Young's interval, sqrt(2 * stall * M) (A first order approximation to the optimum checkpoint interval, 1974)."""
    return math.sqrt(2 * stall_s * mean_time_between_s)


def daly_first_order(stall_s: float, mean_time_between_s: float, restart_s: float) -> float:
    """Daly's first-order interval, sqrt(2 * stall * (M + R)) - stall (FGCS 22, 2006, equation 9)."""
    return max(math.sqrt(2 * stall_s * (mean_time_between_s + restart_s)) - stall_s, 0.0)


def daly(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's higher-order interval (A higher order estimate of the optimum checkpoint interval, FGCS 22, 2006, eq. 37).

    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M. Within 0.2% of the optimum of
    `expected_share` up to d = M/2.
    """
    half = stall_s / (2 * mean_time_between_s)
    if half >= 1:
        return mean_time_between_s
    return young(stall_s, mean_time_between_s) * (1 + math.sqrt(half) / 3 + half / 9) - stall_s


def expected_share(
    interval_s: float, stall_s: float, write_s: float, restart_s: float, mean_time_between_s: float
) -> float:
    """Share of the time that trains, where failures are a Poisson process and may strike a restart, too.

    A run saves once every `interval_s + stall_s` and a state counts `write_s` later, so between two failures
    exp(-write/M) / (exp((interval + stall)/M) - 1) states are expected to be kept, in M * exp(restart/M) seconds. For
    write = 0 it is the inverse of Daly's complete cost (2006, equation 20).

    Args:
        interval_s: training between two saves.
        stall_s: of each save.
        write_s: from the end of the stall until the state survives a failure.
        restart_s: from a failure to the next step: detection, restart and load.
        mean_time_between_s: between two failures.
    """
    mean = mean_time_between_s
    if math.isinf(mean):
        return interval_s / (interval_s + stall_s)
    kept = math.exp(-write_s / mean) / math.expm1((interval_s + stall_s) / mean)
    return interval_s * kept / (mean * math.exp(restart_s / mean))
