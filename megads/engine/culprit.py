"""Who made a step non-finite: from what every rank saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megads.engine.interface import Culprit

SHOWN = 8


@dataclass(frozen=True)
class Symptoms:
    """What one rank saw in a skipped step, before any reduction mixed it with the others'.

    Attributes:
        rank: global rank.
        weights: parameters that are not finite themselves.
        forward_stage: the first of its virtual stages that computed an activation that is not finite; None if none did.
        gradients: virtual stage and name of parameters whose own accumulated gradient is not finite.
    """

    rank: int
    weights: tuple[str, ...] = ()
    forward_stage: int | None = None
    gradients: tuple[tuple[int, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters among `gradients`, as many as are shown."""
        return tuple(name for _, name in self.gradients[:SHOWN])


def not_finite(finite: Sequence[Tensor]) -> list[bool]:
    """Which of some bool scalars on one device are False; waits for it once."""
    return torch.stack(list(finite)).logical_not().tolist() if finite else []


def find_culprit(ranks: Sequence[Symptoms]) -> Culprit:
    """The rank that went wrong first: bad weights before a bad forward before a bad backward.

    Forward passes flow from the first stage to the last and backward passes return, so the earliest stage is to blame
    for the forward and the latest for the backward. When nobody saw anything the norm itself overflowed.
    """
    for symptoms in sorted((s for s in ranks if s.weights), key=lambda s: s.rank):
        return Culprit(symptoms.rank, "weights", symptoms.weights[:SHOWN])
    forward = [(s.forward_stage, s.rank, s) for s in ranks if s.forward_stage is not None]
    for _, rank, symptoms in sorted(forward, key=lambda found: found[:2]):
        return Culprit(rank, "forward", symptoms.names)
    backward = [(-max(stage for stage, _ in s.gradients), s.rank, s) for s in ranks if s.gradients]
    for _, rank, symptoms in sorted(backward, key=lambda found: found[:2]):
        return Culprit(rank, "backward", symptoms.names)
    return Culprit(min(s.rank for s in ranks), "gradient norm")


def agree_on_culprit(mine: Symptoms) -> Culprit:
    """`find_culprit` over the symptoms of all ranks; collective over the world."""
    everyone: list[Symptoms | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return find_culprit([symptoms for symptoms in everyone if symptoms is not None])
