"""Accounting of a run's wall time: every microsecond, over all starts, belongs to exactly one activity.

The inputs are metrics.jsonl and events.jsonl, which are written as the run proceeds, so that a killed start is
accounted, too. A step line has the end and duration of the step, and the time of validations and saves since the
previous line. A start that returns to a checkpoint records the steps that it removes from metrics.jsonl (event
`steps_dropped`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megads.errors import EXIT_OK, Preempted, StopRequested
from megads.runtime.files import read_end
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

LOAD_PHASES = ("verifying a checkpoint", "loading a checkpoint")
"""Heartbeat phases of a start that count as checkpoint loading."""
_KILLED = 130
_GOOD_ENDS = (EXIT_OK, StopRequested.exit_code, Preempted.exit_code, _KILLED)
_ALIVE_EVENTS = ("start", "resume", "first_step", "checkpoint_saved", "checkpoint_failed", "heartbeat_lost")
_END_BYTES = 1 << 20


class Activity(StrEnum):
    """Category of wall time."""

    queue = "queue"
    """Waiting for the scheduler after a requeue."""
    start = "start"
    """Startup of the command and its ranks up to the first step, and their shutdown."""
    load = "load"
    """Verifying and loading the checkpoint from which a start continues."""
    train = "train"
    """Productive steps: those that are not repeated later."""
    validate = "validate"
    """Validations and evaluation tasks during training."""
    save = "save"
    """Training blocked by checkpoint saves."""
    detect = "detect"
    """From the first sign of a fault until all ranks are known to have ended."""
    recover = "recover"
    """From the end of detection, and after a fault from the next launch, to the next step."""
    lost = "lost work"
    """Steps that are repeated later or were not finished."""
    stopped = "stopped"
    """The run was not running."""


class StepTime(NamedTuple):
    """Times in the metrics line of a step.

    Attributes:
        ended_s: end of the step, in seconds since 1970.
        step_s: wall time of the step, in seconds.
        validate_s: seconds of validations since the previous line, see `Heartbeat.spent`.
        save_s: seconds of saves since the previous line.
        step: step number.
    """

    ended_s: float
    step_s: float
    validate_s: float = 0.0
    save_s: float = 0.0
    step: int = 0

    @classmethod
    def from_metrics(cls, line: Mapping[str, Any]) -> StepTime:
        """Reads a line of metrics.jsonl; `ended_s` is NaN if the line has no time."""
        ended_s, step_s, validate_s, save_s = map(
            _number, (line.get(key) for key in ("time", "step_time_s", "validate_time_s", "save_time_s"))
        )
        return cls(ended_s or math.nan, step_s, validate_s, save_s, int(_number(line.get("step"))))


@dataclass(frozen=True)
class Period:
    """An uninterrupted period of one activity, in microseconds since 1970."""

    begin_us: int
    end_us: int
    activity: Activity


@dataclass(frozen=True)
class RecordedFault:
    """A fault that ended a start; times in seconds since 1970.

    Attributes:
        sign_s: first report of an error by a rank, or loss of its heartbeat; None if there was none.
        detected_s: time when all ranks were known to have ended.
        recovered_s: end of the next step; None if there was none yet.
    """

    sign_s: float | None
    detected_s: float
    recovered_s: float | None


@dataclass(frozen=True)
class Accounting:
    """Wall time of a run by activity, and its faults.

    Attributes:
        periods: consecutive periods without gaps, from the first command to the last recorded time.
        faults: faults in order.
    """

    periods: tuple[Period, ...]
    faults: tuple[RecordedFault, ...]

    @property
    def wall_us(self) -> int:
        """Wall time from the first to the last recorded time, in microseconds."""
        return self.periods[-1].end_us - self.periods[0].begin_us if self.periods else 0

    @property
    def spent_us(self) -> dict[Activity, int]:
        """Microseconds of every activity; the sum is `wall_us`."""
        spent = dict.fromkeys(Activity, 0)
        for period in self.periods:
            spent[period.activity] += period.end_us - period.begin_us
        return spent

    @property
    def effective_time(self) -> float:
        """Goodput: fraction of the wall time spent in productive steps."""
        return self.spent_us[Activity.train] / self.wall_us if self.wall_us else 0.0

    @property
    def mean_time_to_detect_s(self) -> float | None:
        """MTTD over the faults with a first sign; None if there are none."""
        return _mean(fault.detected_s - fault.sign_s for fault in self.faults if fault.sign_s is not None)

    @property
    def mean_time_to_recover_s(self) -> float | None:
        """MTTR, from detection to the end of the next step, over the faults that were followed by one; None if none."""
        return _mean(fault.recovered_s - fault.detected_s for fault in self.faults if fault.recovered_s is not None)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def account(events: Sequence[Mapping[str, Any]], steps: Iterable[StepTime]) -> Accounting | None:
    """Accounts the wall time of a run.

    Args:
        events: lines of events.jsonl, in file order.
        steps: step lines of metrics.jsonl, in file order.

    Returns:
        None if the run has no start, or step lines without a time, as earlier versions wrote them.
    """
    launches = [place for place, event in enumerate(events) if event.get("event") == "launch" and _time(event)]
    parts = [events[begin:end] for begin, end in pairwise([*launches, len(events)])]
    lines = sorted(steps)
    if not parts or any(line.ended_s != line.ended_s for line in lines):
        return None
    begins = [_time(part[0]) for part in parts]
    by_start: list[list[StepTime]] = [[] for _ in range(len(parts) + 1)]
    for line in lines:
        by_start[bisect_right(begins, line.ended_s)].append(line)
    drops = [event for event in events if event.get("event") == "steps_dropped" and _number(event.get("last_time"))]
    starts = [
        _Start(part, own, _dropped(drops, begin, end), is_last=end is None)
        for part, own, begin, end in zip(parts, by_start[1:], begins, [*begins[1:], None], strict=True)
    ]
    # Steps before the first event: the run directory was restored from remote storage, which has no events.
    earlier = by_start[0]
    timeline = _Timeline(earlier[0].ended_s - earlier[0].step_s if earlier else starts[0].began)
    _add_lines(timeline, earlier, ())
    before: _Start | None = None
    for start in starts:
        _add_start(timeline, start, before)
        before = start
    return Accounting(tuple(timeline.periods), _faults(starts))


def read_accounting(run_dir: Path) -> Accounting | None:
    """Reads a run's files and accounts its wall time; None as in `account`."""
    lines = (line for line in read_json_lines(run_dir / METRICS_FILE) if "loss" in line)
    return account(list(read_json_lines(run_dir / EVENTS_FILE)), map(StepTime.from_metrics, lines))


