"""How the points of a sweep are started and watched: one interface, on this machine, on SLURM and on Ray."""

from __future__ import annotations

import getpass
import re
import shlex
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megads.errors import EXIT_BUG, ConfigError
from megads.runtime.lease import in_use
from megads.runtime.process import signal_child, start_child
from megads.runtime.slurm import fields
from megads.runtime.stop import INTERRUPTED, request_stop
from megads.tools.sweep.points import Point, events_since, launched_at


@dataclass(frozen=True)
class PointEnd:
    """How a start of a point ended.

    Attributes:
        number: of the point.
        exit_code: of its command; negative is the number of the signal that ended it.
        reason: what is known of a failure; may be empty.
    """

    number: int
    exit_code: int
    reason: str = ""


class Launcher(Protocol):
    """Starts points and says how they ended."""

    poll_s: float
    """Seconds between two looks."""

    def has_room(self) -> bool:
        """Whether one more point may start now."""
        ...

    def start(self, point: Point) -> None:
        """Starts a point, and notes in it what finds it again.

        Raises:
            ConfigError: it cannot be started here at all.
        """
        ...

    def find(self, point: Point) -> bool:
        """Whether a point that an earlier, killed sweep started is still to be waited for; then it is."""
        ...

    def ended(self) -> list[PointEnd]:
        """The points that ended since the last call."""
        ...

    def stop(self, point: Point) -> None:
        """Asks a running point to save and end; once more, and it is killed."""
        ...


_LOCAL_POLL_S = 0.5
_FREED_WITHIN_S = 120.0
"""A point whose sweep was killed saves before it ends; so long its run directory may stay in use."""
_REASON_BYTES = 4096


@dataclass(frozen=True)
class Share:
    """What one point at a time has to itself.

    Attributes:
        cores: it may run on; empty for all.
        variables: of its environment, such as the GPUs that it sees.
    """

    cores: tuple[int, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def shares_of(cores: Sequence[int], gpus: Sequence[str], parallel: int) -> list[Share]:
    """Equal shares of a machine, one for each point that runs at the same time.

    Args:
        cores: that this process may use.
        gpus: that it sees, as CUDA_VISIBLE_DEVICES names them.
        parallel: points at once, at most as many as there are cores, and GPUs where there are any.
    """
    if parallel == 1:
        return [Share()]
    width, gpu_width = len(cores) // parallel, len(gpus) // parallel
    return [
        Share(
            tuple(cores[place * width : (place + 1) * width]),
            (("CUDA_VISIBLE_DEVICES", ",".join(gpus[place * gpu_width : (place + 1) * gpu_width])),) if gpus else (),
        )
        for place in range(parallel)
    ]


class LocalLauncher:
    """Starts points as processes.

    Args:
        folder: the sweep's; what point 3 prints goes to points/0003.log.
        command: arguments after the Python interpreter, before a point's overrides.
        shares: of the machine; as many points run at once.
        poll_s: seconds between two looks; None is half a second.
    """

    def __init__(self, folder: Path, command: Sequence[str], shares: Sequence[Share], poll_s: float | None):
        self.poll_s = poll_s or _LOCAL_POLL_S
        self._folder = folder
        self._command = tuple(command)
        self._free = list(shares)
        self._running: dict[int, tuple[subprocess.Popen[bytes], Share]] = {}

    def has_room(self) -> bool:
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

    def find(self, point: Point) -> bool:
        """Waits until a point whose sweep was killed has saved and ended; never finds it running."""
        deadline = time.monotonic() + _FREED_WITHIN_S
        while in_use(Path(point.run_dir)) and time.monotonic() < deadline:
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
        """Sends SIGINT, of which the first saves and ends the run and the second kills it."""
        if point.number in self._running:
            signal_child(self._running[point.number][0], signal.SIGINT)

    def log(self, number: int) -> Path:
        """The file with what a point printed."""
        return self._folder / "points" / f"{number:04d}.log"


def _last_words(log: Path) -> str:
    """The last line in which megads said what went wrong; nothing where there is none."""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _REASON_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("megads")]
    return said[-1].partition(": ")[2] if said else ""


