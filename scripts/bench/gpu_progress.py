"""Prints what the commands of a case of gpu_runs write, as they write it: a killed case's log says how far it came."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from tests.command import Command, StartCommand

LOOK_S = 0.5
"""Interval at which files are read."""
STACKS_S = 1.0
"""Time for the processes of a killed case to print their stacks; gpu.sh waits three times as long."""
MOST_BYTES = 8000
"""Printed of a file at a time: the end of what is new."""
LINE = 300
"""Longest line printed."""
FOLLOWED = ("*.log", "events.jsonl", "metrics.jsonl")
"""Files of a case's folder that are followed: logs of ranks, and what a run records."""


class Progress:
    """Follows the outputs, logs and records of a case's commands; each line begins with the seconds since its begin."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._commands: list[Command] = []
        self._printed: dict[Path, int] = {}
        # Taken again by the signal handler, which interrupts the main thread.
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """Prints a line at once: what a buffer holds is lost when the process is killed."""
        print(f"[{time.monotonic() - self._begin:5.1f} s] {text[:LINE]}", flush=True)

    @contextmanager
    def of(self, start: StartCommand) -> Iterator[StartCommand]:
        """Yields a starter whose commands are followed until the end of the block."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(LOOK_S):
                self._look()

        thread = threading.Thread(target=follow, name="progress", daemon=True)
        thread.start()
        try:
            yield FollowedStart(start, self)
        finally:
            over.set()
            thread.join()
            self._look()
            with self._lock:
                self._commands.clear()

    def add(self, arguments: tuple[str, ...], command: Command) -> None:
        """Follows a command."""
        with self._lock:
            self._commands.append(command)
        self.say(f"started megads {' '.join(arguments)}")

    def _look(self) -> None:
        with self._lock:
            for folder in {command.folder for command in self._commands}:
                for path in sorted(path for pattern in FOLLOWED for path in folder.rglob(pattern)):
                    self._print(path, str(path.relative_to(folder)))
            for command in self._commands:
                for path in command.outputs:
                    self._print(path, path.name)

    def _print(self, path: Path, name: str) -> None:
        with suppress(FileNotFoundError), path.open("rb") as file:
            end = file.seek(0, 2)
            begin = file.seek(max(self._printed.get(path, 0), end - MOST_BYTES))
            self._printed[path] = end
            for line in file.read(end - begin).decode(errors="replace").splitlines():
                self.say(f"{name}: {line}")

    def end_on(self, *signals: signal.Signals) -> None:
        """On these signals, ends all commands, prints all stacks, and ends this process with SystemExit."""
        for number in signals:
            signal.signal(number, self._ended)

    def _ended(self, number: int, _frame: FrameType | None) -> None:
        # Another one would interrupt what the first one prints.
        signal.signal(number, signal.SIG_IGN)
        with self._lock:
            self.say(f"{signal.Signals(number).name}: the case is ended before its time")
            self._look()
            processes = [process for command in self._commands for process in _process_tree(command.process.pid)]
            for send in (signal.SIGABRT, signal.SIGKILL):
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(send)
                # Not psutil's wait, which would take the exit codes from the commands.
                time.sleep(STACKS_S if send == signal.SIGABRT else 0)
            self._look()
            faulthandler.dump_traceback(sys.stdout)
        raise SystemExit(128 + number)


def _process_tree(pid: int) -> list[psutil.Process]:
    """A process and all that it has started; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class FollowedStart:
    """A starter of commands that are followed.

    Args:
        start: starts them.
        progress: follows them.
    """

    def __init__(self, start: StartCommand, progress: Progress) -> None:
        self.folder, self._start, self._progress = start.folder, start, progress

    def __call__(
        self, *arguments: str, fault: str = "", variables: Mapping[str, str] = {}, anew: bool = False
    ) -> Command:
        command = self._start(*arguments, fault=fault, variables=variables, anew=anew)
        self._progress.add(arguments, command)
        return command
