"""Launchers start and monitor the points of a sweep, on this machine, on SLURM or on Ray."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megads.errors import EXIT_BUG, ConfigError
from megads.runtime.environment import user_name
from megads.runtime.lease import is_in_use
from megads.runtime.process import signal_child, start_child
from megads.runtime.slurm import fields
from megads.runtime.stop import INTERRUPTED, request_stop
from megads.tools.sweep.points import Point, events_since, launched_at


@dataclass(frozen=True)
class PointEnd:
    """End of one start of a point.

    Attributes:
        number: number of the point.
        exit_code: exit code of the command, or the negative number of the signal that ended it.
        reason: reason of a failure; may be empty.
    """

    number: int
    exit_code: int
    reason: str = ""


class Launcher(Protocol):
    """Starts points and reports how they ended."""

    poll_s: float
    """Polling interval in seconds."""

    def has_free_slot(self) -> bool:
        """Whether another point may start now."""
        ...

    def start(self, point: Point) -> None:
        """Starts a point, and stores in it what `reattach` needs.

        Raises:
            ConfigError: the point cannot be started here at all.
        """
        ...

    def reattach(self, point: Point) -> bool:
        """Reattaches to a point started by an earlier, killed sweep; returns False if there is nothing to wait for."""
        ...

    def ended(self) -> list[PointEnd]:
        """The points that ended since the last call."""
        ...

    def stop(self, point: Point) -> None:
        """Asks a running point to save and end; a second call kills it."""
        ...


_LOCAL_POLL_S = 0.5
_FREED_WITHIN_S = 120.0
"""Maximum wait for a point whose sweep was killed: it saves before it releases its run directory."""
_REASON_BYTES = 4096


@dataclass(frozen=True)
class MachineShare:
    """Share of the machine that one point uses exclusively.

    Attributes:
        cores: cores of the point; empty for all.
        variables: environment variables of the point, such as its visible GPUs.
    """

    cores: tuple[int, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def machine_shares(cores: Sequence[int], gpus: Sequence[str], parallel: int) -> list[MachineShare]:
    """Divides a machine evenly among concurrent points.

    Args:
        cores: cores available to this process.
        gpus: visible GPUs, in the notation of CUDA_VISIBLE_DEVICES.
        parallel: number of concurrent points, at most the number of cores, and of GPUs if there are any.
    """
    if parallel == 1:
        return [MachineShare()]
    width, gpu_width = len(cores) // parallel, len(gpus) // parallel
    return [
        MachineShare(
            tuple(cores[place * width : (place + 1) * width]),
            (("CUDA_VISIBLE_DEVICES", ",".join(gpus[place * gpu_width : (place + 1) * gpu_width])),) if gpus else (),
        )
        for place in range(parallel)
    ]


class LocalLauncher:
    """Starts points as processes.

    Args:
        folder: folder of the sweep; the output of point 3 goes to points/0003.log.
        command: arguments between the Python interpreter and the overrides of a point.
        shares: shares of the machine, one per concurrent point.
        poll_s: polling interval in seconds; None is 0.5.
    """

    def __init__(self, folder: Path, command: Sequence[str], shares: Sequence[MachineShare], poll_s: float | None):
        self.poll_s = poll_s or _LOCAL_POLL_S
        self._folder = folder
        self._command = tuple(command)
        self._free = list(shares)
        self._running: dict[int, tuple[subprocess.Popen[bytes], MachineShare]] = {}

    def has_free_slot(self) -> bool:
        """Whether a share is free."""
        return bool(self._free)

    def start(self, point: Point) -> None:
        """Starts a point on the first free share."""
        share = self._free.pop(0)
        try:
            process = start_child(
                [*self._command, *point.overrides], self.log(point.number), share.cores, dict(share.variables)
            )
        except OSError as error:
            self._free.insert(0, share)
            raise ConfigError(f"point {point.number} cannot be started: {error}") from error
        self._running[point.number] = process, share

    def reattach(self, point: Point) -> bool:
        """Waits until a point whose sweep was killed has saved and ended; always returns False."""
        deadline = time.monotonic() + _FREED_WITHIN_S
        while is_in_use(Path(point.run_dir)) and time.monotonic() < deadline:
            time.sleep(self.poll_s)
        return False

    def ended(self) -> list[PointEnd]:
        """The processes that ended since the last call."""
        found = []
        for number, (process, share) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            self._free.append(share)
            found.append(PointEnd(number, code, _last_words(self.log(number)) if code else ""))
        return found

    def stop(self, point: Point) -> None:
        """Sends SIGINT: the first makes the run save and end, the second kills it."""
        if point.number in self._running:
            signal_child(self._running[point.number][0], signal.SIGINT)

    def log(self, number: int) -> Path:
        """Log file of a point."""
        return self._folder / "points" / f"{number:04d}.log"


def _last_words(log: Path) -> str:
    """The last error message of megads in the log, without its prefix; empty if there is none."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _REASON_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("megads")]
    return said[-1].partition(": ")[2] if said else ""


