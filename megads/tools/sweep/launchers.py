"""Launchers start and monitor the points of a sweep, on this machine, on SLURM or on Ray."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.api import EXIT_BUG, ConfigError, ask, is_in_use
from megads.runtime.slurm import ControllerOutage
from megads.runtime.stop import INTERRUPTED, request_stop
from megads.tools.jobs import EXTERNALLY_ENDED, ChildProcesses, MachineShare, ended_jobs, job_record, submit_job
from megads.tools.sweep.points import Point, events_since, launched_at

_LOCAL_POLL_S, _SLURM_POLL_S, _RAY_POLL_S = 0.5, 5.0, 2.0
_FREED_WITHIN_S = 120.0
"""Maximum wait for a point whose sweep was killed: it saves before it releases its run directory."""
_REASON_BYTES = 4096
_SHELL_SIGNAL = 128
"""Offset of a shell's exit code for a command that was ended by a signal."""


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


class Launcher(ABC):
    """Starts points and reports how they ended.

    Args:
        folder: folder of the sweep; the output of point 3 goes to points/0003.log.
        parallel: maximum number of concurrent points; None for no limit.
        poll_s: polling interval in seconds.
    """

    def __init__(self, folder: Path, parallel: int | None, poll_s: float):
        self.poll_s = poll_s
        self._folder, self._parallel = folder.absolute(), parallel
        self._running: dict[int, Point] = {}

    def has_free_slot(self) -> bool:
        """Whether another point may start now."""
        return self._parallel is None or len(self._running) < self._parallel

    def log(self, point: Point) -> Path:
        """Log file of a point, in an existing folder."""
        path = self._folder / "points" / f"{point.number:04d}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @abstractmethod
    def start(self, point: Point) -> None:
        """Starts a point, and stores in it what `reattach` needs.

        Raises:
            ConfigError: the point cannot be started here at all.
        """

    @abstractmethod
    def reattach(self, point: Point) -> bool:
        """Reattaches to a point started by an earlier, killed sweep; returns False if there is nothing to wait for."""

    @abstractmethod
    def ended(self) -> list[PointEnd]:
        """The points that ended since the last call."""

    @abstractmethod
    def stop(self, point: Point) -> None:
        """Asks a running point to save and end; a second call kills it."""


class LocalLauncher(Launcher):
    """Starts points as processes.

    Args:
        folder: see Launcher.
        command: arguments between the Python interpreter and the overrides of a point.
        shares: shares of the machine, one per concurrent point.
        poll_s: polling interval in seconds; None is 0.5.
    """

    def __init__(self, folder: Path, command: Sequence[str], shares: Sequence[MachineShare], poll_s: float | None):
        super().__init__(folder, len(shares), poll_s or _LOCAL_POLL_S)
        self._command, self._free = tuple(command), list(shares)
        self._shares: dict[str, MachineShare] = {}
        self._processes = ChildProcesses()

    def start(self, point: Point) -> None:
        """Starts a point on the first free share."""
        name, share = str(point.number), self._free[0]
        try:
            self._processes.start(name, [*self._command, *point.overrides], self.log(point), share)
        except OSError as error:
            raise ConfigError(f"point {point.number} cannot be started: {error}") from error
        self._shares[name] = self._free.pop(0)
        self._running[point.number] = point

    def reattach(self, point: Point) -> bool:
        """Waits until a point whose sweep was killed has saved and ended; always returns False."""
        deadline = time.monotonic() + _FREED_WITHIN_S
        while is_in_use(Path(point.run_dir)) and time.monotonic() < deadline:
            time.sleep(self.poll_s)
        return False

    def ended(self) -> list[PointEnd]:
        """The processes that ended since the last call."""
        found = []
        for name, code in self._processes.ended().items():
            self._free.append(self._shares.pop(name))
            point = self._running.pop(int(name))
            found.append(PointEnd(point.number, code, _last_words(self.log(point)) if code else ""))
        return found

    def stop(self, point: Point) -> None:
        """Sends SIGINT: the first makes the run save and end, the second kills it."""
        self._processes.signal(str(point.number), signal.SIGINT)


