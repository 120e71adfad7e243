"""What a rank did within a step, and when. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Something that a rank did.

    Attributes:
        kind: an action of the pipeline's schedule, or what follows the schedule; a receive is the wait for it.
        micro_batch: for which; None for what concerns all.
        stage: of which virtual stage; None likewise.
        start_s: when it began, in seconds: on the rank's monotonic clock where it was just measured, after the first
            thing that any rank did in the step where ranks are put beside each other.
        end_s: when it was over, likewise.
    """

    kind: str
    micro_batch: int | None
    stage: int | None
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """As in forward 3."""
        words = self.kind.replace("_", " ")
        return words if self.micro_batch is None else f"{words} {self.micro_batch}"
