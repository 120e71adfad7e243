"""Memory of a rank over a step: per operation of a pass, over a pipeline schedule, and under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megads.api import ActionKind, Schedule
from megads.optim.groups import ParameterRates, Role, bucket_elements
from megads.parallel.config import SMALLEST_OFFLOADED_BYTES
from megads.parallel.pipeline_actions import Action
from megads.tools.plan.micro_batch import FP32


@dataclass(frozen=True)
class Op:
    """Memory of one operation; all sizes in bytes.

    Attributes:
        name: display name.
        kept: tensors saved for the backward pass, inputs included, or held by the engine until then. Each tensor is
            counted once, at the first operation in forward order that needs it in backward.
        forward: peak of temporaries in the forward pass, on top of everything kept so far, this operation included. The
            output is included unless it is kept.
        backward: peak of temporaries in the backward pass, on top of everything kept up to this operation, itself
            included; the weight gradient is excluded.
        arriving: output gradient included in `backward` that is freed before the weight gradient is accumulated into
            main_grad; 0 if negligible.
        gradient: weight gradient computed by the backward pass, before it is accumulated into main_grad.
        early: weight gradient computed and accumulated by the forward pass.
        in_main_grad: whether `gradient` is computed directly in main_grad, without a temporary.
        deferred: tensors held for a deferred wgrad (input and output gradient); 0 if wgrad cannot be deferred.
        shared: whether an operation that comes earlier in the backward pass has the same weight.
        is_loss: whether its tensors count as the loss's.
        block: number of its block in the stage; None: it belongs to none.
        leaves: part of `kept` that moves to the host after the block's forward pass.
    """

    name: str
    kept: int = 0
    forward: int = 0
    backward: int = 0
    arriving: int = 0
    gradient: int = 0
    early: int = 0
    in_main_grad: bool = False
    deferred: int = 0
    shared: bool = False
    is_loss: bool = False
    block: int | None = None
    leaves: int = 0


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment, permanent allocations excluded; all sizes in bytes.

    Attributes:
        name: the operation and its pass.
        gradients: main_grad, and this rank's shard of reduced gradients.
        activations: tensors kept for backward by all micro-batches in flight, the loss's excluded.
        loss: the loss's tensors, kept or temporary.
        working: temporaries of other operations, including gradients that are not yet accumulated.
        transient: copies made while no micro-batch runs, or for a reduction during the backward pass.
        gathered: weights gathered by ZeRO-3 for the running and prefetched layers.
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
    """Bytes that a micro-batch keeps between its forward and backward pass."""
    return sum(op.kept for op in ops)


def numbered(ops: Sequence[Op], block: int, *, leaves: bool, stays: int) -> list[Op]:
    """Operations of a block of a stage that offloads: what they keep leaves, unless it is small.

    Args:
        ops: operations of the block.
        block: number of the block in its stage.
        leaves: whether this block is offloaded.
        stays: bytes of the block's input, kept by the first operation, if the engine holds it.
    """
    sizes = [op.kept - (0 if index else min(stays, op.kept)) for index, op in enumerate(ops)]
    moved = [size if leaves and size >= SMALLEST_OFFLOADED_BYTES else 0 for size in sizes]
    return [replace(op, block=block, leaves=size) for op, size in zip(ops, moved, strict=True)]


def host_bytes(ops: Sequence[Op]) -> int:
    """Bytes that a micro-batch has on the host between its forward and backward pass."""
    return sum(op.leaves for op in ops)


def _away(ops: Sequence[Op]) -> list[int]:
    """For each operation, the bytes of earlier ones that are not on the device while it runs, in either pass.

    The copies of a block end with the forward pass of the next block, and begin with its backward pass: the block and
    the one before it are on the device.
    """
    by_block: list[int] = []
    away, block = list[int](), -1
    for op in ops:
        if op.block is None:  # before the first block, or after the last one
            block = len(by_block) if by_block else -1
        else:
            block = op.block
            by_block += [0] * (block + 1 - len(by_block))
            by_block[block] += op.leaves
        away.append(sum(by_block[: max(0, block - 1)]))
    return away


def _last_block_bytes(ops: Sequence[Op]) -> int:
    """Bytes of the last block that stay on the device until the rank's next pass, if it is offloaded."""
    last = max((op.block for op in ops if op.block is not None), default=None)
    return sum(op.leaves for op in ops if op.block is not None and op.block == last)


