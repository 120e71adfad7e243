"""`python -m megads.launch.tracker <run_dir>`: tells wandb and TensorBoard of a run, from where they are.

The launcher starts it beside the ranks with --follow. By hand it sends what a run could not send before its end. Every
tracker has a child of its own, which is started again when it fails and ended in time: this process imports no
tracker, so nothing that one does can hold it up.
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

from megads.errors import EXIT_OK, ConfigError, MegadsError
from megads.frozen_config import config_dict, load_frozen
from megads.launch.rank import leave_signals_to_the_launcher
from megads.monitor.trackers import (
    TENSORBOARD,
    WANDB,
    Feed,
    FeedPosition,
    RunDescription,
    Tracker,
    state_path,
    wanted_trackers,
)
from megads.runtime import environment
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.registry import TRACKERS, import_plugins
from megads.runtime.run_dir import CONFIG_FILE, EVENTS_FILE

_POLL_S = 0.1
_FIRST_RETRY_S = 5.0
# From the first start of a tracker: a run may be over before any server could have answered.
_ANSWER_S = 5.0
_LAST_RETRY_S = 300.0
_PRIORITY = 10


def _track(run: RunDescription, config: LoggingConfig, wanted: Mapping[str, WandbMode], over: int | None = None) -> int:
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
    with _EventLog(run.run_dir) as log:
        keepers = [_Keeper(run, config, name, mode, over, log) for name, mode in wanted.items()]
        _lock(run.run_dir, over, config.flush_s)
        deadline: float | None = None
        while not all(keeper.done for keeper in keepers):
            ended = _wait_for_end(over, _POLL_S)
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


class _EventLog(EventWriter):
    """events.jsonl, with a count of the warnings."""

    warnings = 0

    def __enter__(self) -> _EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, tracker: str, message: str, warning: bool) -> None:
        """Records what became of a tracker."""
        self.warnings += warning
        event = "tracker_failed" if warning else "tracker"
        self.write(event, level="warning" if warning else "info", tracker=tracker, message=message)


class _Keeper:
    """Keeps one tracker: starts it, starts it again when it fails, and sees to its end."""

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
            target=_record,
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
                if said == _CONNECTED:
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
        if _wait_for_end(over, _POLL_S):
            deadline = deadline or time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                raise ConfigError(f"{run_dir}: another tracker process is at work: wait for it, or end it")
            time.sleep(_POLL_S)


_READ_EVERY_S = 1.0
_CONNECTED = "connected"
"""What a recorder says once its tracker takes records; anything else that it says is why it failed."""


def _record(
    run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, over: int | None, parent: Connection
) -> NoReturn:
    """Records to the end of the run; never returns.

    Args:
        run: the run.
        config: settings of the trackers.
        name: the tracker.
        mode: where wandb records.
        over: descriptor that becomes readable when the run is over; None when it is over already.
        parent: told _CONNECTED or why it failed.
    """
    try:
        environment.prepare_wandb()
        position = FeedPosition.load(state_path(run.run_dir, name))
        tracker = _open(run, config, name, mode, position)
        parent.send(_CONNECTED)
        _pass_on(run, name, tracker, position, over)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        parent.send(f"{type(error).__name__}: {text[0] if text else ''}")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Without the interpreter's shutdown: a library's exit handler may wait for its server.
    os._exit(code)


def _wait_for_end(over: int | None, timeout_s: float) -> bool:
    """Waits until the run is over, for a while; tells whether it is."""
    return over is None or bool(select.select([over], [], [], timeout_s)[0])


def _open(run: RunDescription, config: LoggingConfig, name: str, mode: WandbMode, position: FeedPosition) -> Tracker:
    # Imported here, in the tracker's own process: their imports are slow and start threads.
    if name == WANDB:
        from megads.monitor.tracker_backends import WandbTracker

        return WandbTracker(run, config.wandb, mode)
    if name == TENSORBOARD:
        from megads.monitor.tracker_backends import TensorBoardTracker

        return TensorBoardTracker(run, position.step)
    tracker: Tracker = TRACKERS.make(name, config.trackers[name], run, position.step)
    return tracker


def _pass_on(run: RunDescription, name: str, tracker: Tracker, position: FeedPosition, over: int | None) -> None:
    feed = Feed(run.run_dir, position, tracker.rewinds)
    if tracker.first_step is not None:
        feed.go_on_from(max(0, tracker.first_step - 1))
    ended = False
    while not ended:
        # Asked first: whatever was written before the end is then read.
        ended = _wait_for_end(over, _READ_EVERY_S)
        while news := feed.read():
            if news.rewound_to is not None:
                tracker.rewind(news.rewound_to)
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
    """Returns the table's rows; those of which nothing is known are left out.

    Args:
        step: the last step's line of metrics.jsonl.
        validation: the last validation's line.
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
    """Reads the frozen config of the run directory, tracks, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.tracker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--follow", action="store_true", help="the run goes on until standard input ends")
    parser.add_argument("--plugin", action="append", default=[], help="a module of yours to import for its tracker")
    arguments = parser.parse_args()
    if arguments.follow:
        leave_signals_to_the_launcher()
    # A descriptor of its own: multiprocessing closes the standard input of the children, who wait for it too.
    over = os.dup(0) if arguments.follow else None
    try:
        config = load_frozen(arguments.run_dir / CONFIG_FILE)
        # Only beside a run of the user's own command line: by hand, the frozen config of anybody's run is only data.
        if arguments.follow:
            config.settle_plugins()
        import_plugins(arguments.plugin)
        missing = sorted(config.logging.trackers.keys() - TRACKERS.parts.keys())
        if missing:
            raise ConfigError(f"the tracker {missing[0]} is of a plugin: give --plugin <module>, which registers it")
        wanted = wanted_trackers(config.logging)
        if not wanted:
            print(f"{arguments.run_dir}: neither wandb nor TensorBoard is switched on (logging.wandb.mode)")
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
    # Without the interpreter's shutdown: what a plugin has imported may take its time there.
    os._exit(code)
