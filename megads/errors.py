"""The failures a user can meet, one class per documented exit code.

A message says what was wrong, the value, where it came from and what to do about it.
"""

from __future__ import annotations

import errno
import signal

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where there is no room: on the disk, in the quota, under the limit of a file's size."""
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
"""What each exit code means: the one list, which the help, the README and docs/troubleshooting.md show."""


def exit_codes_text() -> str:
    """Returns all exit codes and their meanings in one sentence."""
    return f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}."


class MegadsError(Exception):
    """A failure with a message meant for the user and a documented exit code."""

    exit_code = EXIT_BUG


class ConfigError(MegadsError):
    """The configuration cannot be run as it stands."""

    exit_code = 2


class DataError(MegadsError):
    """The data is missing, corrupt, empty or does not fit the model."""

    exit_code = 3


class CheckpointError(MegadsError):
    """No usable checkpoint where one was asked for, or one of another model."""

    exit_code = 4


class StopRequested(MegadsError):
    """Somebody asked the run to stop; it saved first."""

    exit_code = 5


class Preempted(MegadsError):
    """The scheduler takes the machine back; the run saved first and wants to be requeued."""

    exit_code = 6


class NumericalError(MegadsError):
    """Training cannot go on: too many non-finite steps in a row, or loss spikes."""

    exit_code = 7


class RollBack(NumericalError):
    """The run goes back to a checkpoint before a loss spike: the launcher starts the ranks again."""


class RestartsExhausted(MegadsError):
    """The run failed more often than it may restart."""

    exit_code = 8


class UnhealthyNode(MegadsError):
    """A node or a rank is not fit to train."""

    exit_code = 9


class RankKilled(MegadsError):
    """A signal from outside killed a rank: the kernel for want of memory, the system, a person."""

    exit_code = 10


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)


def exit_code_of_signal(number: int) -> int:
    """Returns the documented code for a process that a signal killed.

    A process draws SIGSEGV, SIGABRT and their like on itself: a bug. SIGBUS does not count among them: it is sent for
    what became of a mapped file, of its disk or of /dev/shm.
    """
    return EXIT_BUG if number in _CRASHES else RankKilled.exit_code


class Fenced(UnhealthyNode):
    """Another start of the same run took the run directory over; this one is an orphan and must not write."""
