"""Which checkpoints of a run stay on disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a checkpoint stays."""

    recent = "recent"
    best = "best"
    every = "every"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the most recent ones, those of the lowest validation loss, and every so many steps one.

    Checkpoints are given as sequence numbers by step (see Manifest): 0 is one that is not usable. Such a checkpoint
    may be among the most recent ones, but never stays for its step or its loss.

    Attributes:
        recent: most recent checkpoints that stay; 0: all stay.
        every_steps: those whose step is a multiple of it stay; 0: none.
        best: those of the lowest loss that stay.
        losses: validation loss by step; a checkpoint whose step has none is not among the best.
    """

    recent: int = 0
    every_steps: int = 0
    best: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)

    def reasons(self, sequences: Mapping[int, int]) -> dict[int, tuple[Reason, ...]]:
        """Why each checkpoint stays, by step, oldest first; no reason: it may be removed."""
        by_age = sorted(sequences, key=lambda step: (sequences[step], step))
        validated = [step for step in by_age if sequences[step] and step in self.losses]
        members = {
            Reason.recent: set(by_age[-self.recent :]),
            Reason.best: set(sorted(validated, key=lambda step: (self.losses[step], step))[: self.best]),
            Reason.every: {step for step in by_age if sequences[step] and self._is_multiple(step)},
        }
        return {step: tuple(reason for reason in Reason if step in members[reason]) for step in by_age}

    def surplus(self, sequences: Mapping[int, int]) -> list[int]:
        """Steps of the checkpoints that nothing keeps, oldest first."""
        return [step for step, reasons in self.reasons(sequences).items() if not reasons]

    def expendable(self, sequences: Mapping[int, int], *, all_reasons: bool) -> list[int]:
        """Steps of the checkpoints that give way where a disk has no room for another one, the first to go first.

        The newest is not among them, and where all stay none is. Those that are only recent go before those that stay
        for their step or their loss; each oldest first.

        Args:
            sequences: of the checkpoints.
            all_reasons: those that stay for their step or their loss, too.
        """
        older = list(self.reasons(sequences).items())[:-1] if self.recent else []
        for_good = [step for step, reasons in older if set(reasons) - {Reason.recent}]
        return [step for step, _ in older if step not in for_good] + (for_good if all_reasons else [])

    def _is_multiple(self, step: int) -> bool:
        return self.every_steps > 0 and step % self.every_steps == 0


KEEP_ALL = Retention()
"""Nothing is removed."""