class _JobLauncher:
    """What the launchers of jobs share.

    Args:
        folder: the sweep's; what point 3's job prints goes to points/0003.log.
        parallel: most jobs at once; None for no limit.
        poll_s: seconds between two looks.
    """

    def __init__(self, folder: Path, parallel: int | None, poll_s: float):
        self.poll_s = poll_s
        self._folder, self._parallel = folder.absolute(), parallel
        self._running: dict[int, Point] = {}
        self._asked: set[int] = set()

    def has_room(self) -> bool:
        """Whether one more job may be there."""
        return self._parallel is None or len(self._running) < self._parallel

    def stop(self, point: Point) -> None:
        """Asks a run to save and end; a job that does not train yet, or was asked before, is cancelled."""
        if point.number not in self._running:
            return
        if point.number in self._asked or launched_at(Path(point.run_dir), point.started_at) is None:
            self._cancel(point.job)
        else:
            request_stop(Path(point.run_dir), INTERRUPTED)
        self._asked.add(point.number)

    @abstractmethod
    def _cancel(self, job: str) -> None:
        """Ends a job at once, if it can be reached."""

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
"""States of a job that was ended from outside: its run goes on when it is submitted again."""


class SlurmLauncher(_JobLauncher):
    """Submits every point as a job of its own and follows the jobs in the queue.

    Not one job array, and not hydra-submitit-launcher: the tasks of an array share one resource request, while points
    differ in their layout and so in nodes; an array is there from the start, while bayes proposes a point from those
    before it; and submitit pickles a Python function into a job of its own making, while a point is the site's own
    sbatch script with the same overrides as everywhere, requeued by itself.

    Args:
        folder: the sweep's; what point 3's job prints goes to points/0003.log.
        script: the sbatch script, which takes a point's overrides as arguments.
        options: of sbatch, before the script.
        parallel: most jobs in the queue; None for no limit.
        poll_s: seconds between two looks; None is five.
    """

    def __init__(self, folder: Path, script: Path, options: Sequence[str], parallel: int | None, poll_s: float | None):
        super().__init__(folder, parallel, poll_s or _SLURM_POLL_S)
        self._script = script
        self._options = tuple(options)

    def start(self, point: Point) -> None:
        """Submits a point.

        Raises:
            ConfigError: sbatch refuses it, or is not there.
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
        # <id>, or <id>;<cluster> where several clusters are federated.
        point.job = answer.stdout.strip().partition(";")[0]
        self._follow(point)

    def find(self, point: Point) -> bool:
        """Follows a job that an earlier sweep submitted, as long as SLURM knows how it stands or stood.

        The last one, which that sweep may not have had the time to note.
        """
        point.job = self._last_job(point) or point.job
        if not point.job or (point.job not in self._queued() and _job_fields(point.job) is None):
            return False
        self._follow(point)
        return True

    def _last_job(self, point: Point) -> str:
        """Id of the last job that was submitted for a point, by its name and its log; empty for none."""
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
            if point.job not in queued:
                del self._running[number]
                found.append(_outcome(point))
        return found

    def _cancel(self, job: str) -> None:
        _ask("scancel", job)

    def _queued(self) -> set[str]:
        """Ids of this user's jobs that have not ended."""
        answer = _ask("squeue", "--noheader", "--format=%i", f"--user={getpass.getuser()}")
        if answer.returncode:
            # The controller is away for a moment: nothing has ended as far as anybody knows.
            return {point.job for point in self._running.values()}
        return set(answer.stdout.split())


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of SLURM's commands."""
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
    """What SLURM still knows of a job; it forgets one minutes after its end."""
    answer = _ask("scontrol", "show", "job", "--oneliner", job)
    if answer.returncode:
        return None
    return fields(answer.stdout)


