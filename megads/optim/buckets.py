"""How a rank's parameters lie in flat buckets: which travel together, in which order, and which slice is whose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        begins: place of the first one among all of the rank's parameters in that order.
        numel: length of the flat buffer, a multiple of the ranks that share it.
    """

    slots: tuple[Slot, ...]
    begins: int
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
    open_buckets: dict[tuple[Role, bool], list[int]] = {}
    closed: list[list[int]] = []
    backward = list(reversed(members))
    for place, member in enumerate(backward):
        kind = (member.role, member.partial)
        filling = open_buckets.setdefault(kind, [])
        filling.append(place)
        if sum(backward[p].numel for p in filling) >= bucket_elements:
            closed.append(open_buckets.pop(kind))
    closed += open_buckets.values()
    return [_lay_out(backward, places, ranks) for places in sorted(closed, key=lambda places: places[-1])]


def _lay_out(backward: Sequence[Member], places: Sequence[int], ranks: int) -> BucketLayout:
    slots, end = [], 0
    for place in places:
        slots.append(Slot(backward[place], end))
        end = _align(end + backward[place].numel, ALIGNMENT)
    return BucketLayout(tuple(slots), places[0], _align(end, ALIGNMENT * ranks))


def _align(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


BUCKET_ELEMENTS = 50_000_000
"""Gradients are reduced, and ZeRO-3's weights gathered ahead, by this many elements: 200 MB in fp32."""

BUCKETS = 4
"""A small model is cut into about so many buckets, for otherwise copies of a whole one are all that ZeRO saves."""


def bucket_elements(sizes: Collection[int]) -> int:
    """Elements of a bucket: at least the largest parameter, whatever its size.

    Args:
        sizes: elements of every parameter of a rank.
    """
    return max(*sizes, min(BUCKET_ELEMENTS, sum(sizes) // BUCKETS))
