"""Streams of a CPU that check the order of memory accesses, as a GPU with several streams would need it.

Everything runs at once, in the order of the host's calls; but every stream has a vector clock, which
only events advance. Two accesses to the same bytes, at least one of which writes, must be ordered by the clocks: on a
GPU they could otherwise run at the same time, or in the other order. Memory that is freed and allocated again has the
same addresses, so that a tensor freed too early is seen as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.engine.activation_offload import Streams

Clock = dict[int, int]
"""For each stream, the number of its operations that have been completed."""


@dataclass(eq=False)
class ClockStream:
    """A stream, with the methods of torch.cuda.Stream."""

    number: int
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Clock:
        """An event after all operations launched so far."""
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        """Orders later operations after an event."""
        for number, time in event.items():
            self.clock[number] = max(self.clock.get(number, 0), time)


@dataclass(frozen=True)
class _Access:
    stream: int
    time: int
    start: int
    stop: int
    writes: bool
    name: str


class OrderedStreams(TorchDispatchMode):
    """Records the accesses of every operator, on the stream on which it is launched.

    Attributes:
        streams: a compute stream and two others, for `ActivationOffload`.
        races: pairs of accesses that are not ordered.
        copies: number of operators launched on streams other than the compute stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all = [ClockStream(number) for number in range(3)]
        self._active = self._all[0]
        self._accesses: list[_Access] = []
        self.races: list[str] = []
        self.copies = 0
        self.streams = Streams(self._all[1], self._all[2], lambda: self._active, self._on, pinned=False)

    @contextlib.contextmanager
    def _on(self, stream: ClockStream) -> Iterator[None]:
        before, self._active = self._active, stream
        try:
            yield
        finally:
            self._active = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and checks what it reads and writes."""
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        stream = self._active
        stream.clock[stream.number] = time = stream.clock.get(stream.number, 0) + 1
        self.copies += stream.number > 0
        named = {argument.name: argument for argument in func._schema.arguments}
        given = [*zip(func._schema.arguments, args, strict=False), *((named[k], v) for k, v in (kwargs or {}).items())]
        spans = [
            (span, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in given
            for span in _spans(value)
        ]
        spans += [(span, True) for span in _spans(result)]
        for (start, stop), writes in spans:
            self._check(_Access(stream.number, time, start, stop, writes, str(func)), stream.clock)
        others = [other.clock for other in self._all]
        self._accesses = [a for a in self._accesses if any(clock.get(a.stream, 0) < a.time for clock in others)]
        self._accesses += [
            _Access(stream.number, time, start, stop, writes, str(func)) for (start, stop), writes in spans
        ]
        return result

    def _check(self, access: _Access, clock: Clock) -> None:
        for other in self._accesses:
            conflict = (access.writes or other.writes) and access.start < other.stop and other.start < access.stop
            if conflict and clock.get(other.stream, 0) < other.time:
                self.races.append(f"{access.name} on stream {access.stream}, {other.name} on stream {other.stream}")


def _spans(value: Any) -> list[tuple[int, int]]:
    if isinstance(value, list | tuple):
        return [span for item in value for span in _spans(item)]
    if not isinstance(value, Tensor) or not value.numel() or value.device.type != "cpu":
        return []
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = value.data_ptr()
    return [(start, start + (last + 1) * value.element_size())]
