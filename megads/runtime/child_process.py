"""A command that this process starts, keeps to some cores or GPUs, and takes with it when it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_child(
    command: Sequence[str], log: Path, cores: Collection[int] = (), variables: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, so that no signal of the terminal reaches it.

    When this process dies, even by SIGKILL, the kernel sends the child SIGTERM.

    Args:
        command: arguments after the Python interpreter.
        log: file that takes what it prints, behind what is there.
        cores: those it may run on; empty for all.
        variables: added to its environment.

    Raises:
        OSError: it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(variables),
            start_new_session=True,
            # It only makes system calls, so no lock that a thread holds can hang it.
            preexec_fn=_in_the_child(os.getpid(), cores),  # noqa: PLW1509
        )


def _in_the_child(parent: int, cores: Collection[int]) -> Callable[[], None]:
    """What the child does between fork and exec: system calls only, everything else is looked up before."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            # The parent may have died before the call above.
            if os.getppid() != parent:
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

    return prepare


def signal_child(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a child that may have ended."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
