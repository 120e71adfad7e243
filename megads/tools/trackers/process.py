"""`python -m megads.tools.trackers.process <run_dir>`: sends a run's records to wandb, TensorBoard and MLflow.

It begins at the last position. The launcher starts it with --follow next to the ranks. Started by hand, it sends what a
run could not send before its end. Each tracker runs in a child process, which is restarted when it fails and killed at
the time limit. This process imports no tracker, so no tracker can block it.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import multiprocessing
import os
import select
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    EXIT_OK,
    ConfigError,
    EventWriter,
    LoggingConfig,
    MegadsError,
    RunDescription,
    Tracker,
    WandbMode,
    config_dict,
    import_plugins,
    leave_signals_to_the_launcher,
    load_frozen,
    read_json_lines,
)
from megads.monitor.trackers import MLFLOW, TENSORBOARD, WANDB, enabled_trackers
from megads.runtime import environment
from megads.runtime.registry import TRACKERS
from megads.tools.trackers.feed import Feed, FeedPosition, state_path

_POLL_S = 0.1
_FIRST_RETRY_S = 5.0
# Measured from the first start of a tracker, because a run may end before a server can answer.
_ANSWER_S = 5.0
_LAST_RETRY_S = 300.0
_PRIORITY = 10


def _track(run: RunDescription, config: LoggingConfig, wanted: Mapping[str, WandbMode], over: int | None = None) -> int:
    """Runs the trackers of a run until all have recorded everything, or until logging.flush_s after the run's end.

    Args:
        run: description of the run.
        config: settings of the trackers.
        wanted: the trackers, each with its mode.
        over: descriptor that becomes readable when the run is over; None if it is over already, without a time limit.

    Returns:
        The exit code. After a failure of a tracker it is 1 when started by hand, and 0 with --follow, because the
        failure is in events.jsonl.

    """
    os.nice(_PRIORITY)
    with _EventLog(run.run_dir) as log:
        supervisors = [_Supervisor(run, config, name, mode, over, log) for name, mode in wanted.items()]
        _lock(run.run_dir, over, config.flush_s)
        deadline: float | None = None
        while not all(supervisor.done for supervisor in supervisors):
            ended = _wait_for_end(over, _POLL_S)
            if ended and over is not None:
                deadline = deadline or time.monotonic() + config.flush_s
                time.sleep(_POLL_S / 2)
            elif ended:
                time.sleep(_POLL_S)
            for supervisor in supervisors:
                supervisor.poll(ended)
            if deadline is not None and time.monotonic() > deadline:
                for supervisor in supervisors:
                    supervisor.kill()
        return EXIT_OK if over is not None or not log.warnings else 1


class _EventLog(EventWriter):
    """Writer of events.jsonl that counts the warnings."""

    warnings = 0

    def __enter__(self) -> _EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_message(self, tracker: str, message: str, warning: bool) -> None:
        """Records an event about a tracker."""
        self.warnings += warning
        event = "tracker_failed" if warning else "tracker"
        self.write(event, level="warning" if warning else "info", tracker=tracker, message=message)


class _Supervisor:
    """Supervises the child process of one tracker: starts it, restarts it after a failure, and ends it."""

    def __init__(
        self,
        run: RunDescription,
        config: LoggingConfig,
        name: str,
        mode: WandbMode,
        over: int | None,
        log: _EventLog,
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

    def poll(self, ended: bool) -> None:
        """Checks the child process, and starts, restarts or ends it.

        Args:
            ended: whether the run is over.
        """
        if self.done:
            return
        if self._process is None:
            if ended or time.monotonic() >= self._next_start:
                self._start()
            return
        self._listen()
        if self._process.exitcode is not None:
            self._handle_exit(ended)
        elif ended and self._over is not None and self._unanswered():
            self._cause = self._cause or "the server does not answer"
            self._record_offline()

    def _unanswered(self) -> bool:
        """Whether a server has not answered in the time that it has for that, even if the run ended earlier."""
        waits_s = min(_ANSWER_S, self._config.flush_s / 2)
        return self._mode is WandbMode.online and not self._connected and time.monotonic() - self._first_start > waits_s

    def kill(self) -> None:
        """Kills the child process at the time limit."""
        if self.done:
            return
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self.done = True
        text = (
            f"not everything was sent within {self._config.flush_s:g} s after the end (logging.flush_s); "
            f"python -m megads.tools.trackers.process {self._run.run_dir} sends the rest"
        )
        # Offline records are sent by hand in any case.
        self._report(text, warning=self._mode is WandbMode.online or self._name != WANDB)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._from_child, to_parent = context.Pipe(duplex=False)
        self._connected = False
        self._process = context.Process(
            target=_record,
            args=(self._run, self._config, self._name, self._mode, self._over, to_parent),
            daemon=True,
        )
        self._process.start()
        self._first_start = min(self._first_start, time.monotonic())
        to_parent.close()

    def _listen(self) -> None:
        """Reads messages from the child process."""
        assert self._from_child is not None
        with suppress(EOFError, OSError):
            while self._from_child.poll():
                said = str(self._from_child.recv())
                if said == _CONNECTED:
                    self._connected, self._retry_s = True, _FIRST_RETRY_S
                elif said == _STARTED_OVER:
                    self._log.write_message(self._name, f"{self._name}: {_STARTED_OVER}", warning=False)
                else:
                    self._cause = said

    def _handle_exit(self, ended: bool) -> None:
        """Handles the end of the child process."""
        assert self._process is not None
        code = self._process.exitcode
        self._listen()
        if code == 0:
            self.done = True
            return
        self._cause = self._cause or f"its process ended with exit code {code}"
        if not ended:
            self._report(f"{self._cause}; training continues, and the tracker is restarted")
            self._process = None
            self._next_start = time.monotonic() + self._retry_s
            self._retry_s = min(_LAST_RETRY_S, 2 * self._retry_s)
        elif self._mode is WandbMode.online and not self._connected:
            self._record_offline()
        else:
            self.done = True
            self._report(
                f"{self._cause}; python -m megads.tools.trackers.process {self._run.run_dir} sends what is missing"
            )

    def _record_offline(self) -> None:
        """Restarts the tracker offline, which writes the missing records to files that can be sent later."""
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._report(f"{self._cause}; recorded offline instead: wandb sync {self._run.run_dir}/wandb/offline-run-*")
        self._mode = WandbMode.offline
        self._cause = ""
        self._start()

    def _report(self, message: str, warning: bool = True) -> None:
        """Records a failure: as a warning the first time in a start of the run, as info after that."""
        self._log.write_message(self._name, f"{self._name}: {message}", warning=warning and not self._reported)
        self._reported = True


def _lock(run_dir: Path, over: int | None, wait_s: float) -> None:
    """Locks the run against a second tracker process, until this process and its children have ended.

    Raises:
        ConfigError: another tracker process runs and does not end.
    """
    descriptor = os.open(run_dir / "logs" / "tracker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline: float | None = None
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if _wait_for_end(over, _POLL_S):
            deadline = deadline or time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                raise ConfigError(f"{run_dir}: another tracker process is at work: wait for it, or end it")
            time.sleep(_POLL_S)


_READ_EVERY_S = 1.0
_CONNECTED = "connected"
"""Message of a child process whose tracker is ready."""
_STARTED_OVER = (
    "the run went back and trains differently, so a new record has begun; the one before ends with the abandoned steps"
)
"""Message of a child process whose tracker has started over; every other message is the cause of a failure."""


def _record(
    run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, over: int | None, parent: Connection
) -> NoReturn:
    """Body of a child process: records until the end of the run; never returns.

    Args:
        run: description of the run.
        config: settings of the trackers.
        name: name of the tracker.
        mode: mode of the tracker, online or offline.
        over: descriptor that becomes readable when the run is over; None if it is over already.
        parent: receives _CONNECTED, _STARTED_OVER, or the cause of a failure.
    """
    try:
        # wandb's reporting of its own errors can hang.
        environment.set_default("WANDB_ERROR_REPORTING", "false")
        # MLflow reports its use to its maintainers, and refuses file stores unless they are allowed.
        environment.set_default("MLFLOW_DISABLE_TELEMETRY", "true")
        environment.set_default("MLFLOW_ALLOW_FILE_STORE", "true")
        position = FeedPosition.load(state_path(run.run_dir, name))
        tracker = _open(run, config, name, mode, position)
        parent.send(_CONNECTED)
        _pass_on(run, name, tracker, position, over, parent)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        parent.send(f"{type(error).__name__}: {text[0] if text else ''}")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Skips the interpreter's shutdown, in which a library's exit handler may wait for its server.
    os._exit(code)


def _wait_for_end(over: int | None, timeout_s: float) -> bool:
    """Waits for the end of the run up to a timeout; returns whether the run is over."""
    return over is None or bool(select.select([over], [], [], timeout_s)[0])


def _open(run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, position: FeedPosition) -> Tracker:
    # Imported in the tracker's own process, because the imports are slow and start threads.
    if name == WANDB:
        from megads.tools.trackers.wandb_tracker import WandbTracker

        return WandbTracker(run, config.wandb, mode, position.branch)
    if name == TENSORBOARD:
        from megads.tools.trackers.tensorboard_tracker import TensorBoardTracker

        return TensorBoardTracker(run, position.step)
    if name == MLFLOW:
        from megads.tools.trackers.mlflow_tracker import MlflowTracker

        return MlflowTracker(config.mlflow, run, position.branch)
    tracker: Tracker = TRACKERS.make(name, config.trackers[name], run, position.step)
    return tracker


def _pass_on(
    run: RunDescription, name: str, tracker: Tracker, position: FeedPosition, over: int | None, parent: Connection
) -> None:
    # Trackers of plugins need not be derived from the protocol.
    feed = Feed(run.run_dir, position, tracker.rewinds, getattr(tracker, "starts_over", False))
    if tracker.first_step is not None:
        feed.resume_after(max(0, tracker.first_step - 1))
    ended = False
    while not ended:
        # Checked first, so that everything written before the end is read.
        ended = _wait_for_end(over, _READ_EVERY_S)
        while news := feed.read():
            if news.rewound_to is not None:
                tracker.rewind(news.rewound_to)
                if not tracker.rewinds:
                    parent.send(_STARTED_OVER)
            for metrics in news.metrics:
                tracker.add_metrics(metrics)
            for event in news.events:
                tracker.add_event(event)
            tracker.flush()
            position.save(state_path(run.run_dir, name))
    events: list[dict[str, Any]] = list(read_json_lines(run.run_dir / EVENTS_FILE))
    tracker.finish(_final_table(position.last_step, position.last_validation, events), events)


def _final_table(
    step: Mapping[str, Any], validation: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> dict[str, int | float]:
    """Returns the rows of the final table that are known.

    Args:
        step: line of the last step in metrics.jsonl.
        validation: line of the last validation.
        events: all lines of events.jsonl.
    """
    counts = Counter(event.get("event") for event in events)
    rows: dict[str, int | float | None] = {
        "steps": step.get("step"),
        "samples": step.get("samples"),
        "tokens": step.get("tokens"),
        "loss": step.get("loss"),
    }
    rows |= {key: value for key, value in validation.items() if key.startswith(("valid/", "eval/"))}
    rows |= {
        "tokens_per_s": step.get("tokens_per_s"),
        "mfu": step.get("mfu"),
        "peak_memory_bytes": step.get("peak_memory_bytes"),
        "skipped_steps": counts["step_skipped"],
        "checkpoints": counts["checkpoint_saved"],
        "starts": counts["start"],
        "wall_s": _last_wall_s(events),
        "exit_code": next((event.get("exit_code") for event in reversed(events) if event.get("event") == "exit"), None),
    }
    return {name: value for name, value in rows.items() if value is not None}


def _last_wall_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds from the last launch to the last event."""
    launches = [event["time"] for event in events if event.get("event") == "launch"]
    return events[-1]["time"] - launches[-1] if launches else None


