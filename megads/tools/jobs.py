"""What sweeps and evaluations start: child processes on shares of this machine, and SLURM jobs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megads.api import ConfigError, ask, is_in_use, start_child, user_name
from megads.runtime.lease import Lease, current_holder
from megads.runtime.process import signal_child
from megads.runtime.slurm import fields

_STOP_WITHIN_S = 10.0
_SUBMIT_TIMEOUT_S = 60.0
EXTERNALLY_ENDED = ("CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
"""States of a SLURM job that was ended externally."""
_ENDED = (*EXTERNALLY_ENDED, "COMPLETED", "FAILED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""States in which a job has ended. SLURM shows the exit code 0:0 for jobs in all other states, too."""
_ACTIVE = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING"
"""Usual states of a job that has not ended: given, so that SQUEUE_STATES does not apply."""


@contextmanager
def exclusive(folder: Path, key: str) -> Iterator[None]:
    """Creates a folder and holds its lease during the block; the lease expires if the process dies.

    Args:
        folder: folder that only one process may work in.
        key: config key that selects another folder.

    Raises:
        ConfigError: the folder is not writable, or a process on any node works in it.
    """
    holder = current_holder(folder)
    if holder is not None and is_in_use(folder):
        raise ConfigError(
            f"{folder} is in use by {holder}: wait for it, stop it ({holder.remedy}), or choose another folder with "
            f"{key}=<folder>"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lease = Lease(folder, None)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be written to ({error.strerror}): choose another with {key}=<folder>"
        ) from error
    try:
        yield
    finally:
        lease.release()


@dataclass(frozen=True)
class MachineShare:
    """Share of the machine that one process uses.

    Attributes:
        cores: cores of the process; empty for all.
        variables: environment variables of the process, such as its visible GPUs.
    """

    cores: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def machine_shares(cores: Sequence[int], gpus: Sequence[str], parallel: int) -> list[MachineShare]:
    """Divides a machine evenly among concurrent processes; with more processes than cores, some share a core.

    Args:
        cores: cores available to this process.
        gpus: visible GPUs, in the notation of CUDA_VISIBLE_DEVICES; none, or at least one per process.
        parallel: number of concurrent processes.
    """
    if parallel == 1:
        return [MachineShare()]
    width, gpu_width = max(len(cores) // parallel, 1), len(gpus) // parallel
    shares = []
    for place in range(parallel):
        first, own_gpus = place * width % len(cores), gpus[place * gpu_width : (place + 1) * gpu_width]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(own_gpus)} if gpus else {}
        shares.append(MachineShare(tuple(cores[first : first + width]), variables))
    return shares


class ChildProcesses:
    """Context manager: child processes by name. They end with the block, and when this process dies."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the processes that still run."""
        for process in self._running.values():
            signal_child(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_WITHIN_S
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            signal_child(process, signal.SIGKILL)
            process.wait()

    def start(self, name: str, command: Sequence[str], log: Path, share: MachineShare) -> None:
        """Starts a command.

        Args:
            name: name of the process; no running process may have it.
            command: arguments after the Python interpreter.
            log: file to which its output is appended.
            share: cores and environment variables.

        Raises:
            OSError: the command cannot be started.
        """
        self._running[name] = start_child(command, log, share.cores, share.variables)

    def ended(self) -> dict[str, int]:
        """Exit codes of the processes that ended since the last call, by name."""
        codes = {name: process.poll() for name, process in self._running.items()}
        found = {name: code for name, code in codes.items() if code is not None}
        for name in found:
            del self._running[name]
        return found

    @property
    def names(self) -> Collection[str]:
        """Names of the processes that had not ended at the last call of `ended`."""
        return self._running.keys()

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a process; does nothing if it has ended."""
        if name in self._running:
            signal_child(self._running[name], number)


def submit_job(script: Path, arguments: Sequence[str], name: str, output: Path, options: Sequence[str]) -> str:
    """Submits a SLURM job and returns its id.

    Args:
        script: sbatch script.
        arguments: arguments of the script.
        name: name of the job.
        output: log file, which may contain SLURM's patterns.
        options: other options of sbatch.

    Raises:
        ConfigError: sbatch rejects the job, does not answer or is not installed.
    """
    given = (f"--job-name={name}", f"--output={output}", *options)
    answer = ask("sbatch", "--parsable", *given, str(script), *arguments, timeout_s=_SUBMIT_TIMEOUT_S)
    # <id>, or <id>;<cluster> on federated clusters.
    return answer.partition(";")[0]


def job_record(job: str) -> dict[str, str] | None:
    """SLURM's fields of a job; of a job array those of a task that has not ended, if there is one.

    Returns:
        None if the job is unknown: SLURM drops a job minutes after its end. Empty if SLURM does not answer.
    """
    try:
        text = ask("scontrol", "show", "job", "--oneliner", job)
    except ConfigError as error:
        return None if "Invalid job id" in str(error) else {}
    records = [fields(line) for line in text.split("\n")]
    return next((record for record in records if record.get("JobState") not in _ENDED), records[-1])


def ended_jobs(jobs: Collection[str]) -> dict[str, dict[str, str]]:
    """Those jobs of this user that have ended, with SLURM's fields, which are empty for a job that it has dropped.

    While SLURM does not answer, no job has ended.
    """
    try:
        active = set(ask("squeue", "--noheader", f"--states={_ACTIVE}", "--format=%F", f"--user={user_name()}").split())
    except ConfigError:
        active = set()
    # That squeue does not list a job is no proof: the user's SQUEUE_* variables may hide it.
    records = {job: job_record(job) for job in jobs if job not in active}
    return {job: record or {} for job, record in records.items() if record is None or record.get("JobState") in _ENDED}
