"""Where a run stands, gathered from its metrics and events: what a panel shows at a glance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.runtime.tail import read_end

_HISTORY_STEPS = 256
_HISTORY_BYTES = 256 * 1024
_STEP_TIME_MEMORY = 0.9


@dataclass
class RunProgress:
    """The state of a run as its files tell it; every method takes one record.

    Attributes:
        total_steps: planned length.
        step: last step done.
        record: its line of metrics.jsonl; empty before the first.
        losses: (step, loss) of the last steps, oldest first.
        step_time_s: moving average.
        checkpoint_step: the last checkpoint's.
        checkpoint_time: when it was committed, seconds since 1970.
        validation: last validation line.
        skipped: steps that changed no weight.
        layout: as in tp2 cp1 pp2 dp1.
        ended: nothing more will come.
    """

    total_steps: int | None = None
    step: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY_STEPS))
    step_time_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_time: float = 0.0
    validation: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    layout: str = ""
    ended: bool = False

    @classmethod
    def of_earlier_starts(cls, run_dir: Path, total_steps: int | None) -> RunProgress:
        """What earlier starts of the run left."""
        progress = cls(total_steps)
        for event in read_json_lines(run_dir / EVENTS_FILE):
            progress.add_event(event)
        for record in read_end(run_dir / METRICS_FILE, _HISTORY_BYTES):
            progress.add_metrics(record)
        progress.total_steps = total_steps
        progress.step_time_s = None
        progress.ended = False
        return progress

    @property
    def eta_s(self) -> float | None:
        """Seconds to the planned end; None before they can be told."""
        if self.total_steps is None or self.step_time_s is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_time_s

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Takes a line of events.jsonl."""
        name = event.get("event")
        if name == "start":
            self._start_from(int(event.get("step", 0)))
            self.total_steps = event.get("total_steps", self.total_steps)
            self.layout = str(event.get("layout", ""))
        elif name == "checkpoint_saved":
            self.checkpoint_step, self.checkpoint_time = event.get("step"), float(event.get("time", 0.0))
        elif name == "step_skipped":
            self.skipped += 1
        elif name == "exit":
            self.ended = True

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Takes a line of metrics.jsonl."""
        if "loss" not in record:
            self.validation = record
            return
        self.record, self.step = record, int(record.get("step", 0))
        self.losses.append((self.step, float(record["loss"])))
        taken = record.get("step_time_s")
        if taken is not None:
            old = self.step_time_s
            self.step_time_s = taken if old is None else _STEP_TIME_MEMORY * old + (1 - _STEP_TIME_MEMORY) * taken

    def _start_from(self, step: int) -> None:
        """Forgets the steps beyond the checkpoint from which the run goes on."""
        self.step = step
        while self.losses and self.losses[-1][0] > step:
            self.losses.pop()
        if self.record.get("step", 0) > step:
            self.record = {}
        if self.validation.get("step", 0) > step:
            self.validation = {}
        self.ended = False
