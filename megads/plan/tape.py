"""Bytes alive while a micro-batch runs forward and back through a row of operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One operation; all sizes in bytes.

    Attributes:
        name: what it is, for people.
        kept: what it saves for its own backward, its inputs among it, or the engine holds until then; each tensor is
            counted at one operation, the first one in forward order that needs it until then.
        forward: most that is alive while it runs forward beside everything kept so far, its own included. Its output
            is among it, unless it is kept.
        backward: most that is alive while it runs backward beside everything kept up to it, its own included; the
            gradient of its weight is not among it.
        gradient: of its weight, as backward makes it.
        is_loss: its tensors are the loss's.
    """

    name: str
    kept: int = 0
    forward: int = 0
    backward: int = 0
    gradient: int = 0
    is_loss: bool = False


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment beside what it always holds; all sizes in bytes.

    Attributes:
        name: the operation and its direction.
        gradients: in the weights' dtype, waiting to be added to the fp32 ones.
        activations: kept for backward by all micro-batches in flight, the loss's share left out.
        loss: the loss's, kept or temporary.
        working: temporary tensors of other operations, gradients on their way included.
        transient: copies that are made when no micro-batch runs, or for a reduction in its backward pass.
        gathered: weights that ZeRO-3 put together for the layers at work.
    """

    name: str
    gradients: int = 0
    activations: int = 0
    loss: int = 0
    working: int = 0
    transient: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.loss + self.working + self.transient + self.gathered


def kept_bytes(ops: Sequence[Op]) -> int:
    """What a micro-batch holds between its forward and its backward pass."""
    return sum(op.kept for op in ops)


def moments(ops: Sequence[Op], *, waiting: int, gradients: int | None) -> Iterator[Moment]:
    """Each operation's fullest moment, forward from first to last and backward from last to first.

    Forward, an operation adds what it keeps; backward, it frees that after it ran.

    Args:
        ops: what a micro-batch runs through.
        waiting: other micro-batches that wait for their backward pass.
        gradients: bytes of weight gradients that are there already, to which new ones are added; None in a step's
            first backward pass, where there are none and new ones stay.
    """
    activations, loss = waiting * kept_bytes(ops), 0
    made = gradients or 0
    for op in ops:
        activations += 0 if op.is_loss else op.kept
        loss += op.kept if op.is_loss else 0
        yield _moment(f"{op.name}, forward", op, op.forward, Moment("", made, activations, loss))
    for op in reversed(ops):
        yield _moment(f"{op.name}, backward", op, op.backward + op.gradient, Moment("", made, activations, loss))
        activations -= 0 if op.is_loss else op.kept
        loss -= op.kept if op.is_loss else 0
        made += op.gradient if gradients is None else 0


def _moment(name: str, op: Op, temporary: int, held: Moment) -> Moment:
    loss, working = (temporary, 0) if op.is_loss else (0, temporary)
    return Moment(name, held.gradients, held.activations, held.loss + loss, working)
