"""The scheduler's side of a run on SLURM: signals, the time limit, and the way back into the queue."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megads.errors import EXIT_OK, CheckpointError, ConfigError, DataError, NumericalError, Preempted, StopRequested
from megads.launch.scheduler import Deadline, Scheduler
from megads.runtime import slurm
from megads.runtime.lease import Lease
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.runtime.slurm import Allocation
from megads.runtime.stop import INTERRUPTED, PREEMPTED

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