class _JobLauncher:
    """Base class of launchers that submit one job per point.

    Args:
        folder: folder of the sweep; the output of point 3 goes to points/0003.log.
        parallel: maximum number of concurrent jobs; None for no limit.
        poll_s: polling interval in seconds.
    """

    def __init__(self, folder: Path, parallel: int | None, poll_s: float):
        self.poll_s = poll_s
        self._folder, self._parallel = folder.absolute(), parallel
        self._running: dict[int, Point] = {}
        self._asked: set[int] = set()

    def has_free_slot(self) -> bool:
        """Whether another job may be submitted."""
        return self._parallel is None or len(self._running) < self._parallel

    def stop(self, point: Point) -> None:
        """Asks a run to save and end; a job that is not training yet, or was asked before, is cancelled."""
        if point.number not in self._running:
            return
        if point.number in self._asked or launched_at(Path(point.run_dir), point.started_at) is None:
            self._cancel(point.job)
        else:
            request_stop(Path(point.run_dir), INTERRUPTED)
        self._asked.add(point.number)

    @abstractmethod
    def _cancel(self, job: str) -> None:
        """Cancels a job immediately, if it can be reached."""

    def _log(self, point: Point) -> Path:
        path = self._folder / "points" / f"{point.number:04d}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _follow(self, point: Point) -> None:
        self._running[point.number] = point
        self._asked.discard(point.number)