def main() -> int:
    """Tracks the run of a run directory with its frozen config, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.trackers.process")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--follow", action="store_true", help="follow a run that continues until standard input ends")
    parser.add_argument("--plugin", action="append", default=[], help="your module that registers a tracker; imported")
    arguments = parser.parse_args()
    if arguments.follow:
        leave_signals_to_the_launcher()
    # Duplicated, because multiprocessing closes the standard input of the children, which poll it too.
    over = os.dup(0) if arguments.follow else None
    try:
        config = load_frozen(arguments.run_dir / CONFIG_FILE)
        # Not when started by hand: the frozen config of another user's run must not import plugins.
        if arguments.follow:
            config.resolve_plugins()
        import_plugins(arguments.plugin)
        missing = sorted(config.logging.trackers.keys() - TRACKERS.parts.keys())
        if missing:
            raise ConfigError(f"the tracker {missing[0]} is of a plugin: give --plugin <module>, which registers it")
        wanted = enabled_trackers(config.logging)
        if not wanted:
            print(f"{arguments.run_dir}: no tracker is switched on (logging.wandb.mode, tensorboard, mlflow)")
            return EXIT_OK
        run = RunDescription(str(config.run.id), arguments.run_dir, config_dict(config))
        return _track(run, config.logging, wanted, over)
    except MegadsError as error:
        print(f"tracker: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Skips the interpreter's shutdown, which modules imported by a plugin may delay.
    os._exit(code)
