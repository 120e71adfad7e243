"""What a rank holds at each moment of a step: pass by pass, over a pipeline's schedule, under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megads.optim.groups import Rates, Role, bucket_elements
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule
from megads.plan.micro_batch import FP32


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


def _deferred_bytes(ops: Sequence[Op]) -> int:
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


def _early_bytes(ops: Sequence[Op], widening: int) -> int:
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
    made = _early_bytes(ops, widening)
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


def _weight_moments(
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
    activations = held + _deferred_bytes(ops)
    made = _early_bytes(ops, widening)
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


@dataclass(frozen=True)
class GradientSums:
    """The fp32 sums over micro-batches, and how a gradient gets into them.

    Attributes:
        begun: bytes of the sums that are there once a step's first backward passes have made gradients of so many
            bytes in fp32.
        full: bytes of all of them.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
        cast: a gradient is copied to fp32 before it is added, as a CPU does.
        straight: gradients of linear layers may be computed in the sums, as our own products do.
    """

    begun: Callable[[int], int]
    full: int
    widening: int
    cast: bool
    straight: bool


@dataclass(frozen=True)
class _Pass:
    """A computation of a rank, as far as its memory goes; passes of one kind that differ in `others` only are alike.

    Attributes:
        kind: of the computation.
        stage: virtual stage.
        made: bytes in fp32 of the gradients that the step's earlier passes of this stage made.
        elsewhere: likewise, of the rank's other stages.
        later: every weight has its first gradient.
    """

    kind: ActionKind
    stage: int
    made: int
    elsewhere: int
    later: bool

    @property
    def phase(self) -> str:
        return "later micro-batch" if self.later else "first micro-batch"


def most_waiting(schedule: Schedule, rank: int) -> int:
    """Most passes of a rank's virtual stages between their forward and the end of their backward pass."""
    return max(waiting for _, waiting, _ in _replay(schedule, rank, {}))


def pipeline_phases(
    schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]], sums: GradientSums
) -> list[Moment]:
    """The fullest moments of a rank: until every weight has its first gradient, and after.

    Args:
        schedule: of a step.
        rank: of the pipeline.
        stages: operations of each of the rank's virtual stages, by number.
        sums: of gradients.
    """
    most: dict[_Pass, int] = {}
    widening = sums.widening
    made: dict[int, int] = {}
    done: set[int] = set()
    for action, _, others in _replay(schedule, rank, stages):
        stage, ops = action.stage, stages[action.stage]
        own, later = made.get(stage, 0), len(done) == len(stages)
        key = _Pass(action.kind, stage, own, sum(made.values()) - own, later)
        most[key] = max(most.get(key, 0), others)
        made[stage] = max(own, _early_bytes(ops, widening))
        if action.kind in (ActionKind.backward, ActionKind.backward_weight):
            made[stage] = _early_bytes(ops, widening) + widening * sum(op.gradient for op in ops if not op.shared)
            done.add(stage)
    fullest: dict[str, Moment] = {}
    for key, others in most.items():
        moment = max(_moments(key, stages[key.stage], others, sums), key=lambda moment: moment.total, default=None)
        if moment is not None and (key.phase not in fullest or moment.total > fullest[key.phase].total):
            fullest[key.phase] = moment
    return [replace(moment, name=f"{phase}: {moment.name}") for phase, moment in fullest.items()]


def _replay(schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]]) -> Iterator[tuple[Action, int, int]]:
    """Each computation of a rank with the passes that wait and the bytes that others than its own hold."""
    kept = {stage: kept_bytes(ops) for stage, ops in stages.items()}
    deferred = {stage: _deferred_bytes(ops) for stage, ops in stages.items()}
    waiting = held = 0
    for action in schedule.actions[rank]:
        if not action.kind.computes:
            continue
        own, left = kept.get(action.stage, 0), deferred.get(action.stage, 0)
        match action.kind:
            case ActionKind.forward:
                waiting += 1
                yield action, waiting, held
                held += own
            case ActionKind.backward_input:
                held -= own
                yield action, waiting, held
                held += left
            case _:
                held -= left if action.kind is ActionKind.backward_weight else own
                yield action, waiting, held
                waiting -= 1


def _moments(of: _Pass, ops: Sequence[Op], others: int, sums: GradientSums) -> Iterator[Moment]:
    """The moments of a pass, operation by operation."""

    def begun(made: int) -> int:
        return sums.full if of.later else sums.begun(of.elsewhere + max(of.made, made))

    match of.kind:
        case ActionKind.forward:
            yield from forward_moments(ops, held=others, sums=begun, widening=sums.widening)
        case ActionKind.backward_weight:
            yield from _weight_moments(ops, held=others, sums=begun, widening=sums.widening, cast=sums.cast)
        case _:
            split = of.kind is ActionKind.backward_input
            yield from backward_moments(
                ops,
                held=others,
                sums=begun,
                widening=sums.widening,
                cast=sums.cast,
                straight=sums.straight,
                split=split,
            )