def recomputed(ops: Sequence[Op], *, inputs: int, arriving: int) -> list[Op]:
    """Operations under activation recomputation: only their inputs are kept, and backward reruns their forward pass.

    In the forward pass they are assumed to hold what they would keep until the last one is done. This upper bound never
    determines the peak: the recomputed forward pass holds the same, plus the output gradient.

    Args:
        ops: operations that are recomputed together, in forward order.
        inputs: bytes of their inputs, which are included in what the first one keeps.
        arriving: bytes of the output gradient, which is alive when their backward pass begins.
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


@dataclass(frozen=True)
class MainGradMemory:
    """main_grad (fp32 gradient accumulation over micro-batches), and how gradients are added to it.

    Attributes:
        allocated: allocated bytes of main_grad, given the fp32 bytes of gradients computed so far.
        full: bytes of main_grad when all of it is allocated.
        widening: ratio of fp32 bytes to bytes in the gradient's dtype.
        cast: whether a gradient is cast to fp32 before it is accumulated, as on a CPU.
        in_place: whether wgrad GEMMs of linear layers may accumulate into main_grad while their inputs are alive, as
            megads' GEMMs do.
    """

    allocated: Callable[[int], int]
    full: int = 0
    widening: int = 1
    cast: bool = False
    in_place: bool = False

    def during(self, own: int, elsewhere: int, *, later: bool) -> MainGradMemory:
        """main_grad as a pass sees it, which knows only the gradients that it computes itself.

        Args:
            own: fp32 bytes of gradients computed by earlier passes of the same stage in the step.
            elsewhere: fp32 bytes of gradients computed by the rank's other virtual stages in the step.
            later: whether every weight already has a gradient.
        """
        return replace(self, allocated=lambda made: self.full if later else self.allocated(elsewhere + max(own, made)))


def forward_moments(ops: Sequence[Op], held: int, main_grads: MainGradMemory) -> Iterator[Moment]:
    """Yields the peak moment of each operation in a forward pass, in which kept tensors accumulate.

    Args:
        ops: operations of a micro-batch, in forward order.
        held: bytes kept by other passes.
        main_grads: main_grad of the rank.
    """
    activations, loss, made = held, 0, 0
    for op, away in zip(ops, _away(ops), strict=True):
        made += main_grads.widening * op.early
        activations += 0 if op.is_loss else op.kept
        loss += op.kept if op.is_loss else 0
        there = Moment("", main_grads.allocated(made), activations - away, loss)
        yield _moment(f"{op.name}, forward", op, op.forward, there)


def backward_moments(
    ops: Sequence[Op], held: int, main_grads: MainGradMemory, *, split: bool = False
) -> Iterator[Moment]:
    """Yields the peak moment of each operation in a backward pass; each operation then frees what it kept.

    A weight gradient is accumulated into main_grad and freed immediately. Arguments as in `forward_moments`; `split`:
    wgrads are deferred where possible, which keeps their inputs.
    """
    activations = held + sum(op.kept for op in ops if not op.is_loss)
    loss = sum(op.kept for op in ops if op.is_loss)
    widening = main_grads.widening
    made = widening * sum(op.early for op in ops)
    for op, away in zip(reversed(ops), reversed(_away(ops)), strict=True):
        gradient = 0 if op.in_main_grad or (split and op.deferred) else op.gradient
        running = op.backward + gradient
        adding = running - op.arriving
        if main_grads.cast:  # after the operation has freed what it kept
            adding += max(0, gradient * widening - op.kept)
        name, before = f"{op.name}, backward", Moment("", main_grads.allocated(made), activations - away, loss)
        made += 0 if op.shared or (split and op.deferred) else op.gradient * widening
        after = replace(before, gradients=main_grads.allocated(made))
        fullest = [_moment(name, op, running, after if op.in_main_grad else before), _moment(name, op, adding, after)]
        if main_grads.in_place and op.deferred and gradient:
            fullest.append(_moment(name, op, op.backward, after))
        yield max(fullest, key=lambda m: m.total)
        activations -= 0 if op.is_loss else op.kept
        activations += op.deferred if split else 0
        loss -= op.kept if op.is_loss else 0


def _weight_moments(ops: Sequence[Op], held: int, main_grads: MainGradMemory) -> Iterator[Moment]:
    """Yields the peak moment of each operation while deferred wgrads are computed; see `forward_moments`."""
    activations = held + sum(op.deferred for op in ops)
    widening = main_grads.widening
    made = widening * sum(op.early + (0 if op.deferred or op.shared else op.gradient) for op in ops)
    for op in reversed(ops):
        if op.deferred:
            made += 0 if op.shared else op.gradient * widening
            temporary = op.gradient * (1 + widening if main_grads.cast else 1)
            yield Moment(f"{op.name}, weight gradient", main_grads.allocated(made), activations, working=temporary)
            activations -= op.deferred


def _moment(name: str, op: Op, temporary: int, held: Moment) -> Moment:
    loss, working = (temporary, 0) if op.is_loss else (0, temporary)
    return Moment(name, held.gradients, held.activations, held.loss + loss, working)


def pipeline_moments(
    schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]], main_grads: MainGradMemory
) -> list[Moment]:
    """Peak moments of a rank: one until every weight has its first gradient, one after that.

    Args:
        schedule: pipeline schedule of a step.
        rank: pipeline rank.
        stages: operations of each virtual stage of the rank, by stage number.
        main_grads: main_grad of the rank.
    """
    # Passes that differ only in the bytes held by other passes: only the one with the most of them is looked at.
    most: dict[tuple[ActionKind, int, int, int, bool], int] = {}
    made: dict[int, int] = {}
    done: set[int] = set()
    for action, others in _replay(schedule, rank, stages):
        stage, ops = action.stage, stages[action.stage]
        own = made.get(stage, 0)
        key = action.kind, stage, own, sum(made.values()) - own, len(done) == len(stages)
        most[key] = max(most.get(key, 0), others)
        early = main_grads.widening * sum(op.early for op in ops)
        made[stage] = max(own, early)
        if action.kind in (ActionKind.backward, ActionKind.backward_weight):
            made[stage] = early + main_grads.widening * sum(op.gradient for op in ops if not op.shared)
            done.add(stage)
    fullest: dict[str, Moment] = {}
    for (kind, stage, own, elsewhere, later), others in most.items():
        ops, in_pass = stages[stage], main_grads.during(own, elsewhere, later=later)
        if kind is ActionKind.forward:
            found = forward_moments(ops, others, in_pass)
        elif kind is ActionKind.backward_weight:
            found = _weight_moments(ops, others, in_pass)
        else:
            found = backward_moments(ops, others, in_pass, split=kind is ActionKind.backward_input)
        phase = "later micro-batch" if later else "first micro-batch"
        for moment in found:
            if phase not in fullest or moment.total > fullest[phase].total:
                fullest[phase] = moment
    return [replace(moment, name=f"{phase}: {moment.name}") for phase, moment in fullest.items()]


def _replay(schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]]) -> Iterator[tuple[Action, int]]:
    """Yields each pass of a rank, and the bytes held by other passes."""
    kept = {stage: kept_bytes(ops) - host_bytes(ops) for stage, ops in stages.items()}
    leaving = max(map(_last_block_bytes, stages.values()))
    deferred = {stage: sum(op.deferred for op in ops) for stage, ops in stages.items()}
    held = 0
    for action in schedule.actions[rank]:
        match action.kind:
            case ActionKind.forward:
                yield action, held + (leaving if held else 0)
                held += kept[action.stage]
            case ActionKind.backward_input:
                held -= kept[action.stage]
                yield action, held
                held += deferred[action.stage]
            case ActionKind.backward | ActionKind.backward_weight:
                held -= (deferred if action.kind is ActionKind.backward_weight else kept)[action.stage]
                yield action, held
            case _:
                pass


def most_on_host(schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]]) -> int:
    """Most bytes of offloaded activations of a rank; arguments as in `pipeline_moments`."""
    held = most = 0
    for action in schedule.actions[rank]:
        if action.kind is ActionKind.forward:
            held += host_bytes(stages[action.stage])
        elif action.kind in (ActionKind.backward, ActionKind.backward_input):
            held -= host_bytes(stages[action.stage])
        most = max(most, held)
    return most


@dataclass(frozen=True)
class ShardedWeights:
    """Parameters of a rank under ZeRO-2 or ZeRO-3.

    Attributes:
        stage: ZeRO stage, 2 or 3.
        ranks: number of ranks over which parameters are sharded.
        groups: number of elements of every parameter before sharding, by parameter group, in order.
        weight_bytes: bytes per element of the weights.
    """

    stage: int
    ranks: int
    groups: Mapping[tuple[Role, ParameterRates], Sequence[int]]
    weight_bytes: int

    @property
    def sizes(self) -> list[int]:
        """Number of elements of every parameter."""
        return [size for group in self.groups.values() for size in group]

    @property
    def partitions(self) -> list[int]:
        """Number of elements of each parameter group that this rank updates, padding included."""
        if self.stage == 3:
            return [sum(-(-size // self.ranks) for size in group) for group in self.groups.values()]
        # ZeRO-2 flattens a group and aligns partitions to 4 bytes.
        return [-(-sum(group) // (2 * self.ranks)) * 2 for group in self.groups.values()]

    @property
    def weights(self) -> int:
        """Bytes of the compute-dtype weights that are allocated during the whole run."""
        return self.weight_bytes * sum(self.partitions) * (1 if self.stage == 3 else self.ranks)

    @property
    def bucket(self) -> int:
        """Number of gradient elements per reduction bucket."""
        return bucket_elements(self.sizes)

    def accumulated_gradients(self, micro_batches: int) -> int:
        """Bytes of the gradients that this rank accumulates.

        In fp32, DeepSpeed's ZeRO-2 keeps the full gradient of every parameter of which the rank updates a part, plus
        the micro-batch's gradient of the same size.
        """
        if self.stage == 2 and self.weight_bytes == FP32:
            return FP32 * self._touched() * min(micro_batches, 2)
        return FP32 * sum(self.partitions)

    def _touched(self) -> int:
        """Total elements of the parameters of which a rank updates a part; maximum over ranks."""
        counts = [0] * self.ranks
        for group, partition in zip(self.groups.values(), self.partitions, strict=True):
            offset = 0
            for size in group:
                for rank in range(offset // partition, -(-(offset + size) // partition)):
                    counts[rank] += size
                offset += size
        return max(counts)


def sharded_moments(ops: Sequence[Op], sharded: ShardedWeights, micro_batches: int, *, cuda: bool) -> Iterator[Moment]:
    """Yields the moments of a step: each operation of a micro-batch, and the reductions of its gradients.

    A gradient bucket is in the weights' dtype until it is reduced; the reduction flattens it and casts it to fp32, and
    gloo scatters a copy. ZeRO-3 holds the weights of the running and the prefetched layers, twice while the shards are
    assembled.

    Args:
        ops: operations of a micro-batch, in forward order.
        sharded: parameters of the rank.
        micro_batches: number of micro-batches per step.
        cuda: whether ranks compute on GPUs.
    """
    low, bucket = sharded.weight_bytes, sharded.bucket
    copies = low * bucket
    if sharded.stage == 3:
        copies = FP32 * bucket * (1 if cuda else 2)
    if low < FP32:
        copies += FP32 * bucket
    ahead = min(bucket + max(sharded.sizes), sum(sharded.sizes))
    gathered = 2 * low * ahead if sharded.stage == 3 else 0
    none = MainGradMemory(allocated=lambda _: 0)
    row = [*forward_moments(ops, 0, none), *backward_moments(ops, 0, none)]
    # ZeRO-3 holds accumulated gradients permanently, ZeRO-2 from a step's first reduction on.
    accumulated = sharded.accumulated_gradients(micro_batches)
    main_grads = accumulated if sharded.stage == 3 or micro_batches > 1 else 0
    yield from (
        replace(m, name=f"micro-batch: {m.name}", gradients=main_grads, gathered=gathered) for m in row[: len(ops)]
    )
    waiting, full = 0, low * bucket
    buffered = False
    for op, moment in zip(reversed(ops), row[len(ops) :], strict=True):
        buffered = buffered or op.gradient > 0
        held = main_grads + (full if buffered else 0)
        yield replace(moment, name=f"micro-batch: {moment.name}", gradients=held, gathered=gathered)
        waiting += op.gradient
        if waiting >= full:
            waiting, main_grads = 0, accumulated
            kept = max(0, moment.activations - op.kept)
            yield Moment("gradient reduction", main_grads + full, kept, transient=copies, gathered=gathered)
    yield Moment("gradient reduction", accumulated + full, transient=copies, gathered=gathered)
    reduced = FP32 * sum(sharded.partitions)
    if sharded.stage == 3:
        yield Moment("optimizer step", reduced, transient=FP32 * max(sharded.partitions))
    else:
        copied = 0 if cuda else low * max(sharded.partitions) * sharded.ranks
        yield Moment("weight all-gather", max(reduced, accumulated), transient=copied)
