"""Memory of a rank under ZeRO-2 and ZeRO-3, which shard gradients and weights: no pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megads.optim.groups import Role, bucket_elements
from megads.plan.micro_batch import FP32
from megads.plan.tape import Moment, Op, moments


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
    groups: Mapping[Role, Sequence[int]]
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
