"""A process beside the run that may crash, hang or be slow: the run never waits for it but shortly at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05


class SideProcess:
    """One process in a session of its own, so that no signal of the terminal reaches it.

    Its standard input is a pipe on which nothing is ever written: its end says that the run is over, however the
    launcher ended.

    Args:
        command: arguments after the Python interpreter.
        log: file that takes what it prints.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], log: Path):
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def failure(self) -> str:
        """How it failed, once it did; empty while it runs and after a good end."""
        code = self._process.poll()
        if not code:
            return ""
        return f"killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def finish(self, limit_s: float, hurry: Callable[[], bool]) -> bool:
        """Tells it that the run is over, and waits.

        Args:
            limit_s: longest wait; then it is killed with all that it started.
            hurry: asked again and again; True ends the wait at once.

        Returns:
            True when it ended by itself.

        """
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None:
            if time.monotonic() >= deadline or hurry():
                self._kill()
                return False
            time.sleep(_POLL_S)
        return True

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
