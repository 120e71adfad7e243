"""Time on a device by its own clock, or on the CPU by that of the machine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 3
_AHEAD_CYCLES = 2_000_000
"""A GPU's idling for each call that is to be issued meanwhile, about a millisecond: its clock must not count how long
Python takes to issue a call."""


def median_seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Median time of `rounds` calls, after some that do not count; on a GPU from event to event, without waits between.

    Args:
        call: issues work to the current stream.
        device: cuda or cpu.
        rounds: calls.
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
    """Time of one call that starts on an idle device and is waited for: what Python takes counts, as in a training."""
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
    """Bytes a second, read and written, of a copy of `count` bytes."""
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / median_seconds(lambda: target.copy_(source), device, rounds)


def matrix_flops_per_s(device: str, rounds: int, size: int) -> float:
    """Operations a second of a square bf16 matrix product of normal values: zeros would be faster than any training."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device, rounds)
