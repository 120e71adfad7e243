"""What besides its ranks decides on the end of a run: signals, run.exit_after, and on a cluster the scheduler."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megads.errors import ConfigError
from megads.monitor.console import render_duration
from megads.runtime.files import Tail
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.runtime.stop import INTERRUPTED, PREEMPTED, TIME_LIMIT

_REASONS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
}


@dataclass(frozen=True)
class StopOrder:
    """A wish that the run save and stop.

    Attributes:
        reason: one of megads.runtime.stop's.
        message: for people.
    """

    reason: str
    message: str


class Watch(Protocol):
    """Something that may want a run to stop."""

    def look(self) -> StopOrder | None: ...

    @property
    def stop_timeout_s(self) -> float:
        """Seconds that a requested stop may take."""
        ...


class Hold(Protocol):
    """A start's hold on its run directory."""

    def check(self) -> None:
        """Raises MegadsError when it is lost."""
        ...


class Scheduler:
    """Nobody schedules: a run on this machine goes on until it ends or a signal comes, and a second signal kills.

    Args:
        hold: on the run directory; None where nobody can take it.
        deadline: stops the run in time; None where there is no limit.
    """

    signals = tuple(_REASONS)
    second_signal = "a second signal kills at once"

    def __init__(self, hold: Hold | None = None, deadline: Watch | None = None):
        self._hold, self._deadline = hold, deadline

    def description(self) -> dict[str, object]:
        """What events.jsonl says of the scheduler at every start."""
        return {}

    def reason(self, number: signal.Signals) -> str:
        """Why a signal asks for a stop."""
        return _REASONS[number]

    def kills(self, number: signal.Signals) -> bool:
        """Whether a signal that comes after the first kills."""
        return True

    @property
    def stop_timeout_s(self) -> float:
        """Seconds from a request to stop until the ranks are killed."""
        return self._deadline.stop_timeout_s if self._deadline is not None else math.inf

    def look(self) -> StopOrder | None:
        """Asked several times a second; returns an order once.

        Raises:
            MegadsError: this start must end at once, without saving.
        """
        if self._hold is not None:
            self._hold.check()
        return self._deadline.look() if self._deadline is not None else None


# A first save is unknown until it is done.
_UNKNOWN_SAVE_S = 60.0
_SPARE_S = 10.0
# A stop that takes so much longer than steps and saves took before does not come any more.
_STOP_AT_LEAST_S = 300.0
_STOP_CAUTION = 10.0
_CAUTION = 2.0
_LOOK_EVERY_S = 0.5
_ASK_EVERY_S = 60.0


class Deadline:
    """Knows when to stop one start of a run.

    The margin before the limit is `save_before_s`, or else measured: 10 s and twice the longest step of this start and
    the longest save of the run, 60 s where it has not saved yet. The step that runs when the request comes is finished
    first, so one step always goes by.

    Args:
        run_dir: the run directory, whose files tell how long steps and saves take.
        exit_after_s: length of this start in seconds; None is no limit.
        time_left: asks the scheduler for the seconds left, None for no limit; it may change while the run goes on.
        save_before_s: margin in seconds; None measures it.
        stop_timeout_s: longest time from a request to stop to the end; None measures it.
    """

    def __init__(
        self,
        run_dir: Path,
        exit_after_s: float | None,
        time_left: Callable[[], float | None],
        save_before_s: float | None,
        stop_timeout_s: float | None = None,
    ):
        self._exit_after_s = exit_after_s
        self._time_left = time_left
        self._save_before_s = save_before_s
        self._stop_timeout_s = stop_timeout_s
        self._metrics = Tail(run_dir / METRICS_FILE)
        self._events = Tail(run_dir / EVENTS_FILE, 0)
        self._longest_step_s = 0.0
        self._longest_save_s: float | None = None
        self._begin = time.monotonic()
        self._limit: float | None = None
        self._next_look = self._next_question = self._begin
        self._ordered = False

    @property
    def margin_s(self) -> float:
        """Seconds before the limit at which to stop."""
        if self._save_before_s is not None:
            return self._save_before_s
        return _SPARE_S + _CAUTION * self._step_and_save_s

    @property
    def stop_timeout_s(self) -> float:
        """Seconds that a requested stop may take: the running step, then a save."""
        if self._stop_timeout_s is not None:
            return self._stop_timeout_s
        return max(_STOP_AT_LEAST_S, _SPARE_S + _STOP_CAUTION * self._step_and_save_s)

    @property
    def _step_and_save_s(self) -> float:
        save_s = _UNKNOWN_SAVE_S if self._longest_save_s is None else self._longest_save_s
        return self._longest_step_s + save_s

    def left_s(self) -> float | None:
        """Seconds until the scheduler's limit as it was last known; None without one."""
        return None if self._limit is None else self._limit - time.monotonic()

    def look(self) -> StopOrder | None:
        """Returns an order to stop, once."""
        now = time.monotonic()
        if self._ordered or now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY_S
        self._measure()
        if now >= self._next_question:
            self._ask(now)
        cause = self._cause(now)
        # An administrator may have extended the limit since.
        if cause and self._limit is not None and not self._exit_due(now):
            self._ask(now)
            cause = self._cause(now)
        self._ordered = bool(cause)
        return StopOrder(TIME_LIMIT, f"{cause}: saving and stopping after the current step") if cause else None

    def _cause(self, now: float) -> str:
        if self._exit_due(now):
            return f"run.exit_after is over after {render_duration(now - self._begin)}"
        if self._limit is None or self._limit - now > self.margin_s:
            return ""
        left, margin = render_duration(max(0.0, self._limit - now)), render_duration(self.margin_s)
        return f"{left} left before the job's time limit, of which saving may take {margin}"

    def _exit_due(self, now: float) -> bool:
        return self._exit_after_s is not None and now - self._begin >= self._exit_after_s

    def _ask(self, now: float) -> None:
        self._next_question = now + _ASK_EVERY_S
        try:
            left_s = self._time_left()
        except ConfigError:
            # A controller that does not answer leaves the limit as it was last known.
            return
        self._limit = None if left_s is None else now + left_s

    def _measure(self) -> None:
        """Learns from the lines that the files gained."""
        for line in self._metrics.read():
            self._longest_step_s = max(self._longest_step_s, float(line.get("step_time_s", 0.0)))
        for event in self._events.read():
            if "save_s" in event:
                self._longest_save_s = max(self._longest_save_s or 0.0, float(event["save_s"]))
