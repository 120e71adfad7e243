"""When a rank did what within a step: cheap timers, and the clock that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megads.runtime.span import Span

PINGS = 8
"""Round trips by which two clocks are compared; the fastest one counts."""


@dataclass(frozen=True)
class _Mark:
    """One end of a span: seconds on a CPU, an event in the stream of a GPU."""

    at: Any


class SpanRecorder:
    """Times what is run inside of `span`; does nothing until it is switched on.

    On a GPU the times are those at which the device came to it: events in its stream, read after the step, so that
    nothing waits for the device meanwhile.

    Args:
        device: that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[str, int | None, int | None, _Mark, _Mark]] | None = None

    def begin(self) -> None:
        """Switches it on for a step."""
        self._open = []
        self._zero_s, self._zero = 0.0, _Mark(None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._zero_s, self._zero = time.monotonic(), self._mark()

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return _Mark(time.monotonic())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Mark(event)

    @contextmanager
    def span(self, kind: str, micro_batch: int | None = None, stage: int | None = None) -> Iterator[None]:
        """Times what is run inside."""
        if self._open is None:
            yield
            return
        start = self._mark()
        yield
        self._open.append((kind, micro_batch, stage, start, self._mark()))

    def end(self) -> list[Span]:
        """Switches it off; the spans of the step, in the order of their ends."""
        assert self._open is not None
        found, self._open = self._open, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            Span(kind, micro_batch, stage, self._read(a), self._read(b)) for kind, micro_batch, stage, a, b in found
        ]

    def _read(self, mark: _Mark) -> float:
        if self._device.type != "cuda":
            return float(mark.at)
        return self._zero_s + float(self._zero.at.elapsed_time(mark.at)) / 1e3


def clock_offset_s() -> float:
    """Seconds to add to this rank's monotonic clock to get rank 0's; collective over the world.

    Half of the fastest round trip is taken for the way back, as in Cristian's algorithm: the error is at most that. An
    answer from within the round trip comes from the same clock: ranks of a machine share it, and those of two machines
    count from their boots. So times that need no offset do not get the error of one.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo")
    clock = torch.zeros((), dtype=torch.float64)
    offset_s = 0.0
    for other in range(1, world_size):
        if rank == 0:
            for _ in range(PINGS):
                dist.recv(clock, other, group=group)
                dist.send(clock.fill_(time.monotonic()), other, group=group)
        if rank == other:
            fastest_s = float("inf")
            for _ in range(PINGS):
                sent_s = time.monotonic()
                dist.send(clock, 0, group=group)
                dist.recv(clock, 0, group=group)
                received_s = time.monotonic()
                if received_s - sent_s < fastest_s:
                    fastest_s, same = received_s - sent_s, sent_s <= float(clock) <= received_s
                    offset_s = 0.0 if same else float(clock) - (sent_s + received_s) / 2
    dist.destroy_process_group(group)
    return offset_s
