"""The process beside the run that keeps its trackers: one child each, started again when it fails, ended in time.

It imports no tracker itself, so nothing that a tracker does can hold it up.
"""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

from megads.errors import EXIT_OK, ConfigError
from megads.monitor.recorder import CONNECTED, record, wait_for_end
from megads.monitor.trackers import RunDescription
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.metrics import EventWriter

_POLL_S = 0.1
_FIRST_RETRY_S = 5.0
# From the first start of a tracker: a run may be over before any server could have answered.
_ANSWER_S = 5.0
_LAST_RETRY_S = 300.0
_PRIORITY = 10


def track(run: RunDescription, config: LoggingConfig, wanted: Mapping[str, WandbMode], over: int | None = None) -> int:
    """Keeps the trackers of a run until all have everything, or the time after the run's end is used up.

    Args:
        run: the run.
        config: settings of the trackers.
        wanted: the trackers, each with where it records.
        over: descriptor that becomes readable when the run is over; None when it is over already, and then there is
            no hurry.

    Returns:
        The exit code: 0 although a tracker failed, because events.jsonl says so; 1 when called by hand.

    """
    os.nice(_PRIORITY)
    with EventLog(run.run_dir) as log:
        keepers = [Keeper(run, config, name, mode, over, log) for name, mode in wanted.items()]
        _lock(run.run_dir, over, config.flush_s)
        deadline: float | None = None
        while not all(keeper.done for keeper in keepers):
            ended = wait_for_end(over, _POLL_S)
            if ended and over is not None:
                deadline = deadline or time.monotonic() + config.flush_s
                time.sleep(_POLL_S / 2)
            elif ended:
                time.sleep(_POLL_S)
            for keeper in keepers:
                keeper.look(ended)
            if deadline is not None and time.monotonic() > deadline:
                for keeper in keepers:
                    keeper.kill()
        return EXIT_OK if over is not None or not log.warnings else 1


class EventLog(EventWriter):
    """events.jsonl, with a count of the warnings."""

    warnings = 0

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, tracker: str, message: str, warning: bool) -> None:
        """Records what became of a tracker."""
        self.warnings += warning
        event = "tracker_failed" if warning else "tracker"
        self.write(event, level="warning" if warning else "info", tracker=tracker, message=message)


class Keeper:
    """Keeps one tracker: starts it, starts it again when it fails, and sees to its end."""

    def __init__(
        self,
        run: RunDescription,
        config: LoggingConfig,
        name: str,
        mode: WandbMode,
        over: int | None,
        log: EventLog,
    ):
        self.done = False
        self._run, self._config, self._name, self._mode, self._over, self._log = run, config, name, mode, over, log
        self._process: ForkProcess | None = None
        self._from_child: Connection | None = None
        self._connected = False
        self._cause = ""
        self._reported = False
        self._retry_s = _FIRST_RETRY_S
        self._next_start = 0.0
        self._first_start = math.inf

    def look(self, ended: bool) -> None:
        """Does what is due.

        Args:
            ended: the run is over.
        """
        if self.done:
            return
        if self._process is None:
            if ended or time.monotonic() >= self._next_start:
                self._start()
            return
        self._listen()
        if self._process.exitcode is not None:
            self._bury(ended)
        elif ended and self._over is not None and self._unanswered():
            self._cause = self._cause or "the server does not answer"
            self._record_offline()

    def _unanswered(self) -> bool:
        """Tells that a server had its time to answer and did not; a run may be over before it could."""
        waits_s = min(_ANSWER_S, self._config.flush_s / 2)
        return self._mode is WandbMode.online and not self._connected and time.monotonic() - self._first_start > waits_s

    def kill(self) -> None:
        """Ends it: the time is used up."""
        if self.done:
            return
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self.done = True
        self._report(
            f"not everything was taken within {self._config.flush_s:g} s after the end (logging.flush_s); "
            f"python -m megads.launch.tracker {self._run.run_dir} sends the rest"
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._from_child, to_parent = context.Pipe(duplex=False)
        self._connected = False
        self._process = context.Process(
            target=record,
            args=(self._run, self._config, self._name, self._mode, self._over, to_parent),
            daemon=True,
        )
        self._process.start()
        self._first_start = min(self._first_start, time.monotonic())
        to_parent.close()

    def _listen(self) -> None:
        """Takes what the child says."""
        assert self._from_child is not None
        with suppress(EOFError, OSError):
            while self._from_child.poll():
                said = str(self._from_child.recv())
                if said == CONNECTED:
                    self._connected, self._retry_s = True, _FIRST_RETRY_S
                else:
                    self._cause = said

    def _bury(self, ended: bool) -> None:
        """Decides what follows the end of the child."""
        assert self._process is not None
        code = self._process.exitcode
        self._listen()
        if code == 0:
            self.done = True
            return
        self._cause = self._cause or f"its process ended with exit code {code}"
        if not ended:
            self._report(f"{self._cause}; the training goes on, and it is tried again")
            self._process = None
            self._next_start = time.monotonic() + self._retry_s
            self._retry_s = min(_LAST_RETRY_S, 2 * self._retry_s)
        elif self._mode is WandbMode.online and not self._connected:
            self._record_offline()
        else:
            self.done = True
            self._report(f"{self._cause}; python -m megads.launch.tracker {self._run.run_dir} sends what is missing")

    def _record_offline(self) -> None:
        """Records what the server did not take as files that it can be sent later."""
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._report(f"{self._cause}; recorded offline instead: wandb sync {self._run.run_dir}/wandb/offline-run-*")
        self._mode = WandbMode.offline
        self._cause = ""
        self._start()

    def _report(self, message: str) -> None:
        """One warning for each start of the run; what follows is told more quietly."""
        self._log.say(self._name, f"{self._name}: {message}", warning=not self._reported)
        self._reported = True


def _lock(run_dir: Path, over: int | None, wait_s: float) -> None:
    """Keeps a second tracker process out; held until this process and its children are gone.

    Raises:
        ConfigError: another one is at work and does not end.
    """
    descriptor = os.open(run_dir / "logs" / "tracker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline: float | None = None
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if wait_for_end(over, _POLL_S):
            deadline = deadline or time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                raise ConfigError(f"{run_dir}: another tracker process is at work: wait for it, or end it")
            time.sleep(_POLL_S)
