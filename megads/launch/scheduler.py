"""What besides its ranks decides on the end of a run: signals, run.exit_after, and on SLURM the scheduler.

On SLURM that includes what follows the job: its way back into the queue, or the end of its chain.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megads.errors import EXIT_OK, CheckpointError, ConfigError, DataError, NumericalError, Preempted, StopRequested
from megads.runtime import slurm
from megads.runtime.files import Tail
from megads.runtime.lease import Lease
from megads.runtime.metrics import read_json_lines
from megads.runtime.progress import render_duration
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.runtime.slurm import Allocation
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


# SLURM ends a job at its limit or later, never before; clocks and squeue are a little off.
_AT_THE_LIMIT_S = 5.0
_FRUITLESS_STARTS = 3
# What the next job of a chain would only meet again.
_LASTING = (ConfigError, DataError, CheckpointError, StopRequested, NumericalError)
_ENDS_CHAIN = (EXIT_OK, *(error.exit_code for error in _LASTING))


class SlurmScheduler(Scheduler):
    """SLURM gives a job time after its signal: only Ctrl-C twice kills, the rest is left to SLURM's own SIGKILL.

    Args:
        allocation: the job.
        lease: this start's hold on the run directory.
        deadline: the time limits.
    """

    second_signal = "SLURM kills when its grace time is over"

    def __init__(self, allocation: Allocation, lease: Lease, deadline: Deadline):
        super().__init__(lease, deadline)
        self._allocation, self._limits = allocation, deadline

    def description(self) -> dict[str, object]:
        job = self._allocation.job
        return {"slurm_job": job.id, "restarts": job.restarts, "slurm_array": self._allocation.array}

    def reason(self, number: signal.Signals) -> str:
        """SIGTERM of a job that ends, though it has time left and is not put back into the queue, is a cancellation."""
        reason = super().reason(number)
        if number != signal.SIGTERM:
            return reason
        # A controller that does not answer leaves it at preemption: better one start too many than lost time.
        with suppress(ConfigError):
            state, restarts = slurm.ask_job(self._allocation.job.id)
            left_s = self._limits.left_s()
            in_time = left_s is None or left_s > _AT_THE_LIMIT_S
            if state in ("COMPLETING", "CANCELLED") and restarts == self._allocation.job.restarts and in_time:
                return INTERRUPTED
        return PREEMPTED

    def kills(self, number: signal.Signals) -> bool:
        return number == signal.SIGINT


def send_back(
    allocation: Allocation, exit_code: int, max_requeues: int, run_dir: Path, excluded: Sequence[str] = ()
) -> str:
    """Puts a job that wants to go on back into the queue, the last thing it does; returns what happened, for people.

    Args:
        allocation: the job.
        exit_code: of the run; only 6 goes back.
        max_requeues: most requeues of a job, whoever asked for them.
        run_dir: the run directory, whose events tell whether requeues helped.
        excluded: nodes that it should not get again.
    """
    job = allocation.job
    if exit_code != Preempted.exit_code:
        return ""
    again = f"sbatch the same again, or scontrol requeue {job.id}, to go on"
    if job.restarts >= max_requeues:
        return f"not requeued: that happened {job.restarts} times (cluster.max_requeues); {again}"
    if (fruitless := _starts_since_a_save(run_dir)) >= _FRUITLESS_STARTS:
        return (
            f"not requeued: {fruitless} starts ended one after the other without saving a step: is the time limit long "
            f"enough, and --signal shorter than it? {again}"
        )
    # What SLURM sends to end this job in favour of its next start must not cut off the end of this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _, restarts = slurm.ask_job(job.id)
        if restarts > job.restarts:
            return f"SLURM has requeued job {job.id} already"
        _requeue(job.id, excluded)
    except ConfigError as error:
        return f"not requeued: {error}; {again}"
    without = f", without {', '.join(excluded)}" if excluded else ""
    return f"job {job.id} is requeued, for the {job.restarts + 1}. time{without}"


def _requeue(job_id: str, excluded: Sequence[str]) -> None:
    """Requeues a job; the nodes of a job can be excluded only while it waits, so it is held for that moment.

    Raises:
        ConfigError: SLURM does not answer or refuses.
    """
    if not excluded:
        slurm.ask("scontrol", "requeue", job_id)
        return
    before = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "job", job_id)).get("ExcNodeList", "(null)")
    names = [*([] if before == "(null)" else [before]), *excluded]
    slurm.ask("scontrol", "requeuehold", job_id)
    try:
        slurm.ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(names)}")
    finally:
        slurm.ask("scontrol", "release", job_id)


def _starts_since_a_save(run_dir: Path) -> int:
    """Counts the last starts of a run that have brought nothing."""
    count = 0
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") in ("launch", "checkpoint_saved"):
            count = count + 1 if event["event"] == "launch" else 0
    return count


def end_chain(allocation: Allocation, exit_code: int) -> str:
    """Cancels the waiting jobs of a chain that have nothing left to do; returns what happened, for people.

    Args:
        allocation: the job, a task of the array that is the chain.
        exit_code: of the run.
    """
    if allocation.array is None:
        return ""
    if exit_code not in _ENDS_CHAIN:
        return f"the next job of array {allocation.array} goes on"
    try:
        slurm.ask("scancel", "--state=PENDING", allocation.array)
    except ConfigError as error:
        return f"the waiting jobs of array {allocation.array} could not be cancelled: {error}"
    return f"the waiting jobs of array {allocation.array} are cancelled: nothing is left for them to do"
