"""Timers of the actions of a step, for timelines, profiles and straggler detection (`TrainEngine.watch_spans`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from megads.runtime.hooks import Span


@dataclass(frozen=True)
class _Mark:
    """Start or end of a span: seconds on a CPU, a CUDA event on a GPU."""

    at: Any


class SpanRecorder:
    """Times the code inside `span`, in steps for which it is enabled.

    In a step that torch.profiler records, each span is also a range of its trace.

    On a GPU the times are device times: CUDA events in the stream, read after the step, so that the host does not
    synchronize during the step.

    Args:
        device: device to time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[str, int | None, int | None, _Mark, _Mark]] | None = None
        self._profiled = False

    def begin(self) -> None:
        """Enables recording for a step."""
        self._open, self._profiled = [], torch.autograd._profiler_enabled()
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
        """Times the code inside the context manager."""
        if self._open is None:
            yield
            return
        start = self._mark()
        if self._profiled:
            with record_function(Span(kind, micro_batch, stage, 0.0, 0.0).name):
                yield
        else:
            yield
        self._open.append((kind, micro_batch, stage, start, self._mark()))

    def end(self) -> list[Span]:
        """Disables recording; returns the spans of the step, in the order of their ends."""
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
