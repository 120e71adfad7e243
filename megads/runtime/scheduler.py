"""What besides its ranks decides on the end of a run: signals, run.exit_after, and on a cluster the scheduler."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Protocol

from megads.runtime.stop_file import INTERRUPTED, PREEMPTED

_REASONS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
}


@dataclass(frozen=True)
class StopOrder:
    """A wish that the run save and stop.

    Attributes:
        reason: one of megads.runtime.stop_file's.
        message: for people.
    """

    reason: str
    message: str


class Watch(Protocol):
    """Something that may want a run to stop."""

    def look(self) -> StopOrder | None: ...

    @property
    def stop_timeout_s(self) -> float:
        """Seconds that a requested stop may take."""
        ...


class Hold(Protocol):
    """A start's hold on its run directory."""

    def check(self) -> None:
        """Raises MegadsError when it is lost."""
        ...


class Scheduler:
    """Nobody schedules: a run on this machine goes on until it ends or a signal comes, and a second signal kills.

    Args:
        hold: on the run directory; None where nobody can take it.
        deadline: stops the run in time; None where there is no limit.
    """

    signals = tuple(_REASONS)
    second_signal = "a second signal kills at once"

    def __init__(self, hold: Hold | None = None, deadline: Watch | None = None):
        self._hold, self._deadline = hold, deadline

    def description(self) -> dict[str, object]:
        """What events.jsonl says of the scheduler at every start."""
        return {}

    def reason(self, number: signal.Signals) -> str:
        """Why a signal asks for a stop."""
        return _REASONS[number]

    def kills(self, number: signal.Signals) -> bool:
        """Whether a signal that comes after the first kills."""
        return True

    @property
    def stop_timeout_s(self) -> float:
        """Seconds from a request to stop until the ranks are killed."""
        return self._deadline.stop_timeout_s if self._deadline is not None else math.inf

    def look(self) -> StopOrder | None:
        """Asked several times a second; returns an order once.

        Raises:
            MegadsError: this start must end at once, without saving.
        """
        if self._hold is not None:
            self._hold.check()
        return self._deadline.look() if self._deadline is not None else None
