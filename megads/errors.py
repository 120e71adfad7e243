"""User-facing errors, one class per documented exit code.

A message gives the error, the value, where it came from, and the remedy.
"""

from __future__ import annotations

import errno
import signal

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for no space left: the disk is full, the quota is used up, or the file size limit is reached."""
EXIT_OK = 0
EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    EXIT_OK: "finished",
    2: "bad configuration",
    3: "bad data",
    4: "no usable checkpoint, or none could be saved",
    5: "stopped on request, after saving",
    6: "preempted or out of time, after saving",
    7: "numerical failure",
    8: "restarts exhausted",
    9: "unhealthy node or rank",
    10: "a rank was killed from outside (out of memory?)",
    EXIT_BUG: "a bug",
    EXIT_INTERRUPTED: "interrupted, or killed by a second signal",
}
"""Meaning of each exit code; the source of the list in the help, the README and docs/troubleshooting.md."""


def exit_codes_text() -> str:
    """Returns all exit codes and their meanings in one sentence."""
    return f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}."


def reason_of(error: OSError) -> str:
    """Returns why a file cannot be used; libraries raise OSError with a message in place of the system's."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def leave_to_debugger(error: Exception) -> None:
    """Marks an unhandled exception of a rank in the process of the command (cluster.in_process).

    Nothing catches it, so that a debugger shows its frames.
    """
    error.__dict__["left_to_debugger"] = True


def is_left_to_debugger(error: Exception) -> bool:
    """Whether `leave_to_debugger` marked an exception."""
    return "left_to_debugger" in error.__dict__


class MegadsError(Exception):
    """Base class of errors with a message for the user and a documented exit code."""

    exit_code = EXIT_BUG


class ConfigError(MegadsError):
    """The configuration is invalid."""

    exit_code = 2


class DataError(MegadsError):
    """The data is missing, corrupt, empty or does not fit the model."""

    exit_code = 3


class CheckpointError(MegadsError):
    """The requested checkpoint is missing or not usable, or is of another model."""

    exit_code = 4


class StopRequested(MegadsError):
    """The run stopped on request, after saving."""

    exit_code = 5


class Preempted(MegadsError):
    """The run was preempted or reached its time limit; it saved before and can be requeued."""

    exit_code = 6


class NumericalError(MegadsError):
    """Training cannot continue: too many consecutive non-finite steps, or too many loss spikes."""

    exit_code = 7


class RollBack(NumericalError):
    """The run rolls back to a checkpoint before a loss spike; the launcher restarts the ranks."""


class RestartsExhausted(MegadsError):
    """The run failed more often than the allowed number of restarts."""

    exit_code = 8


class UnhealthyNode(MegadsError):
    """A node or a rank is not fit to train."""

    exit_code = 9


class RankKilled(MegadsError):
    """A rank was killed by a signal from outside: by the kernel (out of memory), the system or a user."""

    exit_code = 10


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)


def exit_code_of_signal(number: int) -> int:
    """Returns the documented exit code for a process that a signal killed.

    SIGSEGV, SIGABRT and similar signals indicate a bug in the process. SIGBUS does not: it is caused by changes of a
    mapped file, its disk or /dev/shm.
    """
    return EXIT_BUG if number in _CRASHES else RankKilled.exit_code


class Fenced(UnhealthyNode):
    """Another start of the same run has taken over the run directory; this start must not write to it anymore."""