_SLURM_POLL_S = 5.0
_TIMEOUT_S = 60.0
_GONE = ("CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
"""States of a job that was ended externally; the run resumes when it is submitted again."""
_ENDED = (*_GONE, "COMPLETED", "FAILED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL")
"""States in which a job has ended. SLURM shows the exit code 0:0 for jobs in all other states, too."""
_WAITING = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING"
"""Usual states of a job that has not ended: given, so that SQUEUE_STATES does not apply."""
_NO_SUCH_JOB = "Invalid job id"


class SlurmLauncher(_JobLauncher):
    """Submits one SLURM job per point and monitors the queue.

    Why not one job array or hydra-submitit-launcher: the tasks of an array share one resource request, but points may
    differ in layout and number of nodes; an array is submitted as a whole, but bayes proposes each point from earlier
    results; submitit pickles a Python function into a generated job, but a point runs the site's own sbatch script
    with ordinary overrides, which requeues itself.

    Args:
        folder: folder of the sweep; the output of point 3 goes to points/0003.log.
        script: sbatch script, which takes the overrides of a point as arguments.
        options: sbatch options before the script.
        parallel: maximum number of jobs in the queue; None for no limit.
        poll_s: polling interval in seconds; None is 5.
    """

    def __init__(self, folder: Path, script: Path, options: Sequence[str], parallel: int | None, poll_s: float | None):
        super().__init__(folder, parallel, poll_s or _SLURM_POLL_S)
        self._script = script
        self._options = tuple(options)

    def start(self, point: Point) -> None:
        """Submits a point.

        Raises:
            ConfigError: sbatch rejects the job or is not installed.
        """
        answer = _ask(
            "sbatch",
            "--parsable",
            f"--job-name={point.run_id}",
            f"--output={self._log(point)}",
            "--open-mode=append",
            *self._options,
            str(self._script),
            *point.overrides,
        )
        if answer.returncode:
            raise ConfigError(f"sbatch refused point {point.number}: {answer.stderr.strip()}")
        # <id>, or <id>;<cluster> on federated clusters.
        point.job = answer.stdout.strip().partition(";")[0]
        self._follow(point)

    def reattach(self, point: Point) -> bool:
        """Reattaches to the job that an earlier sweep submitted, if SLURM still has its state.

        Uses the last job of the point, which the earlier sweep may not have recorded.
        """
        point.job = self._last_job(point) or point.job
        if not point.job or (point.job not in self._queued() and _job_fields(point.job) is None):
            return False
        self._follow(point)
        return True

    def _last_job(self, point: Point) -> str:
        """Id of the last job submitted for a point, found by job name and log path; empty if there is none."""
        answer = _ask("squeue", "--noheader", "--states=all", f"--name={point.run_id}", "--format=%i")
        log = str(self._log(point))
        own = [job for job in answer.stdout.split() if (_job_fields(job) or {}).get("StdOut") == log]
        return max(own, key=int, default="")

    def ended(self) -> list[PointEnd]:
        """The jobs that left the queue since the last call."""
        if not self._running:
            return []
        queued = self._queued()
        found = []
        for number, point in list(self._running.items()):
            if point.job in queued:
                continue
            # That squeue does not list it is no proof: the user's SQUEUE_* variables may hide it.
            known = _job_fields(point.job)
            if known is None or known.get("JobState") in _ENDED:
                del self._running[number]
                found.append(_outcome(point, known or {}))
        return found

    def _cancel(self, job: str) -> None:
        _ask("scancel", job)

    def _queued(self) -> set[str]:
        """Ids of this user's jobs that have not ended."""
        answer = _ask("squeue", "--noheader", f"--states={_WAITING}", "--format=%i", f"--user={user_name()}")
        if answer.returncode:
            # The controller is temporarily unreachable: assume that no job has ended.
            return {point.job for point in self._running.values()}
        return set(answer.stdout.split())


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a SLURM command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"sweep.launcher=slurm, but there is no {command[0]} on this machine: start the sweep on a login node, or "
            "choose sweep.launcher=local"
        ) from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer within {_TIMEOUT_S:g} s")


def _job_fields(job: str) -> dict[str, str] | None:
    """SLURM's fields of a job; None if it is unknown, empty without an answer. SLURM drops it minutes after its end."""
    answer = _ask("scontrol", "show", "job", "--oneliner", job)
    if answer.returncode:
        return None if _NO_SUCH_JOB in answer.stderr else {}
    return fields(answer.stdout)


def _outcome(point: Point, known: Mapping[str, str]) -> PointEnd:
    """Outcome of a job that ended, from SLURM if it still knows the job, else from the run's events.

    Args:
        point: point of the job.
        known: SLURM's fields of the job; empty if it is unknown.
    """
    state, code = known.get("JobState", ""), known.get("ExitCode", "")
    if state in _GONE:
        return PointEnd(point.number, -signal.SIGKILL, f"job {point.job} ended as {state}")
    if re.fullmatch(r"\d+:\d+", code):
        status, number = map(int, code.split(":"))
        return PointEnd(point.number, -number if number else status, f"job {point.job} ended as {state}")
    return _ended_by_its_run(point, f"job {point.job}")


def _ended_by_its_run(point: Point, job: str) -> PointEnd:
    """Outcome of a point whose job is no longer known, from the run's events.

    Args:
        point: the point.
        job: name of its job in messages.
    """
    last = _last_exit(point)
    if last is None:
        return PointEnd(point.number, EXIT_BUG, f"{job} no longer exists, and its run recorded no exit code")
    return PointEnd(point.number, last, f"{job} no longer exists; exit code from the events of its run")


def _last_exit(point: Point) -> int | None:
    """Exit code that the run recorded since its last start; None if there is none."""
    events = events_since(Path(point.run_dir), point.started_at)
    codes = [event.get("exit_code") for event in events if event.get("event") == "exit"]
    return None if not codes or codes[-1] is None else int(codes[-1])


_RAY_POLL_S = 2.0
_SHELL_SIGNAL = 128
"""Offset of a shell's exit code for a command that was ended by a signal."""


