"""Decides when a run must stop: on signals, run.exit_after, and on SLURM the job's time limit.

On SLURM it also handles what follows the job: requeueing it, or cancelling the rest of its job array.
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
from megads.runtime.slurm import Allocation, SlurmJob
from megads.runtime.stop import INTERRUPTED, PREEMPTED, TIME_LIMIT, read_stop

_REASONS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
}


@dataclass(frozen=True)
class StopOrder:
    """A request that the run save and stop.

    Attributes:
        reason: one of the reasons in megads.runtime.stop.
        message: message for the user.
    """

    reason: str
    message: str


class StopSource(Protocol):
    """Polled source of a stop request."""

    def poll(self) -> StopOrder | None: ...

    @property
    def stop_timeout_s(self) -> float:
        """Time limit of a requested stop, in seconds."""
        ...


class LeaseCheck(Protocol):
    """A start's lease on its run directory."""

    def check(self) -> None:
        """Raises MegadsError if the lease is lost."""
        ...


class Scheduler:
    """Scheduler of a run on this machine: only a signal or the deadline stops it, and a second signal kills it.

    Args:
        hold: lease on the run directory; None if nobody else can take it.
        deadline: stops the run before its time limit; None for no limit.
    """

    signals = tuple(_REASONS)
    second_signal = "a second signal kills the run"

    def __init__(self, hold: LeaseCheck | None = None, deadline: StopSource | None = None):
        self._hold, self._deadline = hold, deadline

    def description(self) -> dict[str, object]:
        """Fields about the scheduler in the launch event of events.jsonl."""
        return {}

    def reason(self, number: signal.Signals) -> str:
        """Reason of the stop that a signal requests."""
        return _REASONS[number]

    def kills(self, number: signal.Signals) -> bool:
        """Whether a signal after the first kills the run."""
        return True

    @property
    def stop_timeout_s(self) -> float:
        """Seconds from a stop request until the ranks are killed."""
        return self._deadline.stop_timeout_s if self._deadline is not None else math.inf

    def poll(self) -> StopOrder | None:
        """Polled several times a second; returns a stop order once.

        Raises:
            MegadsError: this start must end immediately, without saving.
        """
        if self._hold is not None:
            self._hold.check()
        return self._deadline.poll() if self._deadline is not None else None


# Assumed duration of a save before the first one is measured.
_UNKNOWN_SAVE_S = 60.0
_SPARE_S = 10.0
# A stop that takes this much longer than the measured steps and saves is taken to hang.
_STOP_AT_LEAST_S = 300.0
_STOP_CAUTION = 10.0
_CAUTION = 2.0
_POLL_EVERY_S = 0.5
_ASK_EVERY_S = 60.0


