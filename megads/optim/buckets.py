"""How a rank's parameters lie in flat buckets: which travel together, in which order, and which slice is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megads.optim.groups import Role

ALIGNMENT = 64
"""Elements: every parameter and every rank's slice starts at a multiple, 128 bytes in bf16, so that kernels and NCCL
read whole cache lines."""


@dataclass(frozen=True)
class Member:
    """A parameter as a rank holds it.

    Attributes:
        name: in the whole model.
        numel: local elements, vocabulary padding included.
        role: how the optimizer treats it.
        partial: its gradient on a rank covers that rank's sequence shard only.
    """

    name: str
    numel: int
    role: Role
    partial: bool = False


@dataclass(frozen=True)
class Slot:
    """Elements [start, start + member.numel) of a bucket."""

    member: Member
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.member.numel


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of one role whose gradients are reduced in one collective.

    Attributes:
        slots: in the order of the backward pass; gaps between them are zero.
        numel: length of the flat buffer, a multiple of the ranks that share it.
    """

    slots: tuple[Slot, ...]
    numel: int

    @property
    def role(self) -> Role:
        return self.slots[0].member.role

    @property
    def partial(self) -> bool:
        return self.slots[0].member.partial

    def slice_of(self, rank: int, ranks: int) -> range:
        """Elements that belong to one of the ranks that share the bucket."""
        size = self.numel // ranks
        return range(rank * size, (rank + 1) * size)


def bucket_layouts(members: Sequence[Member], ranks: int, bucket_elements: int) -> list[BucketLayout]:
    """Cuts a rank's parameters into buckets.

    A bucket is closed once it holds `bucket_elements`; a parameter is never cut, so a large one has a bucket of its own
    or with what came just before it. Roles do not mix, as they decay differently, and neither do partial gradients with
    whole ones. The tied embedding is therefore alone, and its bucket alike on both stages that hold it.

    Args:
        members: in the order of the forward pass.
        ranks: ranks that share every bucket.
        bucket_elements: size at which a bucket is closed.

    Returns:
        Buckets in the order in which a backward pass completes them.
    """
    open_buckets: dict[tuple[Role, bool], list[Member]] = {}
    done: list[BucketLayout] = []
    backward = list(reversed(members))
    for member in backward:
        kind = (member.role, member.partial)
        filling = open_buckets.setdefault(kind, [])
        filling.append(member)
        if sum(m.numel for m in filling) >= bucket_elements:
            done.append(_lay_out(open_buckets.pop(kind), ranks))
    done += [_lay_out(left, ranks) for left in open_buckets.values()]
    place = {member.name: index for index, member in enumerate(backward)}
    return sorted(done, key=lambda bucket: place[bucket.slots[-1].member.name])


def _lay_out(members: Sequence[Member], ranks: int) -> BucketLayout:
    slots, end = [], 0
    for member in members:
        slots.append(Slot(member, end))
        end = _align(end + member.numel, ALIGNMENT)
    return BucketLayout(tuple(slots), _align(end, ALIGNMENT * ranks))


def _align(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple
