"""Timers of a step and the clock that ranks share."""

from __future__ import annotations

import time

import pytest
import torch

from megads.runtime.spans import SpanRecorder, clock_offset_s
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


def _offset_of_a_clock_that_is_ahead(ahead_s: float) -> float:
    import torch.distributed as dist

    original = time.monotonic
    if dist.get_rank() == 2:
        time.monotonic = lambda: original() + ahead_s
    try:
        return clock_offset_s()
    finally:
        time.monotonic = original


@pytest.mark.distributed
def test_the_offset_of_a_clock_is_found() -> None:
    """Catches an offset with the wrong sign, one that is not measured, and an error of the measurement between ranks of
    one machine, which share their clock: in the timeline a stage would begin before the one that it waited for."""
    zero, same, ahead = run_ranks(_offset_of_a_clock_that_is_ahead, 3, 100.0)
    assert zero == same == 0.0
    assert ahead == pytest.approx(-100.0, abs=0.02)
