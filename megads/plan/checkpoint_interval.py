"""Optimal checkpoint interval (Young, Daly) and the resulting goodput.

The interval is the training time in seconds between two saves. M is the mean time between failures (MTBF); `stall` is
the time that training is blocked by a save. A synchronous save blocks until it is written. An asynchronous save blocks
only for the copy, and the checkpoint is usable `write` seconds later: a failure loses that time as well, which costs
the same at every interval and does not move the optimum.
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
    """Expected goodput (share of wall time that is useful training) under failures from a Poisson process.

    Failures may also occur during a restart. A run saves once every `interval_s + stall_s`, and a checkpoint is usable
    `write_s` later, so exp(-write/M) / (exp((interval + stall)/M) - 1) checkpoints are expected between two failures,
    in M * exp(restart/M) seconds. For write = 0 the result is the inverse of Daly's complete cost (2006, equation 20).

    Args:
        interval_s: training time between two saves.
        stall_s: time that each save blocks training.
        write_s: time from the end of the stall until the checkpoint survives a failure.
        restart_s: time from a failure to the next step: detection, restart and load.
        mean_time_between_s: mean time between failures (MTBF).
    """
    mean = mean_time_between_s
    if math.isinf(mean):
        return interval_s / (interval_s + stall_s)
    kept = math.exp(-write_s / mean) / math.expm1((interval_s + stall_s) / mean)
    return interval_s * kept / (mean * math.exp(restart_s / mean))
