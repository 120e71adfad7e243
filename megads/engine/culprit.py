"""Who made a step non-finite: from what every rank saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megads.engine.interface import Culprit
from megads.runtime.control_plane import ControlPlane

SHOWN = 8


class Symptoms(NamedTuple):
    """What one rank saw in a skipped step, before any reduction mixed it with the others'.

    Attributes:
        rank: global rank.
        weights: whether a parameter is not finite itself.
        forward_stage: the first of its virtual stages that computed an activation that is not finite; None if none did.
        backward_stage: the last of its virtual stages that has a parameter whose own accumulated gradient is not
            finite; None if none has.
    """

    rank: int
    weights: bool = False
    forward_stage: int | None = None
    backward_stage: int | None = None


def not_finite(finite: Sequence[Tensor]) -> list[bool]:
    """Which of some bool scalars on one device are False; waits for it once."""
    return torch.stack(list(finite)).logical_not().tolist() if finite else []


def find_culprit(ranks: Sequence[Symptoms]) -> Culprit:
    """The rank that went wrong first, no parameters named yet: bad weights before a bad forward before a bad backward.

    Forward passes flow from the first stage to the last and backward passes return, so the earliest stage is to blame
    for the forward and the latest for the backward. When nobody saw anything the norm itself overflowed.
    """
    weights = [s.rank for s in ranks if s.weights]
    if weights:
        return Culprit(min(weights), "weights")
    forward = [(s.forward_stage, s.rank) for s in ranks if s.forward_stage is not None]
    if forward:
        return Culprit(min(forward)[1], "forward")
    backward = [(-s.backward_stage, s.rank) for s in ranks if s.backward_stage is not None]
    if backward:
        return Culprit(min(backward)[1], "backward")
    return Culprit(min(s.rank for s in ranks), "gradient norm")


def agree_on_culprit(
    control: ControlPlane,
    weights: Sequence[str],
    forward_stage: int | None,
    gradients: Sequence[tuple[int, str]],
) -> Culprit:
    """`find_culprit` over the symptoms of all ranks; collective over the world.

    Three numbers of every rank travel, and the names that are shown of one: all names of all ranks would be 287 MB on
    each of 10,000.

    Args:
        control: of all ranks.
        weights: names of this rank's parameters that are not finite themselves.
        forward_stage: see Symptoms.
        gradients: virtual stage and name of this rank's parameters whose own accumulated gradient is not finite.
    """
    backward_stage = max((stage for stage, _ in gradients), default=None)
    found = find_culprit(control.gather(Symptoms(control.rank, bool(weights), forward_stage, backward_stage), Symptoms))
    names = weights if found.where == "weights" else [name for _, name in gradients]
    if found.where == "gradient norm":
        return found
    return replace(found, parameters=control.broadcast(tuple(names[:SHOWN]), tuple[str, ...], source=found.rank))
