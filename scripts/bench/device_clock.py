"""Timing of work on a device: device events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 3
_AHEAD_CYCLES = 2_000_000
"""Cycles for which the GPU idles per call that is issued meanwhile, about a millisecond, so that the time excludes
Python's launch overhead."""


def median_seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Median time of `rounds` calls after a warmup; on a GPU between events, without synchronizing in between.

    Args:
        call: issues work to the current stream.
        device: cuda or cpu.
        rounds: number of timed calls.
    """
    for _ in range(WARM_UP):
        call()
    if device == "cpu":
        return statistics.median(step_seconds(call, device) for _ in range(rounds))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES * rounds)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def step_seconds(call: Callable[[], object], device: str) -> float:
    """Time of one call from an idle device to its completion; it includes Python's overhead, as in training."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def copy_bandwidth(device: str, rounds: int, count: int) -> float:
    """Bytes read and written per second by a copy of `count` bytes."""
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / median_seconds(lambda: target.copy_(source), device, rounds)


def matrix_flops_per_s(device: str, rounds: int, size: int) -> float:
    """FLOP/s of a square bf16 GEMM of normally distributed values; with zeros it would be unrealistically fast."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device, rounds)
