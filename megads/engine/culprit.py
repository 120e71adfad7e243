"""Who made a step non-finite: from what every rank saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megads.engine.interface import Culprit

SHOWN = 8


@dataclass(frozen=True)
class Symptoms:
    """What one rank saw in a skipped step, before any reduction mixed it with the others'.

    Attributes:
        rank: global rank.
        stage: its pipeline stage.
        weights: parameters that are not finite themselves.
        forward: an activation it computed is not finite.
        gradients: parameters whose own accumulated gradient is not finite.
    """

    rank: int
    stage: int
    weights: tuple[str, ...] = ()
    forward: bool = False
    gradients: tuple[str, ...] = ()


def find_culprit(ranks: Sequence[Symptoms]) -> Culprit:
    """The rank that went wrong first: bad weights before a bad forward before a bad backward.

    Forward passes flow from the first stage to the last and backward passes return, so the earliest stage is to blame
    for the forward and the latest for the backward. When nobody saw anything the norm itself overflowed.
    """
    for symptoms in sorted((s for s in ranks if s.weights), key=lambda s: s.rank):
        return Culprit(symptoms.rank, "weights", symptoms.weights[:SHOWN])
    for symptoms in sorted((s for s in ranks if s.forward), key=lambda s: (s.stage, s.rank)):
        return Culprit(symptoms.rank, "forward", symptoms.gradients[:SHOWN])
    for symptoms in sorted((s for s in ranks if s.gradients), key=lambda s: (-s.stage, s.rank)):
        return Culprit(symptoms.rank, "backward", symptoms.gradients[:SHOWN])
    return Culprit(min(s.rank for s in ranks), "gradient norm")


def agree_on_culprit(mine: Symptoms) -> Culprit:
    """`find_culprit` over the symptoms of all ranks; collective over the world."""
    everyone: list[Symptoms | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return find_culprit([symptoms for symptoms in everyone if symptoms is not None])