def _last_words(log: Path) -> str:
    """The last error message of megads in the log, without its prefix; empty if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _REASON_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("megads")]
    return said[-1].partition(": ")[2] if said else ""


class _JobLauncher(Launcher):
    """Base class of launchers that submit one job per point."""

    def __init__(self, folder: Path, parallel: int | None, poll_s: float):
        super().__init__(folder, parallel, poll_s)
        self._asked: set[int] = set()

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

    def _follow(self, point: Point) -> None:
        self._running[point.number] = point
        self._asked.discard(point.number)


class SlurmLauncher(_JobLauncher):
    """Submits one SLURM job per point and monitors the queue; docs/notes/sweep.md says why not one job array.

    Args:
        folder: see Launcher.
        script: sbatch script, which takes the overrides of a point as arguments.
        options: sbatch options before the script.
        parallel: maximum number of jobs in the queue; None for no limit.
        poll_s: polling interval in seconds; None is 5.
    """

    def __init__(self, folder: Path, script: Path, options: Sequence[str], parallel: int | None, poll_s: float | None):
        super().__init__(folder, parallel, poll_s or _SLURM_POLL_S)
        self._script, self._options = script, ("--open-mode=append", *options)

    def start(self, point: Point) -> None:
        """Submits a point."""
        try:
            point.job = submit_job(self._script, point.overrides, point.run_id, self.log(point), self._options)
        except ConfigError as error:
            raise ConfigError(f"point {point.number} cannot be submitted: {error}") from error
        self._follow(point)

    def reattach(self, point: Point) -> bool:
        """Reattaches to the job that an earlier sweep submitted, if SLURM still has its state.

        Uses the last job of the point, found by job name and log path: the earlier sweep may not have recorded it.
        """
        # If the controller does not answer, the recorded job is followed.
        with suppress(ControllerOutage):
            jobs = ask("squeue", "--noheader", "--states=all", f"--name={point.run_id}", "--format=%i").split()
            own = [job for job in jobs if (job_record(job) or {}).get("StdOut") == str(self.log(point))]
            point.job = max(own, key=int, default=point.job)
        if not point.job or job_record(point.job) is None:
            return False
        self._follow(point)
        return True

    def ended(self) -> list[PointEnd]:
        """The jobs that left the queue since the last call."""
        if not self._running:
            return []
        points = {point.job: point for point in self._running.values()}
        found = [_end_on_slurm(points[job], record) for job, record in ended_jobs(points.keys()).items()]
        for end in found:
            del self._running[end.number]
        return found

    def _cancel(self, job: str) -> None:
        # If the controller does not answer, the user's next signal repeats the request.
        with suppress(ConfigError):
            ask("scancel", job)


def _end_on_slurm(point: Point, record: Mapping[str, str]) -> PointEnd:
    """End of a point, from SLURM's fields of its job if it still knows the job, else from the run's events."""
    state, code = record.get("JobState", ""), record.get("ExitCode", "")
    if state in EXTERNALLY_ENDED:
        # The run resumes when it is submitted again.
        return PointEnd(point.number, -signal.SIGKILL, f"job {point.job} ended as {state}")
    if re.fullmatch(r"\d+:\d+", code):
        status, number = map(int, code.split(":"))
        return PointEnd(point.number, -number if number else status, f"job {point.job} ended as {state}")
    return _end_by_events(point)


def _end_by_events(point: Point) -> PointEnd:
    """End of a point whose job is no longer known, from the exit code that its run recorded since its last start."""
    events = events_since(Path(point.run_dir), point.started_at)
    codes = [event.get("exit_code") for event in events if event.get("event") == "exit"]
    if not codes or codes[-1] is None:
        reason = f"job {point.job} no longer exists, and its run recorded no exit code"
        return PointEnd(point.number, EXIT_BUG, reason)
    reason = f"job {point.job} no longer exists; exit code from the events of its run"
    return PointEnd(point.number, int(codes[-1]), reason)


class RayLauncher(_JobLauncher):
    """Submits one Ray job per point; Ray schedules it on a node with free resources.

    docs/notes/sweep.md says why not hydra-ray-launcher. Jobs continue without the sweep and are found again.

    Args:
        folder: see Launcher.
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
        """Submits a point."""
        command = shlex.join([sys.executable, *self._command, *point.overrides])
        log = shlex.quote(str(self.log(point)))
        try:
            self._client.submit_job(
                entrypoint=f"cd {shlex.quote(str(Path.cwd()))} && exec {command} >>{log} 2>&1",
                submission_id=_ray_job(point),
                entrypoint_num_cpus=self._cpus,
                entrypoint_num_gpus=self._gpus,
            )
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"Ray refused point {point.number}: {error}") from error
        point.job = _ray_job(point)
        self._follow(point)

    def reattach(self, point: Point) -> bool:
        """Reattaches to the job that an earlier sweep submitted, if the cluster still knows it."""
        point.job = _ray_job(point)
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
                found.append(_end_by_events(point) if info is None else _end_on_ray(point, info))
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


def _ray_job(point: Point) -> str:
    """Name of a job: of the run id and start time, which are recorded before the submission."""
    return f"{point.run_id}-{int((point.started_at or 0) * 1000)}"


def _end_on_ray(point: Point, info: Any) -> PointEnd:
    state, code = info.status.value, info.driver_exit_code
    if state == "SUCCEEDED":
        code = 0
    elif code is None or state == "STOPPED":
        # Stopped, or its node was lost: the run resumes when it is submitted again.
        code = -signal.SIGKILL
    elif code > _SHELL_SIGNAL:
        code = _SHELL_SIGNAL - code
    return PointEnd(point.number, code, f"job {point.job} ended as {state}")
