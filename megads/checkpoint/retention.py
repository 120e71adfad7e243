"""Retention: which checkpoints of a run are kept. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a checkpoint is kept."""

    recent = "recent"
    best = "best"
    every = "every"


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the most recent ones, those with the lowest validation loss, and one every N steps.

    Checkpoints are given as sequence numbers by step (see Manifest); 0 is a checkpoint that is not usable. Such a
    checkpoint may be kept as recent, but never for its step or its loss.

    Attributes:
        recent: number of most recent checkpoints to keep; 0: all are kept.
        every_steps: checkpoints whose step is a multiple of this are kept; 0: none.
        best: number of checkpoints with the lowest loss to keep.
        losses: validation loss by step; a checkpoint without one is not among the best.
    """

    recent: int = 0
    every_steps: int = 0
    best: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)

    def reasons(self, sequences: Mapping[int, int]) -> dict[int, tuple[Reason, ...]]:
        """Why each checkpoint is kept, by step, oldest first; without a reason it may be removed."""
        by_age = sorted(sequences, key=lambda step: (sequences[step], step))
        validated = [step for step in by_age if sequences[step] and step in self.losses]
        members = {
            Reason.recent: set(by_age[-self.recent :]),
            Reason.best: set(sorted(validated, key=lambda step: (self.losses[step], step))[: self.best]),
            Reason.every: {step for step in by_age if sequences[step] and self._is_multiple(step)},
        }
        return {step: tuple(reason for reason in Reason if step in members[reason]) for step in by_age}

    def surplus(self, sequences: Mapping[int, int]) -> list[int]:
        """Steps of the checkpoints that are not kept, oldest first."""
        return [step for step, reasons in self.reasons(sequences).items() if not reasons]

    def expendable(self, sequences: Mapping[int, int], *, all_reasons: bool) -> list[int]:
        """Steps of the checkpoints that may be deleted if a disk has no space for another one, in order of deletion.

        The newest is never deleted, and if all are kept (recent = 0), none is. Checkpoints that are only recent come
        before those kept for their step or their loss; each oldest first.

        Args:
            sequences: sequences of the checkpoints, by step.
            all_reasons: include checkpoints that are kept for their step or their loss.
        """
        older = list(self.reasons(sequences).items())[:-1] if self.recent else []
        for_good = [step for step, reasons in older if set(reasons) - {Reason.recent}]
        return [step for step, _ in older if step not in for_good] + (for_good if all_reasons else [])

    def _is_multiple(self, step: int) -> bool:
        return self.every_steps > 0 and step % self.every_steps == 0


KEEP_ALL = Retention()
"""Removes nothing."""
