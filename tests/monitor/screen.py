"""A program on a real pseudo-terminal, and a small terminal emulator for its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megads.monitor.console import Console

REPOSITORY = Path(__file__).parents[2]
_TOKEN = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """A terminal emulator with scrolling and the control codes that megads writes; others fail a test."""

    def __init__(self, columns: int, rows: int):
        self.columns, self.rows = columns, rows
        self.scrolled: list[str] = []
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._wraps = True
        self.colored = False

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def everything(self) -> list[str]:
        """The lines on the screen and those that scrolled off it, without empty ones."""
        return [line for line in [*self.scrolled, *self.lines] if line]

    @property
    def clean(self) -> bool:
        """True when a prompt would stand at the start of an empty line that wraps."""
        return self._column == 0 and not self.lines[self._row] and self._wraps

    def feed(self, text: str) -> None:
        for private, numbers, code, character in _TOKEN.findall(text):
            if character:
                self._put(character)
            elif private:
                assert numbers in ("7", "2026"), f"a mode that a killed process would leave on: {numbers}"
                self._wraps = code == "h" if numbers == "7" else self._wraps
            elif code == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif code in "JK":
                self._erase(code, numbers)
            else:
                assert code == "m", f"unknown control code {code}"
                self.colored = self.colored or bool(re.search(r"\b3[0-7]\b", numbers))

    def _erase(self, code: str, numbers: str) -> None:
        first = 0 if numbers == "2" else self._column
        self._cells[self._row][first:] = [" "] * (self.columns - first)
        if code == "J":
            for row in range(self._row + 1, self.rows):
                self._cells[row] = [" "] * self.columns

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        else:
            if self._column == self.columns:
                if self._wraps:
                    self._column = 0
                    self._down()
                else:
                    self._column -= 1
            self._cells[self._row][self._column] = character
            self._column += 1

    def _down(self) -> None:
        if self._row < self.rows - 1:
            self._row += 1
            return
        self.scrolled.append("".join(self._cells.pop(0)).rstrip())
        self._cells.append([" "] * self.columns)


class TerminalFile:
    """A pseudo-terminal as an output of this process."""

    def __init__(self, columns: int, rows: int, encoding: str = "utf-8"):
        self.screen = Screen(columns, rows)
        self._master, slave = pty.openpty()
        set_size(self._master, columns, rows)
        self.out = os.fdopen(slave, "w", encoding=encoding)
        self._unread = b""

    def drain(self, wait_s: float = 0.002) -> None:
        """Reads what was written, so that the terminal's buffer does not fill up."""
        while select.select([self._master], [], [], wait_s)[0]:
            self._unread += os.read(self._master, 65536)

    def read(self) -> str:
        """Returns what was written since the last call, and shows it on `screen`."""
        self.drain(0.05)
        text, self._unread = self._unread.decode(), b""
        self.screen.feed(text)
        return text

    def read_frame(self, console: Console) -> None:
        """Has the console draw its next frame, and reads it once the console's thread has written all of it."""
        time.sleep(0.3)
        console.poll()
        text, deadline = "", time.monotonic() + 120
        while not text or not console._outlet.idle:
            assert time.monotonic() < deadline, "no frame"
            text += self.read()
        self.read()

    def close(self) -> None:
        self.out.close()
        os.close(self._master)


def set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class ProgramOnTerminal:
    """A Python program on a pseudo-terminal of its own."""

    def __init__(
        self, arguments: Sequence[str], columns: int, rows: int, folder: Path = REPOSITORY, **environment: str
    ):
        self.screen = Screen(columns, rows)
        self.raw = b""
        variables = {
            key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES", "CI")
        }
        variables |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
        self.master, slave = pty.openpty()
        set_size(self.master, columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=variables,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # The controlling terminal, which Ctrl-C needs, is set between fork and exec.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                self.raw += os.read(self.master, 65536)
            except OSError:
                break
        assert condition(), self.text[-2000:]

    @property
    def text(self) -> str:
        return self.raw.decode(errors="replace")

    def read_to_end(self) -> int:
        """Returns the exit code; `screen` then shows everything."""
        deadline = time.monotonic() + 240
        # Reading fails once the last process has closed the terminal.
        with suppress(OSError):
            while time.monotonic() < deadline:
                if select.select([self.master], [], [], 0.1)[0]:
                    self.raw += os.read(self.master, 65536)
        self.screen.feed(self.text)
        return self.process.wait(timeout=240)

    def close(self) -> None:
        """Closes the terminal, as a lost connection does."""
        os.close(self.master)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class OnTerminal(ProgramOnTerminal):
    """The launcher of tests.launch.small_launch."""

    def __init__(self, run_dir: Path, columns: int, rows: int):
        super().__init__(("-m", "tests.launch.small_launch", str(run_dir), "step_as_planned"), columns, rows)
