"""What a rank did within a step, and when: cheap timers, the clock that all ranks share, and the file of spans."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megads.parallel.grid import ParallelGrid
from megads.runtime.distributed import ControlPlane
from megads.runtime.files import atomic_writer
from megads.runtime.hooks import StepInfo, TrainState
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


def clock_offset_s(control: ControlPlane, clock: str | None = None) -> float:
    """Seconds to add to this rank's monotonic clock to get rank 0's; collective over the world.

    Ranks that share a clock, those of one machine, get the same offset: one of them compares it with another machine's.
    Machines form a binomial tree, so 1,000 of them take as long as ten comparisons. Each takes half of the fastest
    round trip for the way back, as in Cristian's algorithm, and errs by at most that; errors add up along the tree.

    Args:
        control: of all ranks.
        clock: names the clock that this rank reads; None is the machine's.
    """
    clocks = control.gather(_machine_clock() if clock is None else clock, str)
    first_rank: dict[str, int] = {}
    for rank, name in enumerate(clocks):
        first_rank.setdefault(name, rank)
    machines = list(first_rank.values())
    behind_s = 0.0
    if control.rank in machines:
        here, distance = machines.index(control.rank), 1
        while distance < len(machines):
            if distance <= here < 2 * distance:
                behind_s = _behind_s(control, machines[here - distance])
            elif here < distance and here + distance < len(machines):
                _answer(control, machines[here + distance])
            distance *= 2
    measured = control.gather(behind_s, float)
    # Of the machine at which this one's comparison ended, and so on to that of rank 0.
    offset_s, here = 0.0, list(first_rank).index(clocks[control.rank])
    while here > 0:
        offset_s += measured[machines[here]]
        here -= 1 << (here.bit_length() - 1)
    return offset_s


def _machine_clock() -> str:
    """What monotonic clocks count from: the boot of the machine, or a container's own start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/time").readlink())
    except OSError:
        return socket.gethostname()


def _behind_s(control: ControlPlane, other: int) -> float:
    """Seconds to add to this rank's clock to get another's, which answers at the same time.

    An answer from within the round trip comes from the same clock after all, and needs no offset.
    """
    clock, fastest_s, behind_s = torch.zeros((), dtype=torch.float64), float("inf"), 0.0
    for _ in range(PINGS):
        sent_s = time.monotonic()
        dist.send(clock, other, group=control.group)
        dist.recv(clock, other, group=control.group)
        received_s = time.monotonic()
        if received_s - sent_s < fastest_s:
            fastest_s, same = received_s - sent_s, sent_s <= float(clock) <= received_s
            behind_s = 0.0 if same else float(clock) - (sent_s + received_s) / 2
    return behind_s


def _answer(control: ControlPlane, other: int) -> None:
    """Tells another rank this one's clock as often as it asks."""
    clock = torch.zeros((), dtype=torch.float64)
    for _ in range(PINGS):
        dist.recv(clock, other, group=control.group)
        dist.send(clock.fill_(time.monotonic()), other, group=control.group)


def timeline_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where a rank's spans of a step are."""
    return run_dir / "timeline" / f"step_{step:08d}.rank_{rank:05d}.json"


class TimelineHook:
    """Has the engine time every n-th step and writes the spans of each rank into a file of its own.

    Args:
        watch_spans: `TrainEngine.watch_spans` of the engine that trains.
        run_dir: the run's folder.
        every_steps: n.
        grid: the ranks.
    """

    def __init__(
        self,
        watch_spans: Callable[[Callable[[list[Span]], None]], None],
        run_dir: Path,
        every_steps: int,
        grid: ParallelGrid,
    ) -> None:
        self._watch_spans, self._run_dir, self._every_steps, self._grid = watch_spans, run_dir, every_steps, grid
        self._offset_s = 0.0

    def on_start(self, state: TrainState) -> None:
        self._offset_s = clock_offset_s(self._grid.control)
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if step % self._every_steps == 0:
            self._watch_spans(lambda spans: self._write(step, spans))

    def _write(self, step: int, spans: Sequence[Span]) -> None:
        grid = self._grid
        record = {
            "step": step,
            "rank": grid.rank,
            **{axis: getattr(grid, axis).rank for axis in ("pp", "tp", "cp", "dp")},
            "clock_offset_s": self._offset_s,
            "spans": [asdict(span) for span in spans],
        }
        path = timeline_path(self._run_dir, step, grid.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(path) as file:
                file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            # A full disk, or something else in the file's place: no reason to end a run.
            logging.getLogger(__name__).warning("the timeline of step %d is not written: %s", step, error)
