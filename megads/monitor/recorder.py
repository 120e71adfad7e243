"""One tracker at work, in a process of its own: passes a run's news on until the run is over."""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from megads.monitor.trackers import TENSORBOARD, WANDB, RunDescription, Tracker, state_path
from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.files import Tail, read_json
from megads.runtime.metrics import read_json_lines
from megads.runtime.registry import TRACKERS
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE


def final_table(
    step: Mapping[str, Any], validation: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> dict[str, int | float]:
    """Returns the table's rows; those of which nothing is known are left out.

    Args:
        step: the last step's line of metrics.jsonl.
        validation: the last validation's line.
        events: all lines of events.jsonl.
    """
    counts = Counter(event.get("event") for event in events)
    rows: dict[str, int | float | None] = {
        "steps": step.get("step"),
        "samples": step.get("samples"),
        "tokens": step.get("tokens"),
        "loss": step.get("loss"),
    }
    rows |= {key: value for key, value in validation.items() if key.startswith("valid/")}
    rows |= {
        "tokens_per_s": step.get("tokens_per_s"),
        "mfu": step.get("mfu"),
        "peak_memory_bytes": step.get("peak_memory_bytes"),
        "skipped_steps": counts["step_skipped"],
        "checkpoints": counts["checkpoint_saved"],
        "starts": counts["start"],
        "wall_s": _last_wall_s(events),
        "exit_code": next((event.get("exit_code") for event in reversed(events) if event.get("event") == "exit"), None),
    }
    return {name: value for name, value in rows.items() if value is not None}


def _last_wall_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from the last launch to the last event."""
    launches = [event["time"] for event in events if event.get("event") == "launch"]
    return events[-1]["time"] - launches[-1] if launches else None


@dataclass
class FeedPosition:
    """How far a tracker has come; kept in a file between two starts of a run.

    Attributes:
        metrics_bytes: read of metrics.jsonl.
        events_bytes: read of events.jsonl.
        step: last step passed on.
        validation_step: last validation passed on.
        skip_to_step: steps up to this one were passed on before the file was read again.
        skip_to_validation: the same for validations.
        last_step: last step's line.
        last_validation: last validation's line.
    """

    metrics_bytes: int = 0
    events_bytes: int = 0
    step: int = 0
    validation_step: int = 0
    skip_to_step: int = 0
    skip_to_validation: int = 0
    last_step: dict[str, Any] = field(default_factory=dict)
    last_validation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> FeedPosition:
        """Reads what `save` wrote; the beginning where there is nothing to read."""
        try:
            return cls(**read_json(path))
        except (OSError, ValueError, TypeError):
            return cls()

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)) + "\n")
        partial.replace(path)


@dataclass(frozen=True)
class News:
    """What there is to pass on.

    Attributes:
        rewound_to: the run goes on from this step, and what was passed on beyond it is no longer true; None if not so.
        metrics: lines of metrics.jsonl, in order.
        events: lines of events.jsonl, in order.
    """

    rewound_to: int | None
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def __bool__(self) -> bool:
        return self.rewound_to is not None or bool(self.metrics) or bool(self.events)


class Feed:
    """Follows the files of one run for one tracker.

    Args:
        run_dir: the run directory.
        position: where to go on; kept up to date.
        rewinds: the tracker can take back steps. Where it cannot, steps that a resume trains again are left out: they
            are the same bit for bit unless the command changed.
    """

    def __init__(self, run_dir: Path, position: FeedPosition, rewinds: bool):
        self.position = position
        self._rewinds = rewinds
        self._metrics = Tail(run_dir / METRICS_FILE, position.metrics_bytes)
        self._events = Tail(run_dir / EVENTS_FILE, position.events_bytes)

    def go_on_from(self, step: int) -> None:
        """Passes on what is beyond a step: the tracker knows better what it has than this position."""
        if step != self.position.step:
            self.position.step = step
            self.position.validation_step = min(self.position.validation_step, step)
            self._read_again()

    def read(self) -> News:
        """Returns the news since the last call, a few megabytes at most; nothing at the end of the files."""
        # A start cuts metrics.jsonl back, then writes its event, then its steps. So whoever reads events last has seen
        # the start of every step that it read; but what it read may have been cut off in between, and is read again.
        metrics = self._metrics.read()
        events = self._events.read()
        starts = [int(event.get("step", 0)) for event in events if event.get("event") == "start"]
        passed_on = max(self.position.step, self.position.validation_step)
        rewound_to = min(starts, default=passed_on)
        rewound = rewound_to < passed_on
        if rewound:
            if self._rewinds:
                self.position.step = min(self.position.step, rewound_to)
                self.position.validation_step = min(self.position.validation_step, rewound_to)
            self._read_again()
        elif starts:
            self._metrics.position = self.position.metrics_bytes
        if starts:
            metrics = self._metrics.read()
        metrics = [record for record in metrics if self._is_new(record)]
        self._remember(metrics)
        self.position.metrics_bytes = self._metrics.position
        self.position.events_bytes = self._events.position
        return News(rewound_to if rewound and self._rewinds else None, metrics, events)

    def _read_again(self) -> None:
        self._metrics.position = 0
        self.position.skip_to_step = self.position.step
        self.position.skip_to_validation = self.position.validation_step

    def _is_new(self, record: Mapping[str, Any]) -> bool:
        done = self.position.skip_to_step if is_step(record) else self.position.skip_to_validation
        return int(record.get("step", 0)) > done

    def _remember(self, metrics: list[dict[str, Any]]) -> None:
        for record in metrics:
            step = int(record.get("step", 0))
            if is_step(record):
                self.position.step, self.position.last_step = step, record
            else:
                self.position.validation_step, self.position.last_validation = step, record


def is_step(record: Mapping[str, Any]) -> bool:
    """Tells a step's line of metrics.jsonl from a validation's."""
    return "loss" in record


_POLL_S = 1.0
CONNECTED = "connected"
"""What a recorder says once its tracker takes records; anything else that it says is why it failed."""


def record(
    run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, over: int | None, parent: Connection
) -> NoReturn:
    """Records to the end of the run; never returns.

    Args:
        run: the run.
        config: settings of the trackers.
        name: the tracker.
        mode: where wandb records.
        over: descriptor that becomes readable when the run is over; None when it is over already.
        parent: told CONNECTED or why it failed.
    """
    try:
        environment.prepare_wandb()
        position = FeedPosition.load(state_path(run.run_dir, name))
        tracker = _open(run, config, name, mode, position)
        parent.send(CONNECTED)
        _pass_on(run, name, tracker, position, over)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        parent.send(f"{type(error).__name__}: {text[0] if text else ''}")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Without the interpreter's shutdown: a library's exit handler may wait for its server.
    os._exit(code)


def wait_for_end(over: int | None, timeout_s: float) -> bool:
    """Waits until the run is over, for a while; tells whether it is."""
    return over is None or bool(select.select([over], [], [], timeout_s)[0])


def _open(run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, position: FeedPosition) -> Tracker:
    # Imported here, in the tracker's own process: their imports are slow and start threads.
    if name == WANDB:
        from megads.monitor.tracker_backends import WandbTracker

        return WandbTracker(run, config.wandb, mode)
    if name == TENSORBOARD:
        from megads.monitor.tracker_backends import TensorBoardTracker

        return TensorBoardTracker(run, position.step)
    tracker: Tracker = TRACKERS.make(name, config.trackers[name], run, position.step)
    return tracker


def _pass_on(run: RunDescription, name: str, tracker: Tracker, position: FeedPosition, over: int | None) -> None:
    feed = Feed(run.run_dir, position, tracker.rewinds)
    if tracker.first_step is not None:
        feed.go_on_from(max(0, tracker.first_step - 1))
    ended = False
    while not ended:
        # Asked first: whatever was written before the end is then read.
        ended = wait_for_end(over, _POLL_S)
        while news := feed.read():
            if news.rewound_to is not None:
                tracker.rewind(news.rewound_to)
            for metrics in news.metrics:
                tracker.add_metrics(metrics)
            for event in news.events:
                tracker.add_event(event)
            tracker.flush()
            position.save(state_path(run.run_dir, name))
    events: list[dict[str, Any]] = list(read_json_lines(run.run_dir / EVENTS_FILE))
    tracker.finish(final_table(position.last_step, position.last_validation, events), events)
