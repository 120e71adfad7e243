"""Timers of a step and the clock that ranks share."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megads.runtime.distributed import open_control_plane
from megads.runtime.spans import PINGS, SpanRecorder, clock_offset_s
from tests.distributed import run_ranks


def test_spans_are_as_long_as_what_ran_inside() -> None:
    """Catches spans that are written while nobody asked, lose their names, or begin and end elsewhere."""
    recorder = SpanRecorder(torch.device("cpu"))
    with recorder.span("before"):
        pass
    recorder.begin()
    before_s = time.monotonic()
    with recorder.span("forward", 3, 1):
        time.sleep(0.02)
    with recorder.span("optimizer_step"):
        pass
    after_s = time.monotonic()
    spans = recorder.end()
    assert [(s.kind, s.micro_batch, s.stage) for s in spans] == [("forward", 3, 1), ("optimizer_step", None, None)]
    assert before_s <= spans[0].start_s < spans[0].start_s + 0.02 <= spans[0].end_s <= spans[1].start_s <= after_s


HOSTS, AHEAD_S = ("a", "a", "b", "c", "c", "d"), {"a": 0.0, "b": 100.0, "c": -7.0, "d": 30.0}


def _offset_of_a_machine() -> tuple[float, int]:
    """The offset on a rank of several machines, each with a clock of its own, and how many pings it took part in."""
    import torch.distributed as dist

    original, host = time.monotonic, HOSTS[dist.get_rank()]
    time.monotonic = lambda: original() + AHEAD_S[host]
    pings, send = 0, dist.send

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal pings
        pings += 1
        send(*args, **kwargs)

    dist.send = counted
    try:
        return clock_offset_s(open_control_plane(), host), pings
    finally:
        time.monotonic, dist.send = original, send


@pytest.mark.distributed
def test_the_offset_of_a_machines_clock_is_found() -> None:
    """Catches an offset with the wrong sign, one that leaves out a machine on the way to rank 0, and ranks of one
    machine that measure, each with another error: in the timeline a stage would begin before the one it waited for."""
    found = run_ranks(_offset_of_a_machine, len(HOSTS))
    for host, (offset_s, _) in zip(HOSTS, found, strict=True):
        assert offset_s == pytest.approx(-AHEAD_S[host], abs=0.05)
    assert found[0][0] == found[1][0] == 0.0 and found[3][0] == found[4][0]
    # Rank 0 hears two of the other three machines, not all; ranks that are not the first of theirs hear nobody.
    assert [pings // PINGS for _, pings in found] == [2, 0, 2, 1, 0, 1]


def _offset_here() -> float:
    return clock_offset_s(open_control_plane())


@pytest.mark.distributed
def test_ranks_of_this_machine_share_their_clock() -> None:
    """Catches the error of a measurement between ranks that read the same clock."""
    assert run_ranks(_offset_here, 2) == [0.0, 0.0]