def _time(event: Mapping[str, Any]) -> float:
    return _number(event.get("time"))


def _number(value: Any) -> float:
    """Converts to float; 0 for anything that is not a finite number of plausible size."""
    return float(value) if isinstance(value, int | float) and value == value and abs(value) < 1e12 else 0.0


def _dropped(drops: Sequence[Mapping[str, Any]], begin: float, end: float | None) -> tuple[Mapping[str, Any], ...]:
    """Returns the steps_dropped events about a start's steps, written by later starts or by the start itself."""
    return tuple(
        drop
        for drop in drops
        if begin <= _number(drop["last_time"]) and (end is None or _number(drop["last_time"]) < end)
    )


class _Start:
    """One launch of the ranks: its events, its productive steps, and its dropped steps."""

    def __init__(
        self,
        events: Sequence[Mapping[str, Any]],
        lines: Sequence[StepTime],
        drops: Sequence[Mapping[str, Any]],
        *,
        is_last: bool,
    ) -> None:
        self.events, self.lines, self.drops, self.is_last = events, lines, drops, is_last
        self.launched = _time(events[0])
        self.began = _number(events[0].get("command_start")) or self.launched
        self.failure, self.ended = self.last("failure"), self.last("end")
        self.exit = self.last("exit") or self.last("killed")
        self.first_step = self.last("first_step")

    def last(self, name: str) -> Mapping[str, Any]:
        """Returns the newest event of a name; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == name), {})

    @property
    def loop_began(self) -> float | None:
        """Begin of the first step; None if there was no step."""
        if self.first_step:
            return _time(self.first_step) - _number(self.first_step.get("step_time_s"))
        return self.lines[0].ended_s - self.lines[0].step_s if self.lines else None

    @property
    def failed(self) -> bool:
        """Whether the start ended by a fault, or recorded no end although another start followed."""
        if self.exit:
            return self.exit.get("exit_code") not in _GOOD_ENDS
        return bool(self.failure) or not self.is_last

    @property
    def requeued(self) -> bool:
        """Whether the scheduler launches the next start."""
        on_slurm = self.events[0].get("slurm_job") is not None
        return on_slurm and (bool(self.last("requeue")) or self.exit.get("exit_code") == Preempted.exit_code)

    @property
    def sign_s(self) -> float | None:
        """Time of the first sign of the fault; None if there is none."""
        missing = dict[str, float]()
        for event in self.events:
            if event.get("event") == "heartbeat_lost":
                missing[str(event.get("rank"))] = _time(event)
            elif event.get("event") == "heartbeat_back":
                missing.pop(str(event.get("rank")), None)
        signs = [_number(self.failure.get("first_sign")), *missing.values()]
        return min((sign for sign in signs if sign), default=None)

    @property
    def last_seen_s(self) -> float:
        """Last time at which the start was known to run, used if it recorded no end."""
        known = [_time(event) for event in self.events if event.get("event") in _ALIVE_EVENTS]
        known += [_number(drop["last_time"]) for drop in self.drops] + [line.ended_s for line in self.lines[-1:]]
        return max([self.launched, *known])


class _Timeline:
    """Consecutive periods. Time only moves forward, so that wrong clocks cannot make a moment count twice."""

    def __init__(self, begin_s: float) -> None:
        self._now_us = round(begin_s * 1e6)
        self.periods: list[Period] = []

    def until(self, moment_s: float, activity: Activity) -> None:
        """Adds everything up to a moment to an activity."""
        self._move(round(moment_s * 1e6), activity)

    def spend(self, seconds: float, activity: Activity, limit_s: float) -> None:
        """Adds a duration to an activity, but nothing beyond a limit."""
        self._move(min(self._now_us + round(seconds * 1e6), round(limit_s * 1e6)), activity)

    def _move(self, to_us: int, activity: Activity) -> None:
        if to_us <= self._now_us:
            return
        begin = self._now_us
        if self.periods and self.periods[-1].activity is activity:
            begin = self.periods.pop().begin_us
        self.periods.append(Period(begin, to_us, activity))
        self._now_us = to_us


def _add_start(timeline: _Timeline, start: _Start, before: _Start | None) -> None:
    after_fault = before is not None and before.failed
    opening = Activity.recover if after_fault else Activity.start
    if before is not None:
        # An in-place restart and the next training phase are launched by the same command.
        in_place = before.exit and start.began <= _time(before.exit)
        gap = opening if in_place else Activity.queue if before.requeued else Activity.stopped
        timeline.until(start.launched if in_place else start.began, gap)
    began = start.loop_began
    if began is None:
        _end_before_a_step(timeline, start, opening)
        return
    if not after_fault:
        phases = start.first_step.get("seconds")
        load_s = sum(_number(phases.get(name)) for name in LOAD_PHASES) if isinstance(phases, Mapping) else 0.0
        timeline.until(began - load_s, opening)
        timeline.until(began, Activity.load)
    timeline.until(began, opening)
    _add_lines(timeline, start.lines, start.drops)
    _add_tail(timeline, start)


def _end_before_a_step(timeline: _Timeline, start: _Start, opening: Activity) -> None:
    if start.failure:
        timeline.until(start.sign_s or _time(start.failure), opening)
        timeline.until(_time(start.failure), Activity.detect)
    timeline.until(_time(start.exit) if start.exit else start.last_seen_s, opening)


def _add_lines(timeline: _Timeline, lines: Sequence[StepTime], drops: Sequence[Mapping[str, Any]]) -> None:
    """Adds productive steps, and steps between them that the start itself dropped."""
    for number, line in enumerate(lines):
        begin = line.ended_s - line.step_s
        # Validations and saves in the first line happened before the training loop.
        if number:
            for drop in drops:
                if lines[number - 1].ended_s < _number(drop["last_time"]) < begin:
                    _add_dropped(timeline, drop, lines[number - 1], Activity.lost)
                    timeline.until(begin, Activity.recover)
            timeline.spend(line.validate_s, Activity.validate, begin)
            timeline.spend(line.save_s, Activity.save, begin)
        timeline.until(line.ended_s, Activity.train)


def _add_dropped(timeline: _Timeline, drop: Mapping[str, Any], kept: StepTime | None, activity: Activity) -> None:
    """Adds dropped steps; validations and saves right after the last productive step count as such."""
    end = _number(drop["last_time"])
    if kept is not None and drop.get("step") == kept.step:
        timeline.spend(_number(drop.get("validate_s")), Activity.validate, end)
        timeline.spend(_number(drop.get("save_s")), Activity.save, end)
    timeline.until(end, activity)


def _add_tail(timeline: _Timeline, start: _Start) -> None:
    """Adds the time from the last productive step to the end of the start."""
    last = start.lines[-1] if start.lines else None
    since = last.ended_s if last is not None else 0.0
    cut = [drop for drop in start.drops if _number(drop["last_time"]) > since]
    saved = start.last("checkpoint_saved")
    if cut:
        _add_dropped(timeline, max(cut, key=lambda drop: _number(drop["last_time"])), last, Activity.lost)
    elif saved and last is not None and saved.get("step") == last.step and not start.ended:
        timeline.spend(_number(saved.get("save_s")), Activity.save, _time(saved))
    if start.failure:
        timeline.until(start.sign_s or _time(start.failure), Activity.lost)
        timeline.until(_time(start.failure), Activity.detect)
        timeline.until(_time(start.exit), Activity.recover)
    elif start.ended:
        end, after = _time(start.ended), start.last("after_last_step")
        timeline.spend(_number(after.get("validate_time_s")), Activity.validate, end)
        timeline.spend(_number(after.get("save_time_s")), Activity.save, end)
        timeline.until(max(end, _time(start.exit)), Activity.start)
    elif start.exit:
        timeline.until(_time(start.exit), Activity.lost)
    else:
        timeline.until(start.last_seen_s, Activity.train if start.is_last else Activity.lost)


def _faults(starts: Sequence[_Start]) -> tuple[RecordedFault, ...]:
    found = []
    for place, start in enumerate(starts):
        if not start.failure or not start.failed:
            continue
        following = (_time(later.first_step) for later in starts[place + 1 :] if later.first_step)
        found.append(RecordedFault(start.sign_s, _time(start.failure), next(following, None)))
    return tuple(found)


class EffectiveTime:
    """Goodput of a run after each step, see `Accounting.effective_time`.

    Args:
        run_dir: run directory; its metrics.jsonl is already truncated to the step from which this start continues.
    """

    def __init__(self, run_dir: Path) -> None:
        events = read_json_lines(run_dir / EVENTS_FILE)
        launch: Mapping[str, Any] = next((event for event in events if event.get("event") == "launch"), {})
        began = _number(launch.get("command_start")) or _time(launch)
        ends = read_end(run_dir / METRICS_FILE, _END_BYTES)
        line: Mapping[str, Any] = next((line for line in reversed(ends) if "loss" in line), {})
        share, ended = _number(line.get("effective_time")), _number(line.get("time"))
        # If the run directory was restored from remote storage, its events are newer than its steps.
        known = 0 < began < ended
        self._began_s = began if known or not ended else ended
        self._trained_s = share * (ended - began) if known else 0.0
        self._last_s: float | None = None

    def after(self, step: StepTime) -> float:
        """Adds a step; returns the goodput so far, from 0 to 1."""
        since = step.ended_s - step.step_s if self._last_s is None else self._last_s + step.validate_s + step.save_s
        self._trained_s += max(0.0, step.ended_s - since)
        self._last_s = step.ended_s
        if not self._began_s:
            self._began_s = since
        wall_s = step.ended_s - self._began_s
        return self._trained_s / wall_s if wall_s > 0 else 0.0