@dataclass(frozen=True)
class ShardedWeights:
    """A rank's parameters and how they are sharded.

    Attributes:
        stage: ZeRO's, 2 or 3.
        ranks: over which it shards.
        groups: elements of every parameter before sharding, by parameter group, in order.
        weight_bytes: of one element of the weights.
    """

    stage: int
    ranks: int
    groups: Mapping[tuple[Role, Rates], Sequence[int]]
    weight_bytes: int

    @property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [size for group in self.groups.values() for size in group]

    @property
    def partitions(self) -> list[int]:
        """Elements of every parameter group that this rank updates, padding included."""
        if self.stage == 3:
            return [sum(-(-size // self.ranks) for size in group) for group in self.groups.values()]
        # Flat and 4-byte aligned.
        return [-(-sum(group) // (2 * self.ranks)) * 2 for group in self.groups.values()]

    @property
    def weights(self) -> int:
        """Bytes of the working weights that are there all the time."""
        return self.weight_bytes * sum(self.partitions) * (1 if self.stage == 3 else self.ranks)

    @property
    def bucket(self) -> int:
        """Elements of gradients that are reduced together."""
        return bucket_elements(self.sizes)

    def accumulated_gradients(self, micro_batches: int) -> int:
        """Bytes of the gradients that this rank adds up.

        In fp32 DeepSpeed's ZeRO-2 keeps the whole gradient of every parameter of which the rank updates a part, and
        that of the micro-batch beside the sum.
        """
        if self.stage == 2 and self.weight_bytes == FP32:
            return FP32 * self._touched() * min(micro_batches, 2)
        return FP32 * sum(self.partitions)

    def _touched(self) -> int:
        """Elements of the parameters of which a rank updates a part; of the rank with the most."""
        counts = [0] * self.ranks
        for group, partition in zip(self.groups.values(), self.partitions, strict=True):
            offset = 0
            for size in group:
                for rank in range(offset // partition, -(-(offset + size) // partition)):
                    counts[rank] += size
                offset += size
        return max(counts)


def sharded_phases(ops: Sequence[Op], sharded: ShardedWeights, micro_batches: int, *, cuda: bool) -> Iterator[Moment]:
    """Moments of a step: the micro-batch, operation by operation, and the reductions of its gradients.

    A bucket of gradients is in the weights' dtype until it is reduced; the reduction flattens it and casts it to fp32,
    and gloo scatters a copy. ZeRO-3 holds the weights of the running layer and of those gathered ahead, twice while the
    ranks' parts are put together.

    Args:
        ops: what a micro-batch runs through.
        sharded: the rank's parameters.
        micro_batches: of a step.
        cuda: ranks compute on GPUs.
    """
    low, bucket = sharded.weight_bytes, sharded.bucket
    copies = low * bucket
    if sharded.stage == 3:
        copies = FP32 * bucket * (1 if cuda else 2)
    if low < FP32:
        copies += FP32 * bucket
    ahead = min(bucket + max(sharded.sizes), sum(sharded.sizes))
    gathered = 2 * low * ahead if sharded.stage == 3 else 0
    row = list(moments(ops, waiting=0, sums=lambda _: 0, widening=1, cast=False))
    # ZeRO-3 has the sums all the time, ZeRO-2 from a step's first reduction on.
    summed = sharded.accumulated_gradients(micro_batches)
    sums = summed if sharded.stage == 3 or micro_batches > 1 else 0
    yield from (replace(m, name=f"micro-batch: {m.name}", gradients=sums, gathered=gathered) for m in row[: len(ops)])
    waiting, full = 0, low * bucket
    buffered = False
    for op, moment in zip(reversed(ops), row[len(ops) :], strict=True):
        buffered = buffered or op.gradient > 0
        held = sums + (full if buffered else 0)
        yield replace(moment, name=f"micro-batch: {moment.name}", gradients=held, gathered=gathered)
        waiting += op.gradient
        if waiting >= full:
            waiting, sums = 0, summed
            kept = max(0, moment.activations - op.kept)
            yield Moment("gradient reduction", sums + full, kept, transient=copies, gathered=gathered)
    yield Moment("gradient reduction", summed + full, transient=copies, gathered=gathered)
    reduced = FP32 * sum(sharded.partitions)
    if sharded.stage == 3:
        yield Moment("optimizer step", reduced, transient=FP32 * max(sharded.partitions))
    else:
        copied = 0 if cuda else low * max(sharded.partitions) * sharded.ranks
        yield Moment("weight all-gather", max(reduced, summed), transient=copied)
