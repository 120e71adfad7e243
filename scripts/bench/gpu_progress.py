"""What the `megads` commands of a case of gpu_runs do, printed as it happens: how far a killed case came, and when."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from tests.command import Command, StartCommand

LOOK_S = 0.5
"""Interval at which new events are looked for."""
QUIET_S = 10.0
"""After so long without an event, a line says what a running command does."""
STACKS_S = 1.0
"""Time for the processes of a killed case to print their stacks; gpu.sh waits three times as long."""
LAST_LINES = 6
"""Lines shown of the launcher's output when a command ends."""
TAIL_BYTES = 2500
"""Bytes shown of the end of each file when a case is killed."""
STACKS_BYTES = 8000
"""Bytes shown of the stacks that a process then prints."""
LINE = 300
"""Longest line shown of an output."""
EVENT = 600
"""Longest event shown."""
RUN_FOLDERS = ("run.dir=", "verify.dir=")
"""Overrides with the folder in which a command writes events and logs of its ranks."""


def say(text: str) -> None:
    """Prints at once: what a buffer holds is lost when the process is killed."""
    print(text, flush=True)


def end_of(path: Path, num_bytes: int = TAIL_BYTES) -> str:
    """Last bytes of a file, as text."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - num_bytes))
        return file.read().decode(errors="replace")


def indented(lines: list[str]) -> str:
    """Lines of a command's output, set apart from those of the case."""
    return "\n".join(f"    | {line[:LINE]}" for line in lines)


@dataclass
class Watched:
    """A command and what was printed of it.

    Attributes:
        name: name of its run's folder.
        command: the running command.
        folder: folder of its run.
        begin: time.time() of its start, with which its events are compared.
        events: number of its events that were printed.
        heard: time.time() of the last line printed about it.
        ended: its end was printed.
    """

    name: str
    command: Command
    folder: Path
    begin: float = field(default_factory=time.time)
    events: int = 0
    heard: float = field(default_factory=time.time)
    ended: bool = False

    def new_events(self) -> list[str]:
        """Lines of the events since the last call; a start's `first_step` has the seconds of each phase."""
        found = list(read_json_lines(self.folder / EVENTS_FILE))
        new, self.events = found[self.events :], len(found)
        lines = []
        for event in new:
            details = {key: value for key, value in event.items() if key not in ("time", "event", "level")}
            shown = ", ".join(f"{key}={_short(value)}" for key, value in details.items())
            lines.append(f"event {event['event']} after {event['time'] - self.begin:.1f} s: {shown}"[:EVENT])
        return lines

    def logs(self) -> list[Path]:
        """Outputs of the launcher and logs of the ranks."""
        return [*self.command.outputs, *sorted((self.folder / "logs").glob("*.log"))]

    def where(self) -> str:
        """Last step, and the last line of each log."""
        steps = [line["step"] for line in read_json_lines(self.folder / METRICS_FILE) if "loss" in line]
        last = {path.name: end_of(path, 1000).strip().splitlines()[-1:] for path in self.logs()}
        said = [f"{name}: {lines[0]}" for name, lines in last.items() if lines]
        text = f"running for {time.time() - self.begin:.0f} s, {steps[-1] if steps else 'no'} steps"
        return "\n".join([text, indented(said)]) if said else text


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + "}"
    return str(value)


class Progress:
    """Prints what the commands of a case do, from a thread; each line begins with the seconds since the case began."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._watched: list[Watched] = []
        # Taken again by the signal handler, which interrupts the main thread.
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """Prints a line."""
        say(f"[{time.monotonic() - self._begin:5.1f} s] {text}")

    @contextmanager
    def of(self, start: StartCommand) -> Iterator[StartCommand]:
        """Yields a starter whose commands are watched until the end of the block."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                self._look()

        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield WatchedStart(start, self)
        finally:
            over.set()
            thread.join()
            self._look()
            with self._lock:
                self._watched.clear()

    def add(self, arguments: tuple[str, ...], command: Command) -> None:
        """Watches a command."""
        named = [word.partition("=")[2] for word in arguments if word.startswith(RUN_FOLDERS)]
        folder = Path(named[-1]) if named else command.folder
        with self._lock:
            self._watched.append(Watched(folder.name, command, folder))
        self.say(f"{folder.name}: started megads {' '.join(arguments)}")

    def _look(self) -> None:
        with self._lock:
            for each in self._watched:
                code = each.command.process.poll()
                lines = each.new_events()
                if code is not None and not each.ended:
                    each.ended = True
                    lines.append(f"ended with exit code {code} after {time.time() - each.begin:.1f} s; its last lines:")
                    last = [end_of(path).strip().splitlines()[-LAST_LINES:] for path in each.command.outputs]
                    lines.append(indented([line for shown in last for line in shown]))
                elif code is None and not lines and time.time() - each.heard > QUIET_S:
                    lines.append(each.where())
                for line in lines:
                    each.heard = time.time()
                    say(line) if line.startswith("    | ") else self.say(f"{each.name}: {line}")

    def end_on(self, *signals: signal.Signals) -> None:
        """On these signals, prints the ends of all logs and the stacks, and ends this process with SystemExit."""
        for number in signals:
            signal.signal(number, self._ended)

    def _ended(self, number: int, _frame: FrameType | None) -> None:
        # Another one would interrupt what the first one prints.
        signal.signal(number, signal.SIG_IGN)
        with self._lock:
            self.say(f"{signal.Signals(number).name}: the case is ended before its time")
            running = [each for each in self._watched if each.command.process.poll() is None]
            self._watched.clear()
            printed: dict[Path, int] = {}
            for each in running:
                self.say(f"{each.name}: {each.where().splitlines()[0]}")
                for path in each.logs():
                    printed[path] = path.stat().st_size
                    if text := end_of(path):
                        say(f"  {each.name}, end of {path.name}:\n{indented(text.splitlines())}")
            end_with_stacks([each.command for each in running])
            for path, size in printed.items():
                if stacks := read_after(path, size):
                    say(f"  added to {path.name}:\n{indented(stacks.splitlines())}")
            faulthandler.dump_traceback(sys.stdout)
        raise SystemExit(128 + number)


def read_after(path: Path, offset: int) -> str:
    """What a file has from an offset on, at most STACKS_BYTES."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(STACKS_BYTES).decode(errors="replace")


def end_with_stacks(commands: list[Command]) -> None:
    """Ends commands and their ranks, which may have left their process group; faulthandler prints their stacks."""
    processes: list[psutil.Process] = []
    for command in commands:
        with suppress(psutil.NoSuchProcess):
            processes += command.processes()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    # Not psutil's wait, which would take the exit codes from the commands.
    time.sleep(STACKS_S)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class WatchedStart:
    """A starter of commands that are watched.

    Args:
        start: starts them.
        progress: watches them.
    """

    def __init__(self, start: StartCommand, progress: Progress) -> None:
        self.folder, self._start, self._progress = start.folder, start, progress

    def __call__(
        self, *arguments: str, fault: str = "", variables: Mapping[str, str] = {}, anew: bool = False
    ) -> Command:
        command = self._start(*arguments, fault=fault, variables=variables, anew=anew)
        self._progress.add(arguments, command)
        return command
