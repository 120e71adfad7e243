"""Timed actions of a rank within a step. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One timed action of a rank.

    Attributes:
        kind: action of the pipeline schedule, or work after the schedule; a receive is the wait for it.
        micro_batch: index of the micro-batch; None for actions on all of them.
        stage: index of the virtual stage; None for actions on all of them.
        start_s: start in seconds: as measured, on the rank's monotonic clock; when ranks are compared, relative to the
            first action of any rank in the step.
        end_s: end in seconds, likewise.
    """

    kind: str
    micro_batch: int | None
    stage: int | None
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """For example `forward 3`."""
        words = self.kind.replace("_", " ")
        return words if self.micro_batch is None else f"{words} {self.micro_batch}"