class RayLauncher(_JobLauncher):
    """Submits one Ray job per point; Ray schedules it on a node with free resources.

    Why not hydra-ray-launcher: it runs a Python function as a Ray task, returns results only when a whole batch has
    ended, and depends on the submitting process. Jobs continue without the sweep and are found again.

    Args:
        folder: folder of the sweep; the output of point 3 goes to points/0003.log.
        command: arguments between the Python interpreter and the overrides of a point.
        address: address of the Ray dashboard, which accepts jobs; None is RAY_ADDRESS, or the cluster on this machine.
        cpus: number of CPUs reserved for a job.
        gpus: number of GPUs reserved for, and visible to, a job.
        parallel: maximum number of concurrent jobs; None for no limit.
        poll_s: polling interval in seconds; None is 2.

    Raises:
        ConfigError: Ray is not installed, or no cluster responds.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        address: str | None,
        cpus: float,
        gpus: float,
        parallel: int | None,
        poll_s: float | None,
    ):
        super().__init__(folder, parallel, poll_s or _RAY_POLL_S)
        self._command, self._cpus, self._gpus = tuple(command), cpus, gpus
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise ConfigError(f"sweep.launcher=ray needs Ray ({error}): pip install 'megads[ray]'") from error
        try:
            self._client: Any = JobSubmissionClient(address)
        except Exception as error:  # many types: no cluster, no token, version mismatch
            raise ConfigError(
                f"sweep.ray_address = {address}: {error}; start a cluster (ray start --head), or give the address of "
                "its dashboard, http://<head node>:8265"
            ) from error

    def start(self, point: Point) -> None:
        """Submits a point.

        Raises:
            ConfigError: Ray rejects the job.
        """
        log = self._log(point)
        command = shlex.join([sys.executable, *self._command, *point.overrides])
        try:
            self._client.submit_job(
                entrypoint=f"cd {shlex.quote(str(Path.cwd()))} && exec {command} >>{shlex.quote(str(log))} 2>&1",
                submission_id=_job_name(point),
                entrypoint_num_cpus=self._cpus,
                entrypoint_num_gpus=self._gpus,
            )
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"Ray refused point {point.number}: {error}") from error
        point.job = _job_name(point)
        self._follow(point)

    def reattach(self, point: Point) -> bool:
        """Reattaches to the job that an earlier sweep submitted, if the cluster still knows it.

        The job's name is derived from the run id and start time, which are recorded before the submission.
        """
        point.job = _job_name(point)
        if self._info(point) is None:
            return False
        self._follow(point)
        return True

    def ended(self) -> list[PointEnd]:
        """The jobs that ended since the last call."""
        found = []
        for number, point in list(self._running.items()):
            try:
                info = self._info(point)
            except OSError:
                # The head node is temporarily unreachable: assume that no job has ended.
                continue
            if info is None or info.status.is_terminal():
                del self._running[number]
                found.append(_ended_by_its_run(point, f"job {point.job}") if info is None else _end_of(point, info))
        return found

    def _cancel(self, job: str) -> None:
        # If the head node is unreachable, the user's next signal repeats the request.
        with suppress(RuntimeError, OSError):
            self._client.stop_job(job)

    def _info(self, point: Point) -> Any:
        """Ray's information about a job; None if the name is unknown. Raises OSError if Ray does not respond."""
        try:
            return self._client.get_job_info(point.job)
        except RuntimeError as error:
            if "404" in str(error):
                return None
            raise ConnectionError(str(error)) from error


def _job_name(point: Point) -> str:
    """Unique job name of one start of a point."""
    return f"{point.run_id}-{int((point.started_at or 0) * 1000)}"


def _end_of(point: Point, info: Any) -> PointEnd:
    """Outcome of a job."""
    state, code = info.status.value, info.driver_exit_code
    if state == "SUCCEEDED":
        return PointEnd(point.number, 0, f"job {point.job} ended as {state}")
    if code is None or state == "STOPPED":
        # Stopped, or its node was lost: the run resumes when it is submitted again.
        return PointEnd(point.number, -signal.SIGKILL, f"job {point.job} ended as {state}")
    code = _SHELL_SIGNAL - code if code > _SHELL_SIGNAL else code
    return PointEnd(point.number, code, f"job {point.job} ended as {state}")
