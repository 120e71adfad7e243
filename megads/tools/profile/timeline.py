"""Timelines of steps (logging.timeline_every_steps): a common clock of the ranks, and a file of spans per rank."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from megads.api import ControlPlane, ParallelGrid, Span, StepInfo, TrainState, atomic_writer

PINGS = 8
"""Number of round trips to compare two clocks; the fastest one is used."""


def clock_offset_s(control: ControlPlane, clock: str | None = None) -> float:
    """Returns the seconds to add to this rank's monotonic clock to get rank 0's; collective over the world.

    Ranks that share a clock, those of one machine, get the same offset: one rank per machine compares clocks with
    another machine. Machines form a binomial tree, so 1,000 of them take as long as ten comparisons. As in Cristian's
    algorithm, a comparison assumes that the return takes half of the fastest round trip; this is also its maximum
    error. Errors add up along the tree.

    Args:
        control: control plane of all ranks.
        clock: name of the clock that this rank reads; None is the machine's clock.
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
    # Sum the offsets along the path in the tree from this machine to that of rank 0.
    offset_s, here = 0.0, list(first_rank).index(clocks[control.rank])
    while here > 0:
        offset_s += measured[machines[here]]
        here -= 1 << (here.bit_length() - 1)
    return offset_s


def _machine_clock() -> str:
    """Identifies the origin of the monotonic clock: the boot of the machine, or a container's time namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/time").readlink())
    except OSError:
        return socket.gethostname()


def _behind_s(control: ControlPlane, other: int) -> float:
    """Seconds to add to this rank's clock to get that of rank `other`, which calls `_answer` at the same time.

    If the other clock's time lies within the round trip, both ranks read the same clock, and the offset is 0.
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
    """Sends this rank's clock to another rank, once per round trip."""
    clock = torch.zeros((), dtype=torch.float64)
    for _ in range(PINGS):
        dist.recv(clock, other, group=control.group)
        dist.send(clock.fill_(time.monotonic()), other, group=control.group)


def timeline_path(run_dir: Path, step: int, rank: int) -> Path:
    """Returns the path of the file with a rank's spans of a step."""
    return run_dir / "timeline" / f"step_{step:08d}.rank_{rank:05d}.json"


class TimelineHook:
    """Hook that times every n-th step and writes the spans of each rank to a separate file.

    Args:
        watch_spans: `TrainEngine.watch_spans` of the engine.
        run_dir: the run directory.
        every_steps: interval n in steps.
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
            # A full disk, or another file at this path, must not end the run.
            logging.getLogger(__name__).warning("the timeline of step %d was not written: %s", step, error)