class Deadline:
    """Requests the stop of one start of a run before its time limit.

    The margin before the limit is `save_before_s`. If that is None it is measured: 10 s plus twice the sum of the
    longest step of this start and the longest save of the run (60 s before the first save). The current step is
    finished before the save, so one step is always included.

    Args:
        run_dir: the run directory, whose files contain the durations of steps and saves.
        exit_after_s: maximum duration of this start in seconds; None for no limit.
        time_left: returns the seconds left according to the scheduler, None for no limit; may change during the run.
        save_before_s: margin in seconds; None measures it.
        stop_timeout_s: longest time from a stop request to the end; None derives it from the measured durations.
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
        self._next_poll = self._next_question = self._begin
        self._ordered = False

    @property
    def margin_s(self) -> float:
        """Seconds before the limit at which the stop is requested."""
        if self._save_before_s is not None:
            return self._save_before_s
        return _SPARE_S + _CAUTION * self._step_and_save_s

    @property
    def stop_timeout_s(self) -> float:
        """Time limit of a requested stop in seconds: the current step, then a save."""
        if self._stop_timeout_s is not None:
            return self._stop_timeout_s
        return max(_STOP_AT_LEAST_S, _SPARE_S + _STOP_CAUTION * self._step_and_save_s)

    @property
    def _step_and_save_s(self) -> float:
        save_s = _UNKNOWN_SAVE_S if self._longest_save_s is None else self._longest_save_s
        return self._longest_step_s + save_s

    def left_s(self) -> float | None:
        """Seconds until the last known limit of the scheduler; None without one."""
        return None if self._limit is None else self._limit - time.monotonic()

    def poll(self) -> StopOrder | None:
        """Returns a stop order when it is due, once."""
        now = time.monotonic()
        if self._ordered or now < self._next_poll:
            return None
        self._next_poll = now + _POLL_EVERY_S
        self._measure()
        if now >= self._next_question:
            self._ask(now)
        cause = self._cause(now)
        # An administrator may have extended the limit since the last request.
        if cause and self._limit is not None and not self._exit_due(now):
            self._ask(now)
            cause = self._cause(now)
        self._ordered = bool(cause)
        return StopOrder(TIME_LIMIT, f"{cause}: saving and stopping after the current step") if cause else None

    def _cause(self, now: float) -> str:
        if self._exit_due(now):
            return f"run.exit_after has passed after {render_duration(now - self._begin)}"
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
            # If the controller does not answer, the last known limit stays.
            return
        self._limit = None if left_s is None else now + left_s

    def _measure(self) -> None:
        """Updates the measured durations from new lines of the files."""
        for line in self._metrics.read():
            self._longest_step_s = max(self._longest_step_s, float(line.get("step_time_s", 0.0)))
        for event in self._events.read():
            if "save_s" in event:
                self._longest_save_s = max(self._longest_save_s or 0.0, float(event["save_s"]))


# SLURM never ends a job before its limit; this allows for inexact clocks and squeue times.
_AT_THE_LIMIT_S = 5.0
_FRUITLESS_STARTS = 3
# Errors that the next job of a chain would run into again.
_LASTING = (ConfigError, DataError, CheckpointError, StopRequested, NumericalError)
_ENDS_CHAIN = (EXIT_OK, *(error.exit_code for error in _LASTING))


class SlurmScheduler(Scheduler):
    """Scheduler of a SLURM job, which gets time to save after a signal.

    Only a second Ctrl-C kills the run; otherwise SLURM's own SIGKILL ends it.

    Args:
        allocation: the job.
        lease: this start's lease on the run directory.
        deadline: time limits of the start.
    """

    second_signal = "SLURM kills the job after its grace time"

    def __init__(self, allocation: Allocation, lease: Lease, deadline: Deadline):
        super().__init__(lease, deadline)
        self._allocation, self._limits = allocation, deadline

    def description(self) -> dict[str, object]:
        job = self._allocation.job
        return {"slurm_job": job.id, "restarts": job.restarts, "slurm_array": self._allocation.array}

    def reason(self, number: signal.Signals) -> str:
        """Reason of a stop; SIGTERM counts as a cancellation if the job ends with time left and is not requeued."""
        reason = super().reason(number)
        if number != signal.SIGTERM:
            return reason
        # If the controller does not answer, preemption is assumed: an unneeded start costs less than none.
        with suppress(ConfigError):
            state, restarts = slurm.ask_job(self._allocation.job.id)
            left_s = self._limits.left_s()
            in_time = left_s is None or left_s > _AT_THE_LIMIT_S
            if state in ("COMPLETING", "CANCELLED") and restarts == self._allocation.job.restarts and in_time:
                return INTERRUPTED
        return PREEMPTED

    def kills(self, number: signal.Signals) -> bool:
        return number == signal.SIGINT


def requeue_job(
    allocation: Allocation, exit_code: int, max_requeues: int, run_dir: Path, excluded: Sequence[str] = ()
) -> str:
    """Requeues the job of a run that is to continue, as its last action; returns a message about it.

    Args:
        allocation: the job.
        exit_code: exit code of the run; only a run with code 6 is requeued.
        max_requeues: maximum number of requeues of the job, whoever requested them.
        run_dir: the run directory, whose events show whether earlier starts saved a checkpoint.
        excluded: nodes to exclude from the job's next start.
    """
    job = allocation.job
    if exit_code != Preempted.exit_code:
        return ""
    again = f"submit the job again with sbatch, or scontrol requeue {job.id}, to continue"
    if job.restarts >= max_requeues:
        return f"not requeued: already requeued {job.restarts} times (cluster.max_requeues); {again}"
    if (fruitless := _starts_since_save(run_dir)) >= _FRUITLESS_STARTS:
        return (
            f"not requeued: {fruitless} starts in a row ended without a checkpoint: check that the time limit is "
            f"long enough and exceeds the time of --signal; {again}"
        )
    # The SIGTERM with which SLURM ends a requeued job must not interrupt this function.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if not _requeue(job, excluded):
            return f"SLURM has already requeued job {job.id}"
    except ConfigError as error:
        refused = not isinstance(error, slurm.ControllerOutage)
        return f"not requeued: {error}; {'submit the job again with sbatch to continue' if refused else again}"
    without = f", without {', '.join(excluded)}" if excluded else ""
    return f"job {job.id} is requeued, for the {job.restarts + 1}. time{without}"


def _requeue(job: SlurmJob, excluded: Sequence[str]) -> bool:
    """Requeues a job; it is held meanwhile if nodes are to be excluded, which is possible only while it is pending.

    Returns:
        Whether it was requeued here; False if it had been before.

    Raises:
        ConfigError: SLURM does not answer or refuses.
    """
    if slurm.retry_outage(lambda: slurm.ask_job(job.id))[1] > job.restarts:
        return False

    def requeue(command: str) -> None:
        # An answer may have been lost, not the request.
        if slurm.ask_job(job.id)[1] <= job.restarts:
            slurm.ask("scontrol", command, job.id)

    if not excluded:
        slurm.retry_outage(lambda: requeue("requeue"))
        return True
    shown = slurm.retry_outage(lambda: slurm.ask("scontrol", "--oneliner", "show", "job", job.id))
    before = slurm.fields(shown).get("ExcNodeList", "(null)")
    names = [*([] if before == "(null)" else [before]), *excluded]
    slurm.retry_outage(lambda: requeue("requeuehold"))
    try:
        slurm.retry_outage(lambda: slurm.ask("scontrol", "update", f"JobId={job.id}", f"ExcNodeList={','.join(names)}"))
    finally:
        slurm.retry_outage(lambda: slurm.ask("scontrol", "release", job.id))
    return True


def _starts_since_save(run_dir: Path) -> int:
    """Counts the starts of a run since its last saved checkpoint."""
    count = 0
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") in ("launch", "checkpoint_saved"):
            count = count + 1 if event["event"] == "launch" else 0
    return count


def cancel_job_chain(exit_code: int) -> str:
    """Cancels the pending jobs of this job's chain if they have nothing left to do; returns a message about it.

    Args:
        exit_code: exit code of the run.
    """
    array = slurm.array_of_job()
    if array is None:
        return ""
    if exit_code not in _ENDS_CHAIN:
        return f"the next job of array {array} continues the run"
    try:
        slurm.retry_outage(lambda: slurm.ask("scancel", "--state=PENDING", array))
    except ConfigError as error:
        return f"the pending jobs of array {array} could not be cancelled: {error}"
    return f"the pending jobs of array {array} are cancelled: nothing is left for them to do"


def stop_exit_code(run_dir: Path) -> int:
    """Returns the exit code of a run that a stop request ended after a timing start or a training phase."""
    preempted = read_stop(run_dir) in (PREEMPTED, TIME_LIMIT)
    return Preempted.exit_code if preempted else StopRequested.exit_code