def _outcome(point: Point) -> PointEnd:
    """How a job that left the queue ended: by SLURM's word, else by what the run itself wrote."""
    known = _job_fields(point.job) or {}
    state, code = known.get("JobState", ""), known.get("ExitCode", "")
    if state in _GONE:
        return PointEnd(point.number, -signal.SIGKILL, f"job {point.job} ended as {state}")
    if re.fullmatch(r"\d+:\d+", code):
        status, number = map(int, code.split(":"))
        return PointEnd(point.number, -number if number else status, f"job {point.job} ended as {state}")
    return _ended_by_its_run(point, f"job {point.job}")


def _ended_by_its_run(point: Point, job: str) -> PointEnd:
    """How a point ended whose job nobody remembers: by what the run itself wrote.

    Args:
        point: which.
        job: its job, for people.
    """
    last = _last_exit(point)
    if last is None:
        return PointEnd(point.number, EXIT_BUG, f"{job} is gone, and its run did not say how it ended")
    return PointEnd(point.number, last, f"{job} is gone; its run ended so")


def _last_exit(point: Point) -> int | None:
    """The exit code that the run recorded since its last start."""
    events = events_since(Path(point.run_dir), point.started_at)
    codes = [event.get("exit_code") for event in events if event.get("event") == "exit"]
    return None if not codes or codes[-1] is None else int(codes[-1])


_RAY_POLL_S = 2.0
_SHELL_SIGNAL = 128
"""What a shell adds to the number of the signal that ended its command."""


class RayLauncher(_JobLauncher):
    """Submits every point as a job of its own; Ray starts it on a node where its resources are free.

    Not hydra-ray-launcher, which runs a Python function as a Ray task: its results come when all points of a batch have
    ended, and with the process that asked for them, while jobs go on without the sweep and are found again.

    Args:
        folder: the sweep's; what point 3's job prints goes to points/0003.log.
        command: arguments after the Python interpreter, before a point's overrides.
        address: of Ray's dashboard, which takes jobs; None is RAY_ADDRESS, or the cluster of this machine.
        cpus: that a job reserves.
        gpus: that a job reserves and sees.
        parallel: most jobs at once; None for no limit.
        poll_s: seconds between two looks; None is two.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
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
        except Exception as error:  # of many kinds: no cluster, no token, another version
            raise ConfigError(
                f"sweep.ray_address = {address}: {error}; start a cluster (ray start --head), or give the address of "
                "its dashboard, http://<head node>:8265"
            ) from error

    def start(self, point: Point) -> None:
        """Submits a point.

        Raises:
            ConfigError: Ray refuses it.
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

    def find(self, point: Point) -> bool:
        """Follows a job that an earlier sweep submitted, as long as the cluster knows it.

        Its name follows from what that sweep noted before it submitted it.
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
                # The head node is away for a moment: nothing has ended as far as anybody knows.
                continue
            if info is None or info.status.is_terminal():
                del self._running[number]
                found.append(_ended_by_its_run(point, f"job {point.job}") if info is None else _end_of(point, info))
        return found

    def _cancel(self, job: str) -> None:
        # A head node that is away is asked again when the user is.
        with suppress(RuntimeError, OSError):
            self._client.stop_job(job)

    def _info(self, point: Point) -> Any:
        """What Ray knows of a job; None where it knows none of that name. Raises OSError where it does not answer."""
        try:
            return self._client.get_job_info(point.job)
        except RuntimeError as error:
            if "404" in str(error):
                return None
            raise ConnectionError(str(error)) from error


def _job_name(point: Point) -> str:
    """The name of a start of a point, among all that a cluster ever had."""
    return f"{point.run_id}-{int((point.started_at or 0) * 1000)}"


def _end_of(point: Point, info: Any) -> PointEnd:
    """How a job ended."""
    state, code = info.status.value, info.driver_exit_code
    if state == "SUCCEEDED":
        return PointEnd(point.number, 0, f"job {point.job} ended as {state}")
    if code is None or state == "STOPPED":
        # Stopped, or its node was lost: its run goes on when it is submitted again.
        return PointEnd(point.number, -signal.SIGKILL, f"job {point.job} ended as {state}")
    code = _SHELL_SIGNAL - code if code > _SHELL_SIGNAL else code
    return PointEnd(point.number, code, f"job {point.job} ended as {state}")
