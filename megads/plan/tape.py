"""Bytes alive while a micro-batch runs forward and back through a row of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace


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
        arriving: the gradient of its output among `backward`, which is freed before the gradient of its weight is added
            to the fp32 sums; 0 where it is too little to matter.
        gradient: of its weight, as backward makes it, before it is added to the fp32 sums.
        early: the same where the forward pass makes it and adds it.
        in_sums: `gradient` is computed in the fp32 sums themselves, and never anywhere else.
        deferred: what its gradient is made from where it is put off to the weight part of the backward pass: its input
            and the gradient of its output; 0 where it cannot be.
        shared: another operation has the same weight and comes before it in backward.
        is_loss: its tensors are the loss's.
    """

    name: str
    kept: int = 0
    forward: int = 0
    backward: int = 0
    arriving: int = 0
    gradient: int = 0
    early: int = 0
    in_sums: bool = False
    deferred: int = 0
    shared: bool = False
    is_loss: bool = False


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment beside what it always holds; all sizes in bytes.

    Attributes:
        name: the operation and its direction.
        gradients: fp32 sums over micro-batches, and this rank's slice of those that are reduced.
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


def recomputed(ops: Sequence[Op], *, inputs: int, arriving: int) -> list[Op]:
    """The same operations where only their inputs are kept and backward first runs them forward again.

    Forward they are taken to hold what they would keep until the last one is done. That is no less than they do, and
    never decides: the second time the same is there, and the gradient beside it.

    Args:
        ops: run again together, the last one first in backward.
        inputs: bytes of their inputs, which are among what the first one keeps.
        arriving: bytes that backward has in its hands when it reaches them: the gradient of their output.
    """
    assert not any(op.is_loss for op in ops) and inputs <= ops[0].kept
    held, again = -inputs, 0
    made = []
    for index, op in enumerate(ops):
        before, held = held, held + op.kept
        again = max(again, arriving + held + op.forward)
        forward = op.forward + max(0, before)
        made.append(replace(op, kept=0 if index else inputs, forward=forward, backward=op.backward + held))
    made[-1] = replace(made[-1], backward=max(made[-1].backward, again))
    return made


def deferred_bytes(ops: Sequence[Op]) -> int:
    """What a micro-batch holds between the two parts of its backward pass."""
    return sum(op.deferred for op in ops)


def moments(
    ops: Sequence[Op], *, waiting: int, sums: Callable[[int], int], widening: int, cast: bool
) -> Iterator[Moment]:
    """Each operation's fullest moment, forward from first to last and backward from last to first.

    Args:
        ops: what a micro-batch runs through.
        waiting: other micro-batches that wait for their backward pass.
        sums: bytes of the fp32 sums that are there once this pass has made gradients of so many bytes in fp32.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
        cast: a gradient is copied to fp32 before it is added, as a CPU does.
    """
    held = waiting * kept_bytes(ops)
    yield from forward_moments(ops, held=held, sums=sums, widening=widening)
    yield from backward_moments(ops, held=held, sums=sums, widening=widening, cast=cast)


def early_bytes(ops: Sequence[Op], widening: int) -> int:
    """In fp32, of the gradients that a forward pass makes."""
    return widening * sum(op.early for op in ops)


def forward_moments(ops: Sequence[Op], *, held: int, sums: Callable[[int], int], widening: int) -> Iterator[Moment]:
    """Each operation's fullest moment in a forward pass, in which it adds what it keeps.

    Args:
        ops: what a micro-batch runs through.
        held: bytes kept by other passes.
        sums: bytes of the fp32 sums that are there once this pass has made gradients of so many bytes in fp32.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
    """
    activations, loss, made = held, 0, 0
    for op in ops:
        made += widening * op.early
        activations += 0 if op.is_loss else op.kept
        loss += op.kept if op.is_loss else 0
        yield _moment(f"{op.name}, forward", op, op.forward, Moment("", sums(made), activations, loss))


def backward_moments(
    ops: Sequence[Op],
    *,
    held: int,
    sums: Callable[[int], int],
    widening: int,
    cast: bool,
    straight: bool = False,
    split: bool = False,
) -> Iterator[Moment]:
    """Each operation's fullest moment in a backward pass, after which it frees what it kept.

    A weight's gradient is added to its fp32 sum and freed at once.

    Args:
        ops: what a micro-batch runs through.
        held: bytes kept by other passes.
        sums: bytes of the fp32 sums that are there once this pass has made gradients of so many bytes in fp32.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
        cast: a gradient is copied to fp32 before it is added, as a CPU does.
        straight: gradients of linear layers may be computed in the sums, beside what they are made from.
        split: gradients that can be put off are, with what they are made from.
    """
    activations = held + sum(op.kept for op in ops if not op.is_loss)
    loss = sum(op.kept for op in ops if op.is_loss)
    made = early_bytes(ops, widening)
    for op in reversed(ops):
        gradient = 0 if op.in_sums or (split and op.deferred) else op.gradient
        running = op.backward + gradient
        adding = running - op.arriving
        if cast:  # once the operation is done and has freed what it kept
            adding += max(0, gradient * widening - op.kept)
        name, before = f"{op.name}, backward", Moment("", sums(made), activations, loss)
        made += 0 if op.shared or (split and op.deferred) else op.gradient * widening
        after = replace(before, gradients=sums(made))
        fullest = [_moment(name, op, running, after if op.in_sums else before), _moment(name, op, adding, after)]
        if straight and op.deferred and gradient:
            fullest.append(_moment(name, op, op.backward, after))
        yield max(fullest, key=lambda m: m.total)
        activations -= 0 if op.is_loss else op.kept
        activations += op.deferred if split else 0
        loss -= op.kept if op.is_loss else 0


def weight_moments(
    ops: Sequence[Op], *, held: int, sums: Callable[[int], int], widening: int, cast: bool
) -> Iterator[Moment]:
    """Each operation's fullest moment while gradients are made that a backward pass put off.

    Args:
        ops: what a micro-batch ran through.
        held: bytes kept by other passes.
        sums: bytes of the fp32 sums that are there once gradients of so many bytes in fp32 are made.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
        cast: a gradient is copied to fp32 before it is added, as a CPU does.
    """
    activations = held + deferred_bytes(ops)
    made = early_bytes(ops, widening)
    made += sum(op.gradient * widening for op in ops if not op.deferred and not op.shared)
    for op in reversed(ops):
        if not op.deferred:
            continue
        made += 0 if op.shared else op.gradient * widening
        temporary = op.gradient
        if cast:
            temporary += op.gradient * widening
        yield Moment(f"{op.name}, weight gradient", sums(made), activations, working=temporary)
        activations -= op.deferred


def _moment(name: str, op: Op, temporary: int, held: Moment) -> Moment:
    loss, working = (temporary, 0) if op.is_loss else (0, temporary)
    return Moment(name, held.gradients, held.activations, held.loss + loss, working)
