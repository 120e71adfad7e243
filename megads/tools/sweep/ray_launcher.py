"""The points of a sweep as jobs of a Ray cluster, through Ray's own interface for jobs."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megads.errors import ConfigError
from megads.runtime.stop import INTERRUPTED, request_stop
from megads.tools.sweep.launchers import PointEnd, ended_by_its_run
from megads.tools.sweep.points import Point, launched_at

_POLL_S = 2.0
_SHELL_SIGNAL = 128
"""What a shell adds to the number of the signal that ended its command."""


class RayLauncher:
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
        self.poll_s = poll_s or _POLL_S
        self._folder, self._command = folder.absolute(), tuple(command)
        self._cpus, self._gpus, self._parallel = cpus, gpus, parallel
        self._running: dict[int, Point] = {}
        self._asked: set[int] = set()
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

    def has_room(self) -> bool:
        """Whether one more job may be there."""
        return self._parallel is None or len(self._running) < self._parallel

    def start(self, point: Point) -> None:
        """Submits a point.

        Raises:
            ConfigError: Ray refuses it.
        """
        log = self._folder / "points" / f"{point.number:04d}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
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
        self._running[point.number] = point
        self._asked.discard(point.number)

    def find(self, point: Point) -> bool:
        """Follows a job that an earlier sweep submitted, as long as the cluster knows it.

        Its name follows from what that sweep noted before it submitted it.
        """
        point.job = _job_name(point)
        if self._info(point) is None:
            return False
        self._running[point.number] = point
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
                found.append(ended_by_its_run(point, f"job {point.job}") if info is None else _end_of(point, info))
        return found

    def stop(self, point: Point) -> None:
        """Asks a run to save and end; a job that does not train yet, or was asked before, is stopped."""
        if point.number not in self._running:
            return
        if point.number in self._asked or launched_at(Path(point.run_dir), point.started_at) is None:
            self._client.stop_job(point.job)
        else:
            request_stop(Path(point.run_dir), INTERRUPTED)
        self._asked.add(point.number)

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
