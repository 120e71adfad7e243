"""How points are started and watched: one interface, on this machine (local.py) and on SLURM (slurm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megads.tools.sweep.points import Point


@dataclass(frozen=True)
class PointEnd:
    """How a start of a point ended.

    Attributes:
        number: of the point.
        exit_code: of its command; negative is the number of the signal that ended it.
        reason: what is known of a failure; may be empty.
    """

    number: int
    exit_code: int
    reason: str = ""


class Launcher(Protocol):
    """Starts points and says how they ended."""

    poll_s: float
    """Seconds between two looks."""

    def has_room(self) -> bool:
        """Whether one more point may start now."""
        ...

    def start(self, point: Point) -> None:
        """Starts a point, and notes in it what finds it again.

        Raises:
            ConfigError: it cannot be started here at all.
        """
        ...

    def find(self, point: Point) -> bool:
        """Whether a point that an earlier, killed sweep started is still to be waited for; then it is."""
        ...

    def ended(self) -> list[PointEnd]:
        """The points that ended since the last call."""
        ...

    def stop(self, point: Point) -> None:
        """Asks a running point to save and end; once more, and it is killed."""
        ...
